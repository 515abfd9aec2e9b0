"""Prompts through a row, in chunks whose programs exist.

The chunks of a prompt follow from its length and from where it begins alone, never from what runs
between them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from jaxllm import interrupts
from jaxllm.engine.base import Engine, Hidden, Logits
from jaxllm.engine.prefixes import Start

SMALLEST_CHUNK = 16
LOGIT_PLACES = 64  # positions that one head program takes when all are asked for


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
    """Run a prompt through row `row`, which is empty; each chunk's hidden states, tokens and
    program size."""
    for at, used, size in chunks(0, len(ids), ubatch):
        yield _run_chunk(engine, row, ids, at, used, size), used, size


def places(size: int, used: int) -> Iterator[np.ndarray]:
    """Places of a chunk whose logits are made at once, up to those of its used tokens."""
    step = min(size, LOGIT_PLACES)
    yield from (at + np.arange(step) for at in range(0, used, step))


def encode(engine: Engine, row: int, ids: Sequence[int], ubatch: int) -> None:
    """Run a prompt of at most `ubatch` tokens through the encoder, for the decoder's steps of row
    `row`, which is empty."""
    [(_, used, size)] = chunks(0, len(ids), ubatch)
    with interrupts.kept():
        engine.encode(_padded(ids, size), row, used)


class Prefill:
    """A prompt that takes a row and goes through it, so many tokens at a time: `source` through the
    encoder, where the model has one, then `ids` from the end of what the row begins with. Between
    times other rows may step."""

    def __init__(
        self,
        engine: Engine,
        start: Start,
        ids: Sequence[int],
        ubatch: int,
        source: Sequence[int] = (),
    ):
        self.engine, self.row = engine, start.row
        self._hidden: Hidden = None
        self._used = 0  # tokens of the newest step
        self._left: deque[tuple[int, Callable[[], Hidden]]] = deque()  # tokens of each step
        own = engine, start.row
        if start.length:
            self._left.append((0, partial(engine.reuse, start.source, start.row, start.length)))
        else:
            self._left.append((0, partial(engine.release, start.row)))
        if source:
            self._left.append((len(source), partial(encode, *own, source, ubatch)))
        for at, used, size in chunks(start.length, len(ids) - start.length, ubatch):
            self._left.append((used, partial(_run_chunk, *own, ids, at, used, size)))

    @property
    def done(self) -> bool:
        """Whether nothing of the prompt is left."""
        return not self._left

    def advance(self, most: float) -> int:
        """Run the next chunks, as many whole ones as have no more than `most` tokens together; how
        many tokens these have. Where some are left, those that have run are finished."""
        count = 0
        with interrupts.kept():
            self.engine.unpark(self.row)
            while self._left and count + self._left[0][0] <= most:
                self._used, run = self._left.popleft()
                self._hidden = run()
                count += self._used
            if self._left:
                self.engine.wait(self._hidden)
                self.engine.park(self.row)
        return count

    def logits(self, top: int) -> Logits:
        """Those after the last token, once it is done; see `Engine.logits`."""
        with interrupts.kept():
            return self.engine.logits(self._hidden, np.asarray([[self._used - 1]]), top)


def _run_chunk(
    engine: Engine, row: int, ids: Sequence[int], at: int, used: int, size: int
) -> Hidden:
    """Tokens at .. at + used of a prompt, whose earlier ones the row holds, by a program of `size`
    tokens."""
    padded = _padded(ids[at : at + used], size)
    with interrupts.kept():
        hidden = engine.forward(padded, row, np.asarray([at], np.int32), used)
        engine.settle(row, np.asarray([at + used]))
    return hidden


def _padded(ids: Sequence[int], size: int) -> np.ndarray:
    """Tokens as a chunk's program takes them, int32 [1, size]."""
    tokens = np.zeros((1, size), np.int32)
    tokens[0, : len(ids)] = ids
    return tokens
