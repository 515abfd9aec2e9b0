"""Generation: requests take rows, are prefilled in chunks, and decode together.

A row is prefilled alone, in programs of one row, and decodes in programs of all rows; so what a
request computes never depends on its neighbours. A row whose request ends is released and taken by
the next request at once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from jaxllm.engine.base import Engine
from jaxllm.engine.sampling import Logprob, Sampler, SamplingParams, common_top

FinishReason = Literal["stop", "length", "context"]
SMALLEST_CHUNK = 16


def chunk_sizes(ubatch: int) -> tuple[int, ...]:
    """Token counts that prefill programs exist for: powers of four from 16 up to `ubatch`."""
    sizes = []
    size = SMALLEST_CHUNK
    while size < ubatch:
        sizes.append(size)
        size *= 4
    return (*sizes, ubatch)


def chunks(start: int, count: int, ubatch: int) -> Iterator[tuple[int, int, int]]:
    """(position, tokens, program size) of each chunk of `count` tokens from `start` on.

    A chunk's program never reaches across a multiple of `ubatch`: a ring writes it as one slice.
    """
    at, end = start, start + count
    while at < end:
        fitting = [n for n in chunk_sizes(ubatch) if at % ubatch + n <= ubatch]
        size = next((n for n in fitting if n >= end - at), fitting[-1])
        used = min(size, end - at)
        yield at, used, size
        at += used


def prefill(
    engine: Engine, row: int, ids: Sequence[int], ubatch: int
) -> Iterator[tuple[Any, int, int]]:
    """Run a prompt through row `row`; each chunk's hidden states, tokens and program size."""
    tokens = np.asarray(ids, np.int32)
    for at, used, size in chunks(0, len(ids), ubatch):
        padded = np.zeros((1, size), np.int32)
        padded[0, :used] = tokens[at : at + used]
        hidden = engine.forward(padded, row, np.asarray([at], np.int32))
        engine.settle(row, np.asarray([at + used]))
        yield hidden, used, size


@dataclass
class Request:
    """One completion in the making. Times are in seconds."""

    index: int
    prompt: Sequence[int]
    params: SamplingParams
    eog: frozenset[int]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0
    cancelled: bool = False  # set by the consumer, say at a stop text

    def __post_init__(self) -> None:
        self.sampler = Sampler(self.params, self.prompt)

    @property
    def length(self) -> int:
        """Positions taken: the prompt and the tokens that have been fed back."""
        return len(self.prompt) + max(0, len(self.token_ids) - 1)

    def accept(self, token: int, logprob: Logprob | None, ctx: int) -> None:
        """Add a token and see whether it ends the completion."""
        if token in self.eog and not self.params.ignore_eos:
            self.finish_reason = "stop"
            return
        self.token_ids.append(token)
        if logprob is not None:
            self.logprobs.append(logprob)
        if len(self.token_ids) >= self.params.max_tokens:
            self.finish_reason = "length"
        elif len(self.prompt) + len(self.token_ids) > ctx:
            self.finish_reason = "context"


def generate(
    engine: Engine, requests: Sequence[Request], slots: int, ctx: int, ubatch: int
) -> Iterator[tuple[Request, int | None]]:
    """Work off requests; yields (request, token) for every new token and (request, None) at its
    end. Who stops early, or is stopped by an exception, releases the rows."""
    waiting = deque(requests)
    rows: list[Request | None] = [None] * slots
    while waiting or any(rows):
        for row in range(slots):
            while rows[row] is None and waiting:
                rows[row] = waiting.popleft()
                yield from _start(engine, row, rows, ctx, ubatch)
        if any(rows):
            yield from _advance(engine, rows, ctx)


def _start(
    engine: Engine, row: int, rows: list[Request | None], ctx: int, ubatch: int
) -> Iterator[tuple[Request, int | None]]:
    request = rows[row]
    assert request is not None
    began = time.perf_counter()
    *_, (hidden, used, _) = prefill(engine, row, request.prompt, ubatch)
    logits = engine.logits(hidden, np.asarray([[used - 1]]), request.params.top)
    request.prompt_seconds = time.perf_counter() - began
    yield from _take(engine, row, rows, logits, 0, ctx)


def _advance(
    engine: Engine, rows: list[Request | None], ctx: int
) -> Iterator[tuple[Request, int | None]]:
    began = time.perf_counter()
    tokens = np.asarray([[r.token_ids[-1] if r else 0] for r in rows], np.int32)
    starts = np.asarray([r.length if r else 0 for r in rows], np.int32)
    active = [r for r in rows if r is not None]
    hidden = engine.forward(tokens, 0, starts)
    top = common_top([r.params for r in active])
    logits = engine.logits(hidden, np.zeros((len(rows), 1), np.int32), top)
    engine.settle(0, np.asarray([s + 1 if r else 0 for s, r in zip(starts, rows, strict=True)]))
    spent = time.perf_counter() - began
    for request in active:
        request.decode_seconds += spent
    for row, request in enumerate(list(rows)):
        if request is not None:
            yield from _take(engine, row, rows, logits, row, ctx)


def _take(
    engine: Engine,
    row: int,
    rows: list[Request | None],
    logits: Any,
    index: int,
    ctx: int,
) -> Iterator[tuple[Request, int | None]]:
    request = rows[row]
    assert request is not None
    count = len(request.token_ids)
    request.accept(*request.sampler.next(logits, index), ctx)
    if len(request.token_ids) > count:
        yield request, request.token_ids[-1]
    if request.finish_reason is not None or request.cancelled:
        rows[row] = None
        engine.release(row)
        yield request, None
