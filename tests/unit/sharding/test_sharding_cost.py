"""The cost model against published runs, and by itself."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from cost_tables import (
    GEMMA,
    LATENCY_US,
    QWEN,
    READ,
    TABLES,
    gemma,
    layer_split,
    machine,
    on,
    plan,
    qwen,
    tg,
)
from sharding_models import model, tensors

from sharding import DoesNotFit, Mesh, Plan, PlanError, PlanOptions, make_plan
from sharding.cost import CostModel, calibrated
from sharding.fabric import Fabric

ALIKE = machine(links=(1.0, 1.0))  # links alike take turns: the tables' round robin
Rows = list[dict[str, Any]]


def same_ranking(found: list[float], rows: Rows) -> bool:
    """Whether every two rows that differ are in the same order."""
    seen = [row["tg"] for row in rows]
    pairs = [(i, j) for i in range(len(rows)) for j in range(i)]
    return all((seen[i] > seen[j]) == (found[i] > found[j]) for i, j in pairs if seen[i] != seen[j])


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


@pytest.mark.parametrize(
    "table, ctx, position",
    [
        ("layer_split_f16_ctx20480_prompt15216", 20480, 15216),
        ("layer_split_ctx65536_prompt58466", 65536, 58466),
    ],
)
def test_layer_split_tables(table: str, ctx: int, position: int):
    rows = TABLES[table]
    plans = [
        streamed(
            row, row.get("cache", "f16"), ctx, split_mode="layer", tensor_split=layer_split(50)
        )
        for row in rows
    ]
    found = predicted(rows, plans, position)
    assert found == pytest.approx([row["tg"] for row in rows], rel=0.10)
    assert same_ranking(found, rows)


def test_tensor_split_table():
    rows = TABLES["tensor_split_50_50_q8_0_ctx65536_prompt58466"]
    plans = [
        streamed(row, "q8_0", 65536, split_mode="tensor", tensor_split=(1, 1), attn_split=share)
        for row, share in zip(rows, (row["attn_split"] for row in rows), strict=True)
    ]
    ordered = sorted(range(len(rows)), key=lambda i: rows[i]["kvgl"])
    rows, plans = [rows[i] for i in ordered], [plans[i] for i in ordered]
    found = predicted(rows, plans, 58466)
    assert found == pytest.approx([row["tg"] for row in rows], rel=0.20)
    assert same_ranking(found, rows)


@cache
def resident(name: str, shares: tuple[int, int]) -> Plan:
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


@pytest.mark.parametrize("name", [QWEN, GEMMA])
def test_tensor_split_resident_tables(name: str):
    rows = [row | {"tg": row["tg128"]} for row in TABLES["tensor_split_resident"][name][:-1]]
    mesh = machine(fitted_rates(name, rows))
    found = [tg(on(mesh, resident(name, tuple(row["ts"]))), 64) for row in rows]
    assert found == pytest.approx([row["tg"] for row in rows], rel=0.20)
    assert same_ranking(found, rows)
    best, measured = found.index(max(found)), rows.index(max(rows, key=lambda row: row["tg"]))
    assert abs(best - measured) <= 1


def test_layer_split_resident_table():
    rows = [row for row in TABLES["layer_split_resident_kvgl16"] if "tg" in row]
    plans = [resident_layers(row["ts"][0]) for row in rows]
    # Devices take turns: bytes / rate of both is linear in the rates' inverses; two rows give them.
    work = [CostModel(on(machine((1.0, 1.0)), p)).decode(58466) for p in plans]
    (a, b), (c, d) = work[0].turns, work[1].turns
    s, t = (1 / row["tg"] - step.exchange for row, step in zip(rows[:2], work[:2], strict=True))
    inverse = (s * d - t * b) / (a * d - b * c), (a * t - c * s) / (a * d - b * c)
    mesh = machine((1 / inverse[0], 1 / inverse[1]))
    found = [tg(on(mesh, each), 58466) for each in plans]
    assert found == pytest.approx([row["tg"] for row in rows], rel=0.10)
    assert same_ranking(found, rows)


def resident_layers(percent: int) -> Plan:
    types: dict[str, Any] = {"cache_type_k": "q8_0", "cache_type_v": "q8_0", "ctx": 65536}
    return plan(qwen(), machine(), tensor_split=layer_split(percent), **types)


def test_rows_that_do_not_fit():
    """One figure of free memory tells all rows of the 27B model, of either split."""
    for row in TABLES["layer_split_resident_kvgl16"]:
        fits(resident_layers(row["ts"][0]), row)
    for row in TABLES["tensor_split_resident"][QWEN]:
        fits(resident(QWEN, tuple(row["ts"])), row)


def fits(made: Plan, row: dict[str, Any]) -> None:
    if row.get("fits", True):
        made.check_fit()
    else:
        with pytest.raises(DoesNotFit, match="gpu0"):
            made.check_fit()


def two_devices(**options: Any) -> Plan:
    devices: dict[str, Any] = {"read_gbps": 100.0, "tflops": 1.0, "link_gbps": 1.0}
    asked = {"ctx": 4096, "page": 16, "group_pages": 4, "ubatch": 32} | options
    shape = model(4)
    return make_plan(shape, Mesh.virtual(2, **devices), PlanOptions(**asked), tensors(shape))


def test_the_laws():
    """Under -sm layer a link gets no more of the other's turn than its device has room for."""
    for mode in ("tensor", "layer"):
        made = two_devices(split_mode=mode, kv="host", engine="staged")
        step = CostModel(made).decode(4000)
        sent = [made.link_bytes(d, 4000) / 1e9 for d in (0, 1)]
        assert step.links == pytest.approx(sent)
        assert step.additive == pytest.approx(step.compute + sum(sent))
        assert step.limit == "link"
        if mode == "tensor":
            assert step.overlapped == pytest.approx(max(sent))
        else:
            room = made.staging_bytes(0) / 1e9
            assert step.overlapped == pytest.approx(2 * (sent[0] - room))
    assert CostModel(replace(made, options=replace(made.options, prefetch=0))).decode_rate(
        4000
    ) == pytest.approx(1 / step.additive)


