"""The published runs of tests/data/host_cache_tables.json as plans, for tests of the cost model.

The file is the reference tables' own (`seed_tables.json` of the folder of references): llama.cpp
with its cache in host memory, on an RTX 4070 and an RTX 3060. Sizes of the models are their own; a
tensor's last axis is in bytes, at the mean width of the file. llama.cpp keeps the input table in
host memory, so plans leave it out. Experts and heads are cut as llama.cpp cuts them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from sharding import (
    DeviceInfo,
    LayerShape,
    Mesh,
    ModelShape,
    Plan,
    PlanOptions,
    TensorShape,
    make_plan,
)
from sharding.cost import CostModel
from sharding.fabric import Fabric

TABLES = json.loads((Path(__file__).parents[2] / "data" / "host_cache_tables.json").read_text())
LINKS = tuple(TABLES["hardware"][gpu]["h2d_gb_s"] for gpu in ("gpu0", "gpu1"))
READ = (504.0, 360.0)  # GB/s of the two cards' memory, by their data sheets
GIB = 1 << 30
FREE = 12 * GIB - 780_000_000  # what the driver's context and llama.cpp's own buffers leave
LATENCY_US = 100.0  # of an exchange: two copies across PCIe, and a wait for each
QWEN, GEMMA = "Qwen3.8-27B-UD-Q5_K_M", "gemma-4-26B-A4B"


def machine(
    read: tuple[float, float] = READ, links: tuple[float, float] = LINKS, free: int | None = FREE
) -> Mesh:
    """The two cards; matrix products are never what a decode step waits for."""
    cards = ("RTX 4070", "RTX 3060")
    devices = (
        DeviceInfo(f"gpu{i}", "cuda", cards[i], 12 * GIB, free, links[i], read[i], 1000.0)
        for i in (0, 1)
    )
    return Mesh(tuple(devices), fabric=Fabric(latency_us=LATENCY_US, gbps=3.3))


def _tensors(layers: list[LayerShape], sizes: list[tuple[float, float]]) -> list[Any]:
    """One tensor a layer for what follows the heads, one for what follows the columns."""
    found = []
    for i, (layer, (attn, mlp)) in enumerate(zip(layers, sizes, strict=True)):
        if layer.kv_heads:
            shape = (layer.kv_heads, round(attn / layer.kv_heads))
            found.append(TensorShape(f"blk.{i}.attn", shape, ("kv_group", "embed"), i, 1))
        shape = (layer.mlp, round(mlp / layer.mlp))
        found.append(TensorShape(f"blk.{i}.mlp", shape, ("mlp", "embed"), i, 1))
    return found


def qwen() -> tuple[ModelShape, list[TensorShape]]:
    """64 layers, every fourth with attention; the recurrent ones' projections follow the MLP."""
    embed, mlp, vocab = 5120, 17408, 248320
    recurrent = (2 * 16 * 128 + 48 * 128 + 2 * 48 * 128) * embed
    attn = (2 * 24 * 256 + 2 * 4 * 256 + 24 * 256) * embed
    layers, values = [], []
    for i in range(64):
        heads = 4 if i % 4 == 3 else 0
        layers.append(LayerShape(heads, 6, 256, 256, mlp, 256, gated_q=True, o_block=256))
        values.append((attn if heads else 0, 3 * mlp * embed + (0 if heads else recurrent)))
    total = sum(a + m for a, m in values) + 2 * vocab * embed
    width = TABLES["model"]["bytes"] / total
    sizes = [(a * width, m * width) for a, m in values]
    found = _tensors(layers, sizes)
    found.append(TensorShape("output", (vocab, round(embed * width)), ("vocab", "embed"), None, 1))
    return ModelShape(tuple(layers), vocab, embed, QWEN), found


def gemma() -> tuple[ModelShape, list[TensorShape]]:
    """30 layers, every sixth without a window; what a token reads of the experts, as one MLP."""
    embed, expert, dense, vocab = 2816, 704, 2112, 262144
    layers, sizes = [], []
    for i in range(30):
        whole = i % 6 == 5
        heads, dim = (2, 512) if whole else (8, 256)
        layers.append(LayerShape(heads, 16 // heads, dim, dim, expert, 32, None if whole else 1024))
        attn = (2 * 16 * dim + (1 if whole else 2) * heads * dim) * embed
        sizes.append((attn * 1.0, 3 * embed * (8 * expert + dense) * 1.0))
    found = _tensors(layers, sizes)
    found.append(TensorShape("output", (vocab, embed), ("vocab", "embed"), None, 1))
    return ModelShape(tuple(layers), vocab, embed, GEMMA), found


def plan(model: Any, mesh: Mesh, **options: Any) -> Plan:
    """A plan of `qwen()` or `gemma()` with llama.cpp's cuts, its pages small."""
    shape, tensors = model
    asked = {"page": 16, "group_pages": 16, "prefetch": 1, "itemsize": 2, "ubatch": 512} | options
    return make_plan(shape, mesh, PlanOptions(rounding="llama.cpp", **asked), tensors)


def on(mesh: Mesh, made: Plan) -> Plan:
    """The same plan where devices have other rates."""
    return replace(made, mesh=mesh)


def tg(made: Plan, position: int) -> float:
    """Predicted tokens a second by the additive law."""
    return 1 / CostModel(made).decode(position).additive


def layer_split(percent: int) -> tuple[int, int]:
    """Layers on the first card: llama.cpp counts the output as one more, and gives it to the last
    device."""
    first = next(i for i in range(66) if 100 * i >= 65 * percent)
    return first, 64 - first
