"""What `LLM` returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxllm.engine.generate import FinishReason, Request
from jaxllm.engine.sampling import Logprob


@dataclass(frozen=True)
class Completion:
    """What a prompt became. `cached_tokens` of the prompt were taken over from an earlier sequence,
    `accepted_tokens` of the completion had been drafted (`spec_type`).
    Rates are computed tokens a second; link bytes are by device label, and those of every request
    that ran at the same time."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    prompt_rate: float
    generation_rate: float
    link_bytes: Mapping[str, int]
    logprobs: tuple[Logprob, ...] | None = None
    cached_tokens: int = 0
    accepted_tokens: int = 0

    @classmethod
    def of(
        cls, request: Request, text: str, stopped: bool, link_bytes: Mapping[str, int]
    ) -> Completion:
        """What has come of a request that is done; `stopped` by a stop text."""
        decoded, read = len(request.token_ids) - 1, len(request.source or request.prompt)
        reason = "stop" if stopped else request.finish_reason
        assert reason is not None
        return cls(
            text=text,
            token_ids=tuple(request.token_ids),
            finish_reason=reason,
            prompt_tokens=read,
            prompt_rate=(read - request.cached) / max(request.prompt_seconds, 1e-9),
            generation_rate=decoded / request.decode_seconds if decoded > 0 else 0.0,
            link_bytes=link_bytes,
            logprobs=None if request.params.logprobs is None else tuple(request.logprobs),
            cached_tokens=request.cached,
            accepted_tokens=request.accepted,
        )


@dataclass(frozen=True)
class Piece:
    """A piece of streamed text and the tokens that it completes; the last one has a finish reason
    and the whole completion."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    completion: Completion | None = None


class StepFn(NamedTuple):
    """A pure decode step and its first arguments; see `LLM.step_fn`."""

    fn: Callable[..., Any]
    params: Any
    cache: Any
