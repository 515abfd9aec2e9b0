"""Weights that stay quantised: exact values, and the logits of their dequantised model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGUFWriter
from gguf import GGMLQuantizationType as T
from gguf.quants import dequantize, quantize

from jaxllm import LLM, OptionError
from jaxllm.gguf import open_gguf
from jaxllm.gguf.blocks import BLOCK_TYPES, take_apart
from jaxllm.models.quantised import Quantised
from jaxllm.planning import fit_gguf, plan_gguf
from jaxllm.testing import assert_partition, assert_weights_as_planned
from sharding import DeviceInfo, Mesh
from sharding.errors import FitError
from support import nmse, random_ids, run

RNG = np.random.default_rng(0)
SMALL = dict(dtype="float32", ctx=64, page=16, ubatch=32)
CUTS: dict[str, dict[str, Any]] = {
    "one": dict(devices=1),
    "uneven": dict(devices=3, split_mode="tensor", tensor_split=(2, 1, 0), kv="host"),
    "padded": dict(devices=2, split_mode="tensor", tensor_split=(3, 1), engine="fused"),
}


def stored(kind: T, shape: tuple[int, ...]) -> np.ndarray:
    """Bytes of a random tensor."""
    values = RNG.standard_normal(shape, np.float32) * np.float32(0.05)
    if not kind.name.endswith("_K"):
        return quantize(values, kind)
    block, size = GGML_QUANT_SIZES[kind]
    raw = RNG.integers(0, 256, (*shape[:-1], shape[-1] // block, size), np.uint8)
    halves = (208, 210) if kind is T.Q6_K else (0, 4)  # d, or d and dmin
    scales = RNG.uniform(-1e-3, 1e-3, (*raw.shape[:-1], (halves[1] - halves[0]) // 2))
    raw[..., slice(*halves)] = scales.astype(np.float16).view(np.uint8)
    return raw.reshape(*shape[:-1], -1)


@pytest.mark.parametrize("kind", BLOCK_TYPES, ids=lambda kind: kind.name)
def test_values_are_exact(kind: T):
    raw, x = stored(kind, (6, 512)), RNG.standard_normal(512, np.float32)
    exact = dequantize(raw, kind)
    parts = take_apart(raw, kind)
    whole = Quantised(BLOCK_TYPES[kind], np.dtype(np.float32), parts)
    assert whole.shape == exact.shape
    assert np.asarray(jax.jit(Quantised.values)(whole)).tobytes() == exact.tobytes()
    product = jax.jit(Quantised.product)(whole, x)
    error = np.abs(product - exact.astype(np.float64) @ x)
    assert error.max() <= 2.0**-22 * np.abs(exact).max() * np.abs(x).sum()

    cut = BLOCK_TYPES[kind].cut_at(512, 96)
    assert cut is not None and BLOCK_TYPES[kind].cut_at(8) is None
    empty = {n: np.zeros((2, 416 // p.packs), p.dtype) for n, p in cut.parts.items()}
    part = Quantised(cut, whole.dtype, empty)
    part.fill({name: array[3:5] for name, array in parts.items()}, slice(96, 512))
    assert np.asarray(part.values()).tobytes() == exact[3:5, 96:].tobytes()


HEADS, HEAD_DIM, EMBED, MLP, VOCAB = 4, 64, 256, 512, 130
ROWS = {"attn_q": 256, "attn_k": 256, "attn_v": 256, "attn_output": 256}
DENSE = ROWS | {"ffn_gate": MLP, "ffn_up": MLP, "ffn_down": EMBED}
MIXED = (  # of a layer: the types of its tensors in the order of DENSE
    (T.Q4_K, T.Q4_K, T.Q4_K, T.Q4_K, T.Q4_0, T.Q4_0, T.Q4_K),
    (T.Q8_0, T.Q8_0, T.Q6_K, T.Q8_0, T.Q5_K, T.Q5_K, T.Q4_0),
)


def write(path: Path, layers: tuple[tuple[T, ...], ...], experts: int = 0) -> Path:
    """The file of a small random llama with tied ends."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(len(layers))
    writer.add_context_length(128)
    writer.add_embedding_length(EMBED)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(2)

    def add(name: str, kind: T, *shape: int) -> None:
        writer.add_tensor(f"{name}.weight", stored(kind, shape), raw_dtype=kind)

    def plain(name: str, *shape: int) -> None:
        writer.add_tensor(f"{name}.weight", RNG.uniform(0.5, 1.5, shape).astype(np.float32))

    add("token_embd", T.Q8_0, VOCAB, EMBED)
    plain("output_norm", EMBED)
    for i, kinds in enumerate(layers):
        for (name, rows), kind in zip(DENSE.items(), kinds, strict=True):
            columns = MLP if name == "ffn_down" else EMBED
            of_experts = bool(experts) and name.startswith("ffn")
            lead, suffix = ((experts,), "_exps") if of_experts else ((), "")
            add(f"blk.{i}.{name}{suffix}", kind, *lead, rows, columns)
        plain(f"blk.{i}.attn_norm", EMBED)
        plain(f"blk.{i}.ffn_norm", EMBED)
        if experts:
            plain(f"blk.{i}.ffn_gate_inp", experts, EMBED)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(path: Path, **arguments: Any) -> LLM:
    return LLM.from_gguf(path, progress=False, **(SMALL | arguments))


