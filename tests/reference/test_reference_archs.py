"""Random models of many architectures against llama.cpp's float32 logits."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archs
from jaxllm import LLM
from support import feed, nmse, step

LIMIT = 1e-9
NAMES = (
    "llama",
    "llama-dense",
    "llama-moe",
    "llama-tied-ropefreqs",
    "qwen2-dense",
    "qwen3",
    "qwen3-dense",
    "gemma2",
    "gemma3",
    "gemma3-linear8",
    "gemma3-pattern4",
)
# A few that cover what differs most; the others are in DENSE.
QUICK = (
    "bitnet-dense",
    "bloom-dense",
    "gemma4-e",
    "muse-glimmer",
    "olmo2-dense",
    "phi3-dense",
    "stablelm-dense",
)
DENSE = (
    "apertus-dense",
    "arcee-dense",
    "baichuan-dense",
    "chatglm-dense",
    "codeshell-dense",
    "cogvlm-dense",
    "cohere2-dense",
    "command-r-dense",
    "deci-dense",
    "ernie4_5-moe",
    "exaone-dense",
    "exaone4-dense",
    "falcon-dense",
    "gemma-dense",
    "gemma3n-dense",
    "gemma4",
    "glm4-dense",
    "gpt2-dense",
    "gptneox-dense",
    "granite-dense",
    "granite_swa-dense",
    "granitemoe-dense",
    "hunyuan-dense-dense",
    "hunyuan_vl-dense",
    "internlm2-dense",
    "jais-dense",
    "jais2-dense",
    "maincoder-dense",
    "minicpm-dense",
    "mistral3-dense",
    "mpt-dense",
    "nanbeige-dense",
    "nemotron-dense",
    "olmo-dense",
    "openelm-dense",
    "orion-dense",
    "paddleocr-moe",
    "pangu-embedded-dense",
    "phi2-dense",
    "plamo-dense",
    "plamo3-dense",
    "pockettts-dense",
    "qwen-dense",
    "qwen2vl-dense",
    "qwen3vl-dense",
    "refact-dense",
    "seed_oss-dense",
    "smollm3-dense",
    "starcoder-dense",
    "starcoder2-dense",
    "talkie-dense",
    "xverse-dense",
)
# llama.cpp ran in a context above this model's original one, where it has other factors.
CONTEXT = {"phi3-dense": 256}
LIMITS = {"gemma3n-dense": 1e-7}  # gates near the cut amplify rounding
QUANTISED = ("llama-Q4_0", "llama-Q4_K", "llama-Q6_K", "llama-Q8_0")
# Pages and chunks far smaller than the prompt: it crosses them and the sliding windows.
SMALL = dict(ctx=128, page=16, ubatch=32, group_pages=2)
ENGINES: dict[str, dict[str, Any]] = {
    "fused": dict(ctx=128),
    "fused-small": SMALL,
    "staged": dict(engine="staged", **SMALL),
    "host": dict(kv="host", **SMALL),
    "uneven": dict(
        kv="host", devices=3, split_mode="tensor", attn_split="2,1,0", **(SMALL | {"ubatch": 16})
    ),
}


@cache
def _spec(name: str) -> Path:
    assert archs.SHARED is not None
    return archs.write(archs.SHARED / "archs" / "specs" / f"{name}.json.gz")


def _load(path: Path, **arguments: Any) -> LLM:
    return LLM.from_gguf(path, **(dict(devices=1, dtype="float32", progress=False) | arguments))


def _reference(shared: Path, name: str) -> dict[str, np.ndarray]:
    """The logits of a model, those of an exact GELU where llama.cpp rounds its own."""
    with np.load(shared / "archs" / "refs" / f"{name}.npz") as full:
        arrays = {key: full[key] for key in full.files if key != "meta"}
    return arrays | {
        key.removesuffix("_exact_gelu"): value
        for key, value in arrays.items()
        if key.endswith("_exact_gelu")
    }


def _check(llm: LLM, reference: Mapping[str, np.ndarray], limit: float = LIMIT) -> None:
    """The prompt at once and sixteen greedy tokens one by one."""
    tokens = reference["tokens"].tolist()
    rows = reference.get("rows", np.arange(len(tokens)))
    try:
        prompt = feed(llm, 0, tokens)
        assert nmse(prompt[rows], reference["logits"]) <= limit
        found = [
            step(llm, [token], [len(tokens) + i])[0]
            for i, token in enumerate(reference["greedy_ids"].tolist())
        ]
        assert nmse(np.asarray(found), reference["greedy_logits"]) <= limit
    finally:
        llm.engine.release(0)


@pytest.mark.smoke
@pytest.mark.parametrize("name", sorted(path.stem for path in archs.DATA.glob("*.npz")))
def test_one_of_a_family(name: str):
    with np.load(archs.DATA / f"{name}.npz") as file:
        reference = {key: file[key] for key in file.files}
    path = archs.write(archs.DATA / f"{name}.json.gz")
    _check(_load(path, **ENGINES["fused"]), reference)
    _check(_load(path, **ENGINES["host"]), reference)


def _cases(everywhere: tuple[str, ...], some: tuple[str, ...], of: tuple[str, ...]) -> list[Any]:
    """(name, engine): engines `everywhere` for every name, and `some` for those `of` them."""
    return [
        pytest.param(name, engine, marks=pytest.mark.xdist_group(f"arch-{name}"))
        for name in NAMES
        for engine in (*everywhere, *(some if name in of else ()))
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "engine"),
    _cases(
        ("fused", "host"),
        ("fused-small", "staged", "uneven"),
        ("llama", "llama-moe", "qwen3", "gemma3-pattern4"),
    ),
)
def test_logits(name: str, engine: str, shared: Path):
    _check(_load(_spec(name), **ENGINES[engine]), _reference(shared, name))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in DENSE)]
)
@pytest.mark.filterwarnings("ignore:the context")  # some were trained for less
def test_dense(name: str, shared: Path):
    """On one device, and with heads and columns dealt out in other shares."""
    reference, ctx = _reference(shared, name), CONTEXT.get(name, 128)
    for engine in ("fused", "uneven"):
        arguments = ENGINES[engine] | {"ctx": ctx}
        _check(_load(_spec(name), **arguments), reference, LIMITS.get(name, LIMIT))


@pytest.mark.parametrize(
    ("name", "engine"), _cases(("host",), ("fused-small",), ("llama", "llama-moe", "gemma3"))
)
def test_ragged_batch(name: str, engine: str, shared: Path):
    """Three sequences of other lengths decode together; each is what it is alone."""
    reference = _reference(shared, name)
    llm = _load(_spec(name), parallel=3, **ENGINES[engine])
    lengths = reference["seq3_lens"].tolist()
    stops = np.cumsum(lengths)
    parts = np.split(reference["tokens"], stops[:-1])
    alone = [feed(llm, row, part.tolist()) for row, part in enumerate(parts)]
    assert nmse(np.concatenate(alone), reference["seq3_logits_separate"]) <= LIMIT
    together = []
    for i, tokens in enumerate(reference["seq3_greedy_ids"].T.tolist()):
        together.append(step(llm, tokens, [n + i for n in lengths]))
    for row in range(3):
        llm.engine.release(row)
    # The file holds ids of these steps, not logits: each step's choice is the next one's token.
    chosen = np.asarray(together).argmax(-1).T
    np.testing.assert_array_equal(chosen[:, :-1], reference["seq3_greedy_ids"][:, 1:])
    for row, part in enumerate(parts):
        whole = [*part.tolist(), *reference["seq3_greedy_ids"][row].tolist()]
        [expected] = [llm.logits(whole)[lengths[row] :]]
        assert nmse(np.asarray(together)[:, row], expected) <= LIMIT


@pytest.mark.parametrize("engine", ["fused", "staged"])
@pytest.mark.parametrize("name", ["llama-dense", "qwen2-dense"])
def test_repeated_heads(name: str, engine: str):
    """Two KV heads over four devices, each stored twice; biases are repeated with their heads."""
    with np.load(archs.DATA / f"{name}.npz") as file:
        reference = {key: file[key] for key in file.files}
    cut = dict(devices=4, split_mode="tensor", kv_replicate=True, engine=engine)
    llm = _load(archs.write(archs.DATA / f"{name}.json.gz"), **cut, **SMALL)
    assert [layer.replication for layer in llm.plan.layers] == [2] * 4
    _check(llm, reference)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["dequantised", "quantised"])
@pytest.mark.parametrize("engine", ["fused", "host"])
@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_file(name: str, engine: str, weights: str, shared: Path):
    path = shared / "archs" / "quant" / f"{name}.gguf"
    with np.load(path.with_suffix(".npz")) as full:
        reference = {
            key.removesuffix("_dequant_f32"): full[key]
            for key in full.files
            if key.endswith("_dequant_f32") or key == "tokens"
        }
    _check(_load(path, weights=weights, **ENGINES[engine]), reference, 1e-10)
