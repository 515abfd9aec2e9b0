"""The tests, as llama-bench has them, and the tokens that they run on."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxllm.errors import OptionError

if TYPE_CHECKING:
    from jaxllm.llm import LLM
    from jaxllm.results import Completion


class NotMeasured(Exception):
    """This test cannot be measured with these options; says why."""


class Test(NamedTuple):
    """`prompt` tokens up to the first that follows, or `predict` greedy tokens, or both, of every
    sequence, after `depth` tokens that are not counted."""

    __test__ = False  # for pytest

    prompt: int
    predict: int
    depth: int

    @property
    def name(self) -> str:
        """pp512, tg64 @ d4096, pg512+64."""
        if not self.predict:
            name = f"pp{self.prompt}"
        else:
            name = f"pg{self.prompt}+{self.predict}" if self.prompt else f"tg{self.predict}"
        return f"{name} @ d{self.depth}" if self.depth else name

    @property
    def end(self) -> int:
        """Positions that it needs."""
        return max(self.depth, 1) + self.prompt + self.predict + 1


def make_tests(
    prompts: Sequence[int],
    predicts: Sequence[int],
    both: Sequence[tuple[int, int]],
    depths: Sequence[int],
) -> list[Test]:
    """Every test at every depth, depths in order; 0 tokens leave a test out.

    Raises:
        OptionError: when none is left.
    """
    tests = [
        *(Test(n, 0, depth) for depth in depths for n in prompts if n),
        *(Test(0, n, depth) for depth in depths for n in predicts if n),
        *(Test(*pair, depth) for depth in depths for pair in both),
    ]
    if not tests:
        raise OptionError("no test is left; give -p, -n or -pg more than 0 tokens")
    return sorted(dict.fromkeys(tests), key=lambda test: test.depth)


class Tokens:
    """Random tokens: those of a depth are the same each time, so that their cache is kept; those
    of a prompt never are."""

    def __init__(self, vocab: int, slots: int, depth: int):
        self._random = np.random.default_rng(0)
        self._vocab = vocab
        self._deep = [self.fresh(max(depth, 1)) for _ in range(slots)]

    def fresh(self, count: int) -> list[int]:
        """Tokens that no test had before."""
        return self._random.integers(0, self._vocab, count).tolist()

    def deep(self, depth: int) -> list[list[int]]:
        """So many tokens, by sequence."""
        return [ids[:depth] for ids in self._deep]


def run_test(llm: LLM, tokens: Tokens, test: Test) -> float:
    """One repetition; tokens a second of all sequences together.

    Raises:
        NotMeasured: when a prompt was computed from another depth than the test's.
        OptionError: when the context ends before the test does.
    """
    from jaxllm import SamplingParams

    count = test.predict + 1 if not test.prompt else max(test.predict, 1)
    params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
    if not test.prompt:
        done = llm.generate(tokens.deep(max(test.depth, 1)), params)
        _check_length(done, count, test)
        return sum(each.generation_rate for each in done)
    prompts = [ids + tokens.fresh(test.prompt) for ids in tokens.deep(test.depth)]
    start = perf_counter()
    done = llm.generate(prompts, params)
    seconds = perf_counter() - start
    _check_length(done, count, test)
    kept = min(each.cached_tokens for each in done)
    if kept != test.depth:
        raise NotMeasured(
            f"of {test.depth} earlier tokens {kept} were kept; whole chunks are (-ub, --page), and"
            " none that a sliding window has left"
        )
    return len(done) * (test.prompt + test.predict) / seconds


def keep_depth(llm: LLM, tokens: Tokens, depth: int) -> None:
    """Compute the tokens of a depth, so that what follows finds them."""
    from jaxllm import SamplingParams

    if depth:
        llm.generate(tokens.deep(depth), SamplingParams(max_tokens=1, temperature=0))


def _check_length(done: Sequence[Completion], count: int, test: Test) -> None:
    if any(len(each.token_ids) < count for each in done):
        raise OptionError(f"the context (-c) ends before {test.name} does; raise it")
