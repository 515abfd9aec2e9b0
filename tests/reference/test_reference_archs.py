"""Random models of every architecture that loads against llama.cpp's float32 logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archs
import parity
from parity import SMALL, UNEVEN, check, load, load_model, reference, run
from support import assert_same_bytes, feed, nmse, step

HOST = {"kv": "host"}
# One of each mechanism, for those who run the quick tests alone.
QUICK = ("bloom-dense", "deepseek2-groups", "gpt-oss-yarn", "qwen2moe-moe", "qwen35-dense")
SMOKE = ("gemma3-pattern4", "qwen2-dense")
QUANTISED = (
    *("llama-Q4_0", "llama-Q4_K", "llama-Q6_K", "llama-Q8_0"),
    *("gpt-oss-MXFP4", "qwen35-Q4_K", "qwen35-Q8_0"),
)


def _kept(name: str) -> tuple[Path, parity.Reference]:
    """A model of which the repository has a copy and every eighth of the reference logits."""
    with np.load(archs.DATA / f"{name}.npz") as file:
        return archs.write(archs.DATA / f"{name}.json.gz"), {k: file[k] for k in file.files}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(path.stem, marks=[pytest.mark.smoke] * (path.stem in SMOKE))
        for path in sorted(archs.DATA.glob("*.npz"))
    ],
)
def test_one_of_a_family(name: str):
    path, of = _kept(name)
    check(load(path, ctx=128), of)
    check(load(path, ctx=128, **SMALL, **HOST), of)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.parity)
        for name in parity.models()
    ],
)
@pytest.mark.filterwarnings("ignore:the context")  # some were trained for less
@pytest.mark.filterwarnings("ignore:experts of layers")  # two have some that are not used
def test_architecture(name: str):
    """Split unevenly over host memory, where latent vectors are stored twice; one of each mechanism
    also on one device, the prompt at once and padded."""
    of, limit = reference(name), archs.limit(name)
    check(load_model(name, **UNEVEN, kv_replicate=True), of, limit)
    if name in QUICK:
        check(load_model(name), of, limit)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-oss", "qwen35"])
def test_compiled_as_for_users(name: str, shared: Path):
    """Whole chunks on one device; split, a cache on the devices and one in host memory are the
    same bytes."""
    of = reference(name)
    check(load_model(name), of)
    found = [run(load_model(name, **UNEVEN | place), of) for place in (HOST, {"kv": "device"})]
    assert parity.error(found[0], of) <= archs.limit(name)
    for host, device in zip(*found, strict=True):
        assert_same_bytes(host, device)


@pytest.mark.parametrize(
    ("name", "place"), [("llama", {}), ("gemma3-pattern4", HOST), ("llama-moe", HOST)]
)
def test_ragged_batch(name: str, place: dict[str, Any], shared: Path):
    """Three sequences of other lengths decode together; each is what it is alone."""
    of = reference(name)
    llm = load_model(name, parallel=3, **SMALL, **place)
    lengths = of["seq3_lens"].tolist()
    stops = np.cumsum(lengths)
    parts = np.split(of["tokens"], stops[:-1])
    alone = [feed(llm, row, part.tolist()) for row, part in enumerate(parts)]
    assert nmse(np.concatenate(alone), of["seq3_logits_separate"]) <= 1e-9
    together = []
    for i, tokens in enumerate(of["seq3_greedy_ids"].T.tolist()):
        together.append(step(llm, tokens, [n + i for n in lengths]))
    for row in range(3):
        llm.engine.release(row)
    # The file holds ids of these steps, not logits: each step's choice is the next one's token.
    chosen = np.asarray(together).argmax(-1).T
    np.testing.assert_array_equal(chosen[:, :-1], of["seq3_greedy_ids"][:, 1:])
    for row, part in enumerate(parts):
        whole = [*part.tolist(), *of["seq3_greedy_ids"][row].tolist()]
        [expected] = [llm.logits(whole)[lengths[row] :]]
        assert nmse(np.asarray(together)[:, row], expected) <= 1e-9


@pytest.mark.parametrize("engine", ["fused", "staged"])
def test_repeated_heads(engine: str):
    """Two KV heads over four devices, each stored twice; biases are repeated with their heads."""
    path, of = _kept("qwen2-dense")
    llm = load(path, **parity.split("1,1,1,1", kv="device", kv_replicate=True, engine=engine))
    assert [layer.replication for layer in llm.plan.layers] == [2] * 4
    check(llm, of)


@pytest.mark.parity
@pytest.mark.parametrize("weights", ["dequantised", "quantised"])
@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_file(name: str, weights: str, shared: Path):
    """Also heads that are apart in their tensors, and columns that end within a stored span."""
    path = shared / "archs" / "quant" / f"{name}.gguf"
    llm = load(path, ctx=128, weights=weights, **UNEVEN)
    if weights == "quantised" and "MXFP4" not in name:
        assert not any("dequantised" in note for note in llm.plan.notes)
    check(llm, parity.dequantised_reference(path), 1e-10)
