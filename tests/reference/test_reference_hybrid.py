"""Random models with recurrent layers against llama.cpp's float32 logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_reference_archs import ENGINES, LIMIT, _check, _load, _reference, _spec

from support import feed, nmse, step

NAMES = (
    "bailingmoe3-moe",
    "falcon-h1-dense",
    "granitehybrid-dense",
    "jamba-dense",
    "kimi-k3-moe",
    "kimi-linear-moe",
    "lfm2-dense",
    "lfm2moe-moe",
    "mamba-dense",
    "mamba2-dense",
    "minimax-01-moe",
    "nemotron_h-dense",
    "nemotron_h_moe-dense",
    "plamo2-dense",
    "qwen35",
    "qwen35-dense",
    "qwen35-mtp",
    "qwen35moe",
    "qwen35moe-moe",
    "qwen35moe-mtp",
    "qwen3next",
    "qwen3next-moe",
    "qwen3next-mtp",
)
# Norms of small values and mixtures of residuals magnify rounding, in a few rows a thousandfold.
LIMITS = {"kimi-k3-moe": 1e-8}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "qwen35-dense" else pytest.mark.slow) for n in NAMES]
)
def test_hybrid(name: str, shared: Path):
    """On one device, where the last chunk of the prompt is padded, and with heads, states and
    columns dealt out in other shares, the KV cache in host memory."""
    reference = _reference(shared, name)
    for engine in ("fused", "uneven"):
        llm = _load(_spec(name), **ENGINES[engine])
        assert llm.config.stateful
        _check(llm, reference, LIMITS.get(name, LIMIT))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen35-Q4_K", "qwen35-Q8_0"])
def test_quantised_file(name: str, shared: Path):
    """Heads that are apart in their tensors, and columns that end within a block."""
    path = shared / "archs" / "quant" / f"{name}.gguf"
    with np.load(path.with_suffix(".npz")) as file:
        end = "_dequant_f32"
        reference = {key.removesuffix(end): file[key] for key in file.files if key.endswith(end)}
        reference["tokens"] = file["tokens"]
    for engine in ("fused", "uneven"):
        _check(_load(path, **ENGINES[engine]), reference)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fused", "uneven"])
def test_ragged_batch(engine: str, shared: Path):
    """Rows of other lengths decode together; a row that takes no part keeps its state."""
    reference = _reference(shared, "qwen35")
    llm = _load(_spec("qwen35"), parallel=3, **ENGINES[engine])
    lengths = reference["seq3_lens"].tolist()
    parts = np.split(reference["tokens"], np.cumsum(lengths)[:-1])
    alone = [feed(llm, row, part.tolist()) for row, part in enumerate(parts)]
    assert nmse(np.concatenate(alone), reference["seq3_logits_separate"]) <= LIMIT
    steps = reference["seq3_greedy_ids"].T.tolist()
    for i, tokens in enumerate(steps[:8]):  # one row alone, then the others with it
        starts = [-1, lengths[1] + i, -1]
        llm.engine.forward(np.asarray(tokens, np.int32)[:, None], 0, np.asarray(starts, np.int32))
        llm.engine.settle(1, np.asarray([lengths[1] + i + 1]))
    chosen = []
    for i, tokens in enumerate(steps[:8]):
        fed = [tokens[0], steps[i + 8][1], tokens[2]]
        logits = step(llm, fed, [lengths[0] + i, lengths[1] + 8 + i, lengths[2] + i])
        chosen.append(logits.argmax(-1))
    found, ids = np.asarray(chosen).T, reference["seq3_greedy_ids"]
    np.testing.assert_array_equal(found[[0, 2]], ids[[0, 2], 1:9])
    np.testing.assert_array_equal(found[1, :-1], ids[1, 9:])