def test_devices_of_one_processor_take_turns():
    made = two_devices(split_mode="tensor")
    alone = CostModel(made).decode(100).compute
    shared = replace(made, mesh=replace(made.mesh, fabric=Fabric(shared=True)))
    assert CostModel(shared).decode(100).compute == pytest.approx(2 * alone)


def test_a_mixture_reads_the_experts_that_tokens_are_sent_to():
    shape = model(1, experts=8, experts_used=2)
    dense = tensors(model(1))
    names = {"gate_up": 8, "down": 8}
    mixed = [
        replace(t, shape=(8, *t.shape), axes=("expert", *t.axes))
        if t.name.split(".")[-1] in names
        else t
        for t in dense
    ]
    mesh = Mesh.virtual(1, read_gbps=1.0, tflops=1e6)
    options = PlanOptions(ctx=64, page=16, ubatch=32)
    one, two = (
        CostModel(make_plan(s, mesh, options, t)).decode(0).compute
        for s, t in ((model(1), dense), (shape, mixed))
    )
    size = sum(t.itemsize * t.shape[-1] * t.shape[-2] for t in dense if "down" in t.name) * 3
    assert two - one == pytest.approx(size / 1e9)  # two experts in place of one


def test_exchanges():
    fabric = Fabric(10, 1.0, devices_per_host=4, between_latency_us=100, between_gbps=0.1)
    size = 1e6
    assert fabric.exchange_seconds(range(3), size, False) == pytest.approx(10e-6 + 2e-3)
    assert fabric.exchange_seconds(range(4), size, False) == pytest.approx(2 * (10e-6 + 3e-3))
    inside = 4 * 10e-6 + 1.5e-3
    assert fabric.exchange_seconds(range(4), size, True) == pytest.approx(inside)
    between = 2 * 100e-6 + 10e-3
    assert fabric.exchange_seconds(range(8), size, True) == pytest.approx(inside + between)
    with pytest.raises(PlanError, match="latency_us of the machine is -1"):
        Fabric(-1)


def test_rates_that_nobody_told():
    made = make_plan(model(), Mesh.virtual(2), PlanOptions(), tensors(model()))
    with pytest.raises(PlanError, match="read_gbps of device cpu:0 is None"):
        CostModel(made)
    with pytest.raises(PlanError, match="exchanges alone"):
        calibrated(resident(QWEN, (50, 50)), 64, LATENCY_US * 1e-6)


def test_no_jax_is_imported():
    code = "import sharding.cost, sys; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