def logits(llm: LLM) -> np.ndarray:
    """Of a prompt in chunks and of steps of one row."""
    return run(llm, random_ids(40, VOCAB), [5, 7, 11]).logits


@pytest.mark.parametrize(
    ("layers", "experts"), [(MIXED, 0), (MIXED[:1], 4)], ids=["dense", "experts"]
)
def test_logits_of_every_cut(layers: tuple[tuple[T, ...], ...], experts: int, tmp_path: Path):
    path = write(tmp_path / "model.gguf", layers, experts)
    expected = logits(load(path, devices=1))
    for name, cut in CUTS.items():
        llm = load(path, weights="quantised", **cut)
        assert_partition(llm.plan)
        assert_weights_as_planned(llm)
        assert nmse(logits(llm), expected) <= 1e-11, name
        dequantised = [note for note in llm.plan.notes if "dequantised" in note]
        assert len(dequantised) == len(layers) - 1
        assert all("blk.1.qkv.weight is" in note and "Q6_K, Q8_0" in note for note in dequantised)


def test_bytes_are_those_of_the_file(tmp_path: Path):
    path = write(tmp_path / "model.gguf", MIXED[:1])
    kinds: Mapping[str, Any] = {
        w: load(path, devices=1, weights=w) for w in ("dequantised", "quantised")
    }
    bytes_ = {name: llm.plan.weight_bytes(0) for name, llm in kinds.items()}
    assert bytes_["quantised"] < 1.05 * path.stat().st_size < bytes_["dequantised"] / 4


def test_a_fit_counts_them(tmp_path: Path):
    """On devices too small for dequantised weights; what is loaded takes what the fit counts. A
    group of 64 columns is a part of a block of 256, so a cut holds other arrays than one device."""
    file = open_gguf(write(tmp_path / "model.gguf", MIXED[:1]))
    free = (64 << 20) + 3_000_000  # beside the reserve
    rates = dict(read_gbps=9.0, tflops=1.0, link_gbps=1.0)
    mesh = Mesh(tuple(DeviceInfo(f"gpu:{i}", memory=free, free=free, **rates) for i in range(2)))
    asked = dict(ctx=128, page=16, group_pages=1, dtype="float32", ubatch=16)
    for mode in ("none", "layer", "tensor"):
        found = fit_gguf(file, mesh, weights="quantised", split_mode=mode, **asked)
        plan = plan_gguf(file, mesh, **found.arguments()).plan
        for device in range(2):
            assert plan.weight_bytes(device) == found.plan.weight_bytes(device)
            assert plan.needed_bytes(device) == found.plan.needed_bytes(device)
    with pytest.raises(FitError, match="weights take 2[0-9]{6} bytes.*; --weights quantised keeps"):
        fit_gguf(file, mesh, split_mode="none", **asked)
    with pytest.raises(OptionError, match="weights must be one of"):
        fit_gguf(file, mesh, weights="packed", **asked)


def test_what_is_refused(tmp_path: Path):
    with pytest.raises(OptionError, match="weights must be one of .* not 'packed'"):
        load(write(tmp_path / "model.gguf", MIXED[:1]), devices=1, weights="packed")
