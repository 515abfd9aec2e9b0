"""The published runs of tests/data/host_cache_tables.json as plans, and what the cost
model predicts for them: for its tests and for notebooks/03_unlike_devices.ipynb.

The file is the reference tables' own (`seed_tables.json` of the folder of references): llama.cpp
with its cache in host memory, on an RTX 4070 and an RTX 3060. Sizes of the models are their own; a
tensor's last axis is in bytes, at the mean width of the file. llama.cpp keeps the input table in
host memory, so plans leave it out. Experts and heads are cut as llama.cpp cuts them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
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
from sharding.cost import CostModel, calibrated
from sharding.fabric import Fabric

TABLES = json.loads((Path(__file__).parents[2] / "data" / "host_cache_tables.json").read_text())
LINKS = tuple(TABLES["hardware"][gpu]["h2d_gb_s"] for gpu in ("gpu0", "gpu1"))
READ = (504.0, 360.0)  # GB/s of the two cards' memory, by their data sheets
GIB = 1 << 30
FREE = 12 * GIB - 780_000_000  # what the driver's context and llama.cpp's own buffers leave
LATENCY_US = 100.0  # of an exchange: two copies across PCIe, and a wait for each
QWEN, GEMMA = "Qwen3.8-27B-UD-Q5_K_M", "gemma-4-26B-A4B"
LAYERS_15K = "layer_split_f16_ctx20480_prompt15216"
LAYERS_58K = "layer_split_ctx65536_prompt58466"
_LAYERS = {LAYERS_15K: (20480, 15216), LAYERS_58K: (65536, 58466)}  # context and position
Rows = list[dict[str, Any]]


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


ALIKE = machine(links=(1.0, 1.0))  # links alike take turns: the tables' round robin


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


def streamed(row: dict[str, Any], kind: str, ctx: int, **options: Any) -> Plan:
    """A row of a table with the cache in host memory."""
    mesh = machine() if row.get("order") == "slowest_first" else ALIKE
    return plan(
        qwen(),
        mesh,
        kv="host",
        kv_gpu_layers=row["kvgl"],
        cache_type_k=kind,
        cache_type_v=kind,
        ctx=ctx,
        **options,
    )


def predicted(rows: Rows, plans: list[Plan], position: int) -> list[float]:
    """Rates of a table's rows, computing taken from the last of those that stream nothing."""
    base = next(i for i in reversed(range(len(rows))) if rows[i]["kvgl"] == 16)
    mesh = calibrated(on(machine(), plans[base]), position, 1 / rows[base]["tg"])
    return [tg(on(mesh, each), position) for each in plans]


def layer_table(table: str) -> tuple[Rows, list[float]]:
    """Rows of a table of whole layers with the cache in host memory, and what is predicted."""
    ctx, position = _LAYERS[table]
    rows, split = TABLES[table], layer_split(50)
    plans = [
        streamed(row, row.get("cache", "f16"), ctx, split_mode="layer", tensor_split=split)
        for row in rows
    ]
    return rows, predicted(rows, plans, position)


def tensor_table() -> tuple[Rows, list[float]]:
    """The same of the table of cut layers; rows that stream nothing last."""
    rows = sorted(
        TABLES["tensor_split_50_50_q8_0_ctx65536_prompt58466"], key=lambda row: row["kvgl"]
    )
    plans = [
        streamed(
            row,
            "q8_0",
            65536,
            split_mode="tensor",
            tensor_split=(1, 1),
            attn_split=row["attn_split"],
        )
        for row in rows
    ]
    return rows, predicted(rows, plans, 58466)


@cache
def resident(name: str, shares: tuple[int, int]) -> Plan:
    """A model with all its layers cut and nothing in host memory."""
    sizes = {QWEN: qwen, GEMMA: gemma}[name]()
    types: dict[str, Any] = {"cache_type_k": "f16", "cache_type_v": "f16", "ctx": 640}
    return plan(sizes, machine(), split_mode="tensor", tensor_split=shares, **types)


def fitted_rates(name: str, rows: Rows) -> tuple[float, float]:
    """Memory rates by which the first row, which the second device limits, and the last one, which
    the first limits, are as measured."""
    read = list(READ)
    for _ in range(8):
        for device, row in ((0, rows[-1]), (1, rows[0])):
            low, high = 10.0, 5000.0
            for _ in range(24):
                read[device] = (low * high) ** 0.5
                rate = tg(on(machine((read[0], read[1])), resident(name, tuple(row["ts"]))), 64)
                low, high = (read[device], high) if rate < row["tg128"] else (low, read[device])
    return read[0], read[1]


def resident_table(name: str) -> tuple[Rows, list[float]]:
    """Rows of a model's cuts that fit, and what is predicted."""
    rows = [row | {"tg": row["tg128"]} for row in TABLES["tensor_split_resident"][name][:-1]]
    mesh = machine(fitted_rates(name, rows))
    return rows, [tg(on(mesh, resident(name, tuple(row["ts"]))), 64) for row in rows]


def resident_layers(percent: int) -> Plan:
    """Whole layers and their cache, nothing in host memory."""
    types: dict[str, Any] = {"cache_type_k": "q8_0", "cache_type_v": "q8_0", "ctx": 65536}
    return plan(qwen(), machine(), tensor_split=layer_split(percent), **types)


def resident_layer_table() -> tuple[Rows, list[float]]:
    """Rows of whole layers that fit, and what is predicted. Devices take turns, so a step's time is
    linear in the inverses of both memory rates: two rows give them."""
    rows = [row for row in TABLES["layer_split_resident_kvgl16"] if "tg" in row]
    plans = [resident_layers(row["ts"][0]) for row in rows]
    work = [CostModel(on(machine((1.0, 1.0)), p)).decode(58466) for p in plans]
    (a, b), (c, d) = work[0].turns, work[1].turns
    s, t = (1 / row["tg"] - step.exchange for row, step in zip(rows[:2], work[:2], strict=True))
    inverse = (s * d - t * b) / (a * d - b * c), (a * t - c * s) / (a * d - b * c)
    mesh = machine((1 / inverse[0], 1 / inverse[1]))
    return rows, [tg(on(mesh, each), 58466) for each in plans]
