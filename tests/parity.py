"""Runs of the random models of the folder of references, and llama.cpp's logits of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import archs
import variants
from jaxllm import LLM
from jaxllm.models.registry import FAMILIES
from support import feed, nmse, step

Reference = Mapping[str, np.ndarray]
# llama.cpp ran in a context above these models' original one, where they have other factors.
_CONTEXT = {"minicpm3-dense": 256, "phi3-dense": 256, "phimoe-moe": 256}
# With tests of their own, as llama.cpp's logits are of something else than the file says: it
# chooses blocks of keys with flash attention alone, and keys of equal scores as its heap has them.
# In their place are variants.
OTHERWISE = ("deepseek32-moe", "glm-dsa-moe", "minimax-m3-moe")
# Pages and chunks far smaller than the prompt: it crosses them and the sliding windows.
SMALL = dict(page=16, ubatch=32, group_pages=2)


def split(shares: str, **more: Any) -> dict[str, Any]:
    """Arguments of a tensor split by these shares, the KV cache in host memory."""
    cut = dict(devices=shares.count(",") + 1, split_mode="tensor", tensor_split=shares)
    return cut | SMALL | {"kv": "host"} | more


# Heads and columns by other shares, so that no device can take one for the other.
UNEVEN = split("1,2", attn_split="2,1")


def models() -> tuple[str, ...]:
    """The models that load and have references of what their files say."""
    known = (name for name, arch in archs.architectures().items() if arch in FAMILIES)
    changed = variants.VARIANTS if archs.SHARED else ()
    return (*(name for name in known if name not in OTHERWISE), *changed)


def spec(name: str) -> dict[str, Any]:
    """What a model is made of."""
    if name in variants.VARIANTS:
        return variants.spec(name)
    return archs.read(archs.spec_path(name))


def write(name: str, quantised: bool = False) -> Path:
    """The GGUF file of a model, with its matrices as Q8_0 if `quantised`."""
    return archs.write_spec(spec(name), quantised)


def reference(name: str) -> Reference:
    """The logits of a model, those of an exact GELU where llama.cpp rounds its own; those of
    transformers for a variant."""
    if name in variants.VARIANTS:
        return variants.reference(name)
    assert archs.SHARED is not None
    with np.load(archs.SHARED / "archs" / "refs" / f"{name}.npz") as full:
        arrays = {key: full[key] for key in full.files if key != "meta"}
    return arrays | {
        key.removesuffix("_exact_gelu"): value
        for key, value in arrays.items()
        if key.endswith("_exact_gelu")
    }


def dequantised_reference(path: Path) -> Reference:
    """The logits of a quantised file that lies beside it, those of its values in float32."""
    end = "_dequant_f32"
    with np.load(path.with_suffix(".npz")) as full:
        arrays = {key.removesuffix(end): full[key] for key in full.files if key.endswith(end)}
        return arrays | {"tokens": full["tokens"]}


def context(name: str) -> int:
    """The positions of llama.cpp's context, as far as they matter."""
    return _CONTEXT.get(name, 128)


def load(path: Path, **arguments: Any) -> LLM:
    """A file in float32; on one device unless `arguments` say otherwise."""
    return LLM.from_gguf(path, **(dict(devices=1, dtype="float32", progress=False) | arguments))


def load_model(name: str, **arguments: Any) -> LLM:
    """A model of the references. One that does not decode takes its prompt as a whole."""
    if "ubatch" in arguments and "greedy_ids" not in reference(name):
        arguments["ubatch"] = context(name)
    return load(write(name), **({"ctx": context(name)} | arguments))


def latent(llm: LLM) -> bool:
    """Whether attention has one KV head for all queries, which devices share only if it is stored
    on each (`kv_replicate`)."""
    return any(layer.latent is not None for layer in llm.config.layers)


def run(llm: LLM, of: Reference) -> tuple[np.ndarray, np.ndarray]:
    """Logits [T, V] of the prompt at once and [S, V] of llama.cpp's greedy tokens one by one; none
    of a model that does not decode."""
    tokens = of["tokens"].tolist()
    try:
        prompt = feed(llm, 0, tokens)
        steps = [
            step(llm, [token], [len(tokens) + i])[0]
            for i, token in enumerate(of.get("greedy_ids", np.zeros(0, np.int32)).tolist())
        ]
        return prompt, np.reshape(steps, (-1, prompt.shape[-1]))
    finally:
        llm.engine.release(0)


def rows(of: Reference) -> np.ndarray:
    """The tokens of a prompt after which there are logits."""
    return of.get("rows", np.arange(len(of["tokens"])))


def error(found: tuple[np.ndarray, np.ndarray], of: Reference) -> float:
    """The larger NMSE of both parts of a run."""
    prompt, steps = found
    errors = [nmse(prompt[rows(of)], of["logits"])]
    if len(steps):
        errors.append(nmse(steps, of["greedy_logits"]))
    return max(errors)


def check(llm: LLM, of: Reference, limit: float = 1e-9) -> None:
    """A run is llama.cpp's."""
    assert error(run(llm, of), of) <= limit
