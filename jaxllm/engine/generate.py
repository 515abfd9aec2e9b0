"""Generation: requests take rows, are prefilled in chunks, and decode together.

A row is prefilled alone, in programs of one row, and decodes in programs of all rows; so what a
request computes never depends on its neighbours. One prompt is prefilled after another, and between
two steps of the sequences that run no more of them than `batch` tokens. A row whose request ends
keeps what it holds (`jaxllm.engine.prefixes`) and is free for the next request at once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxllm import interrupts
from jaxllm.engine.base import Engine
from jaxllm.engine.drafting import DraftingEngine
from jaxllm.engine.local import NO_TOKEN
from jaxllm.engine.prefill import Prefill
from jaxllm.engine.prefixes import Held, Rows
from jaxllm.engine.sampling import NO_NUMBERS, Logprob, Sampler, SamplingParams, common_top
from jaxllm.errors import ModelError
from sharding import PlanOptions

FinishReason = Literal["stop", "length", "context"]


@dataclass
class Request:
    """One completion in the making; `source` is what the encoder reads, where the model has one.
    Times are in seconds."""

    index: int
    prompt: Sequence[int]
    params: SamplingParams
    eog: frozenset[int]
    source: Sequence[int] = ()
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    cached: int = 0  # positions of the prompt that were not computed again
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0
    accepted: int = 0  # of its tokens, those that were drafted
    cancelled: bool = False  # set by the consumer, say at a stop text

    def __post_init__(self) -> None:
        self.sampler = Sampler(self.params, self.prompt)

    @property
    def length(self) -> int:
        """Positions taken: the prompt and the tokens that have been fed back. The newest one has
        not been, unless it was followed by a token that ends generation."""
        newest = 1 if self.token_ids and self.finish_reason != "stop" else 0
        return len(self.prompt) + len(self.token_ids) - newest

    def room(self, ctx: int) -> int:
        """Tokens that may still come."""
        most = min(self.params.max_tokens, ctx + 1 - len(self.prompt))
        return most - len(self.token_ids)

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


class _Filling(NamedTuple):
    """A request whose prompt is on its way through a row."""

    request: Request
    prompt: Prefill


def generate(
    engine: Engine, requests: Sequence[Request], rows: Rows, options: PlanOptions
) -> Iterator[tuple[Request, int | None]]:
    """Work off requests; yields (request, token) for every new token and (request, None) at its
    end. Closed early, rows keep what they hold; after an exception the rows in use hold nothing."""
    ctx = options.ctx
    waiting = deque(requests)
    running: list[Request | None] = [None] * rows.slots
    filling: _Filling | None = None
    flight: _Flight | None = None
    room = inf  # tokens of prompts until those that run take a step
    try:
        while waiting or filling or any(running):
            while filling or (waiting and None in running):
                room = min(room, options.prompt_batch) if any(running) else inf
                filling = filling or _begin(engine, rows, running, waiting.popleft(), options)
                room -= _fill(filling, room)
                if not filling.prompt.done:
                    break
                full = filling
                running[full.prompt.row], filling = full.request, None
                yield from _take_first(engine, rows, running, full, ctx)
            before = flight
            if any(r and not r.params.plainly_greedy for r in running) and flight is None:
                yield from _advance(engine, rows, running, ctx)
            elif any(running) and isinstance(engine, DraftingEngine) and engine.count:
                yield from _advance_drafting(engine, rows, running, ctx)
            elif any(running):
                waited_for = filling is not None
                flight = yield from _advance_greedy(engine, rows, running, ctx, flight, waited_for)
            if before is None or flight is not None:  # one has begun, not only ended
                room = inf
    except GeneratorExit:  # it comes between steps
        for row, request in enumerate(running):
            if request is not None:
                _end(engine, rows, running, row, request)
        raise
    finally:
        in_use = [row for row, request in enumerate(running) if request is not None]
        for row in [*in_use, *([filling.prompt.row] if filling else [])]:
            rows.forget(row)
            engine.release(row)


def _begin(
    engine: Engine,
    rows: Rows,
    running: Sequence[Request | None],
    request: Request,
    options: PlanOptions,
) -> _Filling:
    """Choose a row for a request; nothing runs yet."""
    free = [row for row, other in enumerate(running) if other is None]
    start = rows.choose(request.prompt, free, engine.holds)
    request.cached = start.length
    rows.forget(start.row)
    prompt = Prefill(engine, start, request.prompt, options.ubatch, request.source)
    return _Filling(request, prompt)


def _fill(filling: _Filling, room: float) -> int:
    """Run no more than `room` tokens of a prompt; how many that were."""
    began = time.perf_counter()
    count = filling.prompt.advance(room)
    filling.request.prompt_seconds += time.perf_counter() - began
    return count


def _take_first(
    engine: Engine, rows: Rows, running: list[Request | None], filled: _Filling, ctx: int
) -> Iterator[tuple[Request, int | None]]:
    """The token after a prompt that is done."""
    began = time.perf_counter()
    request, row = filled.request, filled.prompt.row
    logits = filled.prompt.logits(request.params.top)
    count = len(request.prompt)
    if rows.keep:
        rows.hold(row, Held(request.prompt, count, count))
    request.prompt_seconds += time.perf_counter() - began
    yield from _take(engine, rows, running, row, logits, 0, ctx)


def _advance(
    engine: Engine, rows: Rows, running: list[Request | None], ctx: int
) -> Iterator[tuple[Request, int | None]]:
    began = time.perf_counter()
    active = [r for r in running if r is not None]
    top = common_top([r.params for r in active])
    tokens, starts = _next_step(running)
    with interrupts.kept():
        hidden = engine.forward(tokens[:, None], 0, starts)
        logits = engine.logits(hidden, np.zeros((len(running), 1), np.int32), top)
        engine.settle(0, starts + 1)
    spent = time.perf_counter() - began
    for request in active:
        request.decode_seconds += spent
    for row, request in enumerate(list(running)):
        if request is not None:
            yield from _take(engine, rows, running, row, logits, row, ctx)


def _next_step(running: Sequence[Request | None]) -> tuple[np.ndarray, np.ndarray]:
    """The newest token of each row and its position, int32 [rows]; -1 for a row without request."""
    tokens = [r.token_ids[-1] if r else 0 for r in running]
    starts = [r.length if r else -1 for r in running]
    return np.asarray(tokens, np.int32), np.asarray(starts, np.int32)


def _advance_drafting(
    engine: DraftingEngine, rows: Rows, running: list[Request | None], ctx: int
) -> Iterator[tuple[Request, int | None]]:
    """Draft, verify and take what each row has then."""
    began = time.perf_counter()
    active = [r for r in running if r is not None]
    tokens, starts = _next_step(running)
    most = np.asarray([r.room(ctx) - 1 if r else 0 for r in running])
    with interrupts.kept():
        found = engine.advance(tokens, starts, most)
    spent = time.perf_counter() - began
    for request in active:
        request.decode_seconds += spent
    for row, request in enumerate(list(running)):
        for i, token in enumerate(found[row]):
            if request is not None and request is running[row]:
                request.accepted += i < len(found[row]) - 1
                yield from _accept(engine, rows, running, row, token, None, ctx)


class _Flight(NamedTuple):
    """Greedy steps under way: the tokens that they will give, all and the last ones, whom, and how
    many steps there are."""

    ids: Any
    last: Any
    requests: list[Request | None]
    steps: int

    @classmethod
    def of(
        cls,
        engine: Engine,
        tokens: Any,
        starts: np.ndarray,
        requests: list[Request | None],
        steps: int,
    ) -> _Flight:
        return cls(*engine.greedy(tokens, starts, steps), requests, steps)


def _advance_greedy(
    engine: Engine,
    rows: Rows,
    running: list[Request | None],
    ctx: int,
    flight: _Flight | None,
    waited_for: bool,
) -> Generator[tuple[Request, int | None], None, _Flight | None]:
    """Take the tokens of steps under way, and start those after them before they are known, so that
    a device need not wait for the host; returned are the steps under way, if there are any. While
    a prompt waits for a step to end, one is started at a time.

    A row that turns out to have ended runs steps in vain, past what it holds.
    """
    began = time.perf_counter()
    active = [r for r in running if r is not None]
    pairs = zip(running, flight.requests if flight else running, strict=True)
    started = any(r is not None and r is not other for r, other in pairs)

    def steps(requests: Sequence[Request | None], taken: int) -> int:
        """How many to start, where so many are under way: none is past a row's last token."""
        room = min(r.room(ctx) for r in requests if r is not None) - taken
        return 1 if waited_for or room < engine.greedy_steps else engine.greedy_steps

    with interrupts.kept():
        if flight is None:
            flight = _Flight.of(engine, *_next_step(running), list(running), steps(running, 0))
        ahead = None
        taken = flight.steps
        going = [r if r is not None and r.room(ctx) > taken else None for r in running]
        if engine.runs_ahead and not started and any(going):
            starts = np.asarray([r.length + taken if r else -1 for r in going], np.int32)
            ahead = _Flight.of(engine, flight.last, starts, going, steps(going, taken))
        ids = engine.read(flight.ids).tolist()
    spent = time.perf_counter() - began
    for request in active:
        request.decode_seconds += spent
    for tokens in ids:
        for row, request in enumerate(flight.requests):
            if request is not None and request is running[row]:
                yield from _accept(engine, rows, running, row, tokens[row], None, ctx)
    return ahead


