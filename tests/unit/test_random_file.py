"""Files of random weights: they load, and their values are what they say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from jaxllm import LLM
from jaxllm.bench.random_file import DEVIATION, random_blocks, write
from jaxllm.gguf.blocks import BLOCK_TYPES


@pytest.mark.parametrize("kind", BLOCK_TYPES, ids=lambda kind: kind.name)
def test_values_lie_around_zero(kind: GGMLQuantizationType) -> None:
    values = dequantize(random_blocks(kind)[:4096], kind)
    assert values.std() == pytest.approx(DEVIATION, rel=0.05)
    assert abs(values.mean()) < DEVIATION / 8  # Q4_0 has one code more below zero


def test_a_file_loads_and_stays_quantised(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    write("small", GGMLQuantizationType.Q4_K, path)
    found = []
    for weights in ("quantised", "dequantised"):
        llm = LLM.from_gguf(path, weights=weights, ctx=64, progress=False)
        found.append((llm.logits([1, 2, 3]), llm.plan.weight_bytes(0)))
    (quantised, few), (exact, many) = found
    assert few < many / 5
    assert np.square(quantised - exact).sum() / np.square(exact).sum() < 1e-10
