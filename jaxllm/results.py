"""What `LLM` returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxllm.engine.generate import FinishReason
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