def _take(
    engine: Engine,
    rows: Rows,
    running: list[Request | None],
    row: int,
    logits: Any,
    index: int,
    ctx: int,
) -> Iterator[tuple[Request, int | None]]:
    request = running[row]
    assert request is not None
    yield from _accept(engine, rows, running, row, *request.sampler.next(logits, index), ctx)


def _accept(
    engine: Engine,
    rows: Rows,
    running: list[Request | None],
    row: int,
    token: int,
    logprob: Logprob | None,
    ctx: int,
) -> Iterator[tuple[Request, int | None]]:
    request = running[row]
    assert request is not None
    if token == NO_TOKEN:
        raise ModelError(NO_NUMBERS)
    count = len(request.token_ids)
    request.accept(token, logprob, ctx)
    if len(request.token_ids) > count:
        yield request, request.token_ids[-1]
    if request.finish_reason is not None or request.cancelled:
        _end(engine, rows, running, row, request)
        yield request, None


def _end(
    engine: Engine, rows: Rows, running: list[Request | None], row: int, request: Request
) -> None:
    """Free a row; what it holds stays for requests to come, if rows are kept."""
    if rows.keep:
        count = len(request.prompt)
        tokens = [*request.prompt, *request.token_ids]
        engine.park(row)
        rows.hold(row, Held(tokens, request.length, count, ended=True))
    else:
        engine.release(row)
    running[row] = None
