"""Copies under computation: a decode step takes as long as the slower of the two, not their sum.

Links are simulated, at rates that follow from what this machine computes. What is compared are
medians of steps with and without links in turn, so that a busy moment meets both; rounds of them
may be spoilt, but not six. One of the two takes far longer, so that other work on the machine
matters little.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

from jaxllm.testing import random_llm, simulate_links, small_config
from sharding import Mesh
from sharding.cost import CostModel, calibrated
from sharding.links import with_links
from support import feed, random_ids

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("links")]
PROMPT = 130  # eight full pages a layer
MODEL = small_config(layers=4, kv_heads=4, k_dim=32, embed=512, mlp=3072)
CUTS: dict[str, dict[str, Any]] = {
    "one": dict(devices=1),
    "tensor": dict(devices=2, split_mode="tensor", attn_split="3,1", tensor_split="1,1"),
    # Devices compute one after another: a link works through the other's turn if its device has
    # room for what is sent meanwhile.
    "layer": dict(devices=2, split_mode="layer", prefetch=8, group_pages=2),
    "shared": dict(devices=1, parallel=3),  # rows that begin alike: their pages are sent once
}


class Times(NamedTuple):
    """Seconds: of the computation alone, of the longest and of all links, of a step."""

    compute: float
    link: float
    links: float
    step: float


class Decoding:
    """A model in the middle of a text: every step is the same one, at the same position. Further
    rows begin with the full pages of the first."""

    def __init__(self, **cut: Any):
        arguments: dict[str, Any] = dict(ctx=192, kv="host", group_pages=1, prefetch=4)
        self.llm = random_llm(MODEL, **(arguments | cut))
        feed(self.llm, 0, random_ids(PROMPT, MODEL.vocab))
        full = PROMPT // self.llm.plan.options.page * self.llm.plan.options.page
        others = range(1, self.llm.plan.options.slots)
        for row in others:
            self.llm.engine.reuse(0, row, full)
        self.starts = np.asarray([PROMPT, *(full for _ in others)])
        devices = range(len(self.llm.plan.mesh))
        self.bytes = np.asarray([self.llm.plan.link_bytes(d, PROMPT) for d in devices])

    def step(self) -> float:
        engine, began, rows = self.llm.engine, time.perf_counter(), len(self.starts)
        hidden = engine.forward(np.ones((rows, 1), np.int32), 0, self.starts)
        engine.logits(hidden, np.zeros((rows, 1), np.int32), 1)
        return time.perf_counter() - began

    def steps(self, seconds: Sequence[float]) -> list[float]:
        """Steps with links that need so many seconds each for what a step sends."""
        simulate_links(self.llm, (self.bytes / np.asarray(seconds) / 1e9).tolist())
        self.step(), self.step()
        return [self.step() for _ in range(3)]

    def times(self, of_compute: float) -> Times:
        """With links that take a multiple of what the computation does, the second less."""
        free = [1e-9] * len(self.bytes)
        longest = of_compute * float(np.median([self.steps(free) for _ in range(3)]))
        seconds = [longest, 0.8 * longest][: len(free)]
        pairs = [(self.steps(free), self.steps(seconds)) for _ in range(4)]
        compute, step = np.median([np.ravel(each) for each in zip(*pairs, strict=True)], axis=1)
        return Times(float(compute), longest, sum(seconds), float(step))

    def holds(self, law: Callable[[Times], bool], of_compute: float) -> None:
        seen = []
        for _ in range(6):
            seen.append(self.times(of_compute))
            if law(seen[-1]):
                return
        raise AssertionError(seen)


@pytest.mark.parametrize("of_compute", [5.0, 0.1], ids=["links are slower", "computing is slower"])
@pytest.mark.parametrize("cut", CUTS)
def test_a_step_takes_the_longer_of_both(cut: str, of_compute: float):
    def law(t: Times) -> bool:
        return 0.85 < t.step / max(t.compute, t.link) < 1.15

    Decoding(**CUTS[cut]).holds(law, of_compute)


@pytest.mark.parametrize("cut", CUTS)
def test_without_copies_ahead_a_step_takes_the_sum(cut: str):
    def law(t: Times) -> bool:
        return 0.85 < t.step / (t.compute + t.links) < 1.15

    Decoding(**(CUTS[cut] | dict(prefetch=0))).holds(law, 4.0)


@pytest.mark.parametrize("of_compute", [5.0, 0.1], ids=["links are slower", "computing is slower"])
@pytest.mark.parametrize("cut", ["tensor", "layer"])
def test_a_step_takes_what_the_cost_model_says(cut: str, of_compute: float):
    """Computing is scaled to what it takes with links that take no time."""
    decoding = Decoding(**CUTS[cut])

    def law(t: Times) -> bool:
        seconds = t.link, (t.links - t.link)
        rates = decoding.bytes / np.asarray(seconds) / 1e9
        mesh = with_links(Mesh.virtual(2, read_gbps=10.0, tflops=1.0), rates.tolist())
        plan = replace(decoding.llm.plan, mesh=mesh)
        plan = replace(plan, mesh=calibrated(plan, PROMPT, t.compute))
        return 0.85 < t.step * CostModel(plan).decode_rate(PROMPT) < 1.15

    decoding.holds(law, of_compute)


def test_all_links_work_at_once_and_into_the_next_step():
    """When a step ends, the links are at work for the next one, and nothing is sent in vain."""
    decoding = Decoding(**CUTS["layer"])
    streams = decoding.llm.engine.streams
    before = [stream.discarded for stream in streams]
    decoding.steps([0.2, 0.2])
    ends = time.perf_counter()
    for stream in streams:
        assert stream.link.idle_from > ends
    assert [stream.discarded for stream in streams] == before
