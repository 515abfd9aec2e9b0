"""The cost model against published runs, and by itself."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from cost_tables import (
    GEMMA,
    LATENCY_US,
    LAYERS_15K,
    LAYERS_58K,
    QWEN,
    TABLES,
    Rows,
    layer_table,
    resident,
    resident_layer_table,
    resident_layers,
    resident_table,
    tensor_table,
)
from sharding_models import model, tensors

from sharding import DoesNotFit, Mesh, Plan, PlanError, PlanOptions, make_plan
from sharding.cost import CostModel, calibrated
from sharding.fabric import Fabric


def same_ranking(found: list[float], rows: Rows) -> bool:
    """Whether every two rows that differ are in the same order."""
    seen = [row["tg"] for row in rows]
    pairs = [(i, j) for i in range(len(rows)) for j in range(i)]
    return all((seen[i] > seen[j]) == (found[i] > found[j]) for i, j in pairs if seen[i] != seen[j])


@pytest.mark.parametrize("table", [LAYERS_15K, LAYERS_58K])
def test_layer_split_tables(table: str):
    rows, found = layer_table(table)
    assert found == pytest.approx([row["tg"] for row in rows], rel=0.10)
    assert same_ranking(found, rows)


def test_tensor_split_table():
    rows, found = tensor_table()
    assert found == pytest.approx([row["tg"] for row in rows], rel=0.20)
    assert same_ranking(found, rows)


@pytest.mark.parametrize("name", [QWEN, GEMMA])
def test_tensor_split_resident_tables(name: str):
    rows, found = resident_table(name)
    assert found == pytest.approx([row["tg"] for row in rows], rel=0.20)
    assert same_ranking(found, rows)
    best, measured = found.index(max(found)), rows.index(max(rows, key=lambda row: row["tg"]))
    assert abs(best - measured) <= 1


def test_layer_split_resident_table():
    rows, found = resident_layer_table()
    assert found == pytest.approx([row["tg"] for row in rows], rel=0.10)
    assert same_ranking(found, rows)


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


def test_quantised_weights_are_multiplied_with_once_and_read_in_parts():
    """Four-bit codes, two a byte, and a scale of two bytes for 32 values."""
    shape = model(1)
    halves = [t for t in tensors(shape) if t.name.endswith("down")]
    assert halves
    packed = [
        replace(
            t,
            name=f"{t.name}.{name}",
            shape=(*t.shape[:-1], t.shape[-1] // packs),
            itemsize=itemsize,
            packs=packs,
        )
        for t in halves
        for name, packs, itemsize in (("codes", 2, 1), ("scales", 32, 2))
    ]
    mesh = Mesh.virtual(2, read_gbps=1.0, tflops=1e-3)
    options = PlanOptions(split_mode="tensor", ctx=64, page=16, ubatch=32)
    whole, parts = (
        CostModel(make_plan(shape, mesh, options, t)).work(1, 1, 0.0)[1] for t in (halves, packed)
    )
    assert parts[1] == pytest.approx(whole[1])
    values = sum(t.shape[-1] * t.shape[-2] for t in halves)
    assert parts[0].sum() == pytest.approx(values * (1 / 2 + 2 / 32))


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
