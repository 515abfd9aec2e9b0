"""Files of random weights load."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType

from jaxllm import LLM
from jaxllm.bench.random_file import write


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
