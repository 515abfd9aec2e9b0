"""Measuring one loaded model: warm-up apart, then sides by turns.

All tests of a depth run once unmeasured; what that takes, and how much of it is compiling, is kept
apart. Then every repetition runs each side in turn, so that a machine that slows down slows both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jaxllm.bench.tests import NotMeasured, Test, Tokens, keep_depth, run_test
from jaxllm.errors import ModelError

if TYPE_CHECKING:
    from jaxllm.llm import LLM

OWN = "jaxllm"
COMPILED = "/jax/core/compile/backend_compile_duration"
Side = Callable[[Sequence[Test]], list[float]]  # one repetition of these tests, tokens a second


@dataclass
class Measured:
    """A test of a side: rates in tokens a second, seconds of its first, unmeasured run and of
    compiling in it, and why it was not measured, where it was not."""

    samples: list[float] = field(default_factory=list)
    warmup_seconds: float | None = None
    compile_seconds: float | None = None
    error: str | None = None


Found = dict[tuple[str, Test], Measured]


def measure(
    llm: LLM,
    tests: Sequence[Test],
    repetitions: int,
    peer: tuple[str, Side] | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Found:
    """Rates of all tests, by side; `tell` hears of every run (one more than the repetitions).

    Raises:
        ModelError: for a model with an encoder, of whose prompts a test says nothing.
    """
    if llm.config.encoder:
        raise ModelError(
            f"{llm.config.architecture} has an encoder, and tests are of a decoder's tokens; give "
            "a model without"
        )
    slots, depth = llm.plan.options.slots, max(test.depth for test in tests)
    tokens = Tokens(llm.config.vocab, slots, depth)
    found: Found = {(OWN, test): Measured() for test in tests}
    for deep in dict.fromkeys(test.depth for test in tests):
        mine = [test for test in tests if test.depth == deep]
        keep_depth(llm, tokens, deep)
        for test in mine:
            tell(test.name)
            _warm_up(llm, tokens, test, found[OWN, test])
        if peer is not None:
            peer[1](mine)
            found |= {(peer[0], test): Measured() for test in mine}
        mine = [test for test in mine if found[OWN, test].error is None]
        for _ in range(repetitions):
            for test in mine:
                tell(test.name)
                found[OWN, test].samples.append(run_test(llm, tokens, test))
            if peer is not None:
                for test, rate in zip(mine, peer[1](mine), strict=True):
                    found[peer[0], test].samples.append(rate)
    return found


def _warm_up(llm: LLM, tokens: Tokens, test: Test, into: Measured) -> None:
    with _compiling() as seconds:
        start = time.perf_counter()
        try:
            run_test(llm, tokens, test)
        except NotMeasured as reason:
            into.error = str(reason)
        into.warmup_seconds = time.perf_counter() - start
    into.compile_seconds = sum(seconds)


@contextmanager
def _compiling() -> Iterator[list[float]]:
    """Seconds of every program that is compiled, or read from disk, inside. Several at a time make
    more seconds than pass."""
    import jax

    found: list[float] = []

    def heard(event: str, duration_secs: float, **_: object) -> None:
        if event == COMPILED:
            found.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(heard)
