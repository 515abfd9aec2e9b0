"""Fits against all plans there are, at sizes where those can be counted, and their answers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sharding_models import model, tensors

from sharding import (
    CostModel,
    DeviceInfo,
    Fabric,
    LayerShape,
    Mesh,
    ModelShape,
    Plan,
    PlanError,
    PlanOptions,
    TensorShape,
    make_plan,
)
from sharding.errors import FitError
from sharding.fit import Fit, fit
from sharding.fit_report import explain
from sharding.fit_search import Allowed
from sharding.fit_tables import Workload
from sharding.residency import reserve

MIB = 1 << 20
ONE = Allowed((("f16", "f16"),), ubatches=(32,), prefetches=(4,))
SMALL = model(6, kv=4, dim=64, mlp=7 * 32, vocab=512)
ASKED = PlanOptions(ctx=2048, page=16, group_pages=2, itemsize=4)
LOAD = Workload(1024, 1024)


def unlike(seed: int, devices: int = 3) -> Mesh:
    """Devices of random memory and rates, which hold more or less of the small model's cache."""
    random = np.random.default_rng(seed)
    found = []
    for i in range(devices):
        free = 64 * MIB + int(random.uniform(3, 14) * MIB)
        rates = (float(10 ** random.uniform(low, low + 1)) for low in (-1.5, 0.5, 0))
        found.append(DeviceInfo(f"gpu{i}", "cuda", f"kind{i}", 128 * MIB, free, *rates))
    return Mesh(tuple(found), fabric=Fabric(latency_us=float(random.uniform(1, 200)), gbps=10))


def parts(total: int, devices: int) -> Iterator[tuple[int, ...]]:
    if devices == 1:
        yield (total,)
        return
    for n in range(total + 1):
        for rest in parts(total - n, devices - 1):
            yield (n, *rest)


def every_plan(shape: ModelShape, weights: list[TensorShape], mesh: Mesh) -> Iterator[Plan]:
    """All cuts of a small model, their caches as far as they can on the devices."""
    host = {"kv": "host", "kv_device_bytes": "auto", "cache_type_k": "f16", "cache_type_v": "f16"}
    base = replace(ASKED, ubatch=32, **host)
    asked = [replace(base, split_mode="layer", tensor_split=s) for s in parts(6, len(mesh))]
    for groups in parts(4, len(mesh)):
        for blocks in parts(7, len(mesh)):
            split = {"split_mode": "tensor", "tensor_split": blocks, "attn_split": groups}
            asked.append(replace(base, **split))
    for options in asked:
        plan = make_plan(shape, mesh, options, weights)
        rooms = zip(range(len(mesh)), mesh.devices, strict=True)
        if all(d.free is None or plan.needed_bytes(i) <= d.free - reserve(d) for i, d in rooms):
            yield plan


def hybrid(shape: ModelShape, weights: list[TensorShape]) -> tuple[ModelShape, list[TensorShape]]:
    """Two of three layers of a model with a recurrent mixer in the place of attention."""
    recurrent = [i for i in range(len(shape.layers)) if i % 3 < 2]
    layers = list(shape.layers)
    for i in recurrent:
        states = dict(states=8, state_bytes=1 << 15, state_work=1 << 10)
        layers[i] = replace(layers[i], kv_heads=0, **states)
    found = []
    for tensor in weights:
        if tensor.layer in recurrent and "kv_group" in tensor.axes:
            dims = dict(zip(tensor.axes, tensor.shape, strict=True))
            dims["head_rows"] //= 2  # over twice as many groups
            axes = tuple("state_group" if a == "kv_group" else a for a in tensor.axes)
            sizes = (8 if a == "kv_group" else dims[a] for a in tensor.axes)
            tensor = replace(tensor, axes=axes, shape=tuple(sizes))
        found.append(tensor)
    return replace(shape, layers=tuple(layers)), found


def quantised(
    shape: ModelShape, weights: list[TensorShape]
) -> tuple[ModelShape, list[TensorShape]]:
    """Matrices of four values in an element."""
    matrices = [len(tensor.shape) > 1 for tensor in weights]
    packed = [replace(t, shape=(*t.shape[:-1], t.shape[-1] // 4), packs=4) for t in weights]
    chosen = zip(matrices, packed, weights, strict=True)
    return shape, [new if matrix else old for matrix, new, old in chosen]


@pytest.mark.parametrize(
    ("seed", "change"),
    [*((seed, None) for seed in range(6)), (0, hybrid), (2, hybrid), (1, quantised)],
)
def test_no_plan_is_faster(seed: int, change: Callable[..., Any] | None):
    mesh, (shape, weights) = unlike(seed), (SMALL, tensors(SMALL))
    if change is not None:
        shape, weights = change(shape, weights)
    plans = list(every_plan(shape, weights, mesh))
    best = min((CostModel(p).decode(LOAD.decode_at).overlapped for p in plans), default=None)
    if best is None:
        with pytest.raises(FitError):
            fit(shape, mesh, ASKED, weights, ONE, LOAD)
        return
    found = fit(shape, mesh, ASKED, weights, ONE, LOAD)
    fastest = max(c.decode_rate for c in found.considered)
    assert 1 / fastest == pytest.approx(best, rel=0.02)
    assert CostModel(found.plan).decode_rate(LOAD.decode_at) == found.chosen.decode_rate
    found.plan.check_fit()


def large(kv_heads: int, layers: int = 64) -> tuple[ModelShape, list[TensorShape]]:
    """A model of 70B's sizes in bfloat16."""
    embed, mlp, vocab = 8192, 28672, 128256
    shape = ModelShape(
        (LayerShape(kv_heads, 64 // kv_heads, 128, 128, mlp),) * layers, vocab, embed
    )
    return shape, [replace(t, itemsize=2) for t in tensors(shape)]


def eight() -> Mesh:
    sizes = [(24, 24.0, 900.0, 150.0), (24, 12.0, 900.0, 150.0), (24, 24.0, 1000.0, 300.0)]
    sizes += [(16, 6.0, 500.0, 100.0), (12, 3.3, 360.0, 50.0), (48, 50.0, 900.0, 200.0)]
    sizes += [(24, 24.0, 800.0, 100.0), (16, 12.0, 600.0, 90.0)]
    devices = (
        DeviceInfo(f"gpu{i}", "cuda", f"kind{i}", gib << 30, (gib - 1) << 30, *rates)
        for i, (gib, *rates) in enumerate(sizes)
    )
    return Mesh(tuple(devices), fabric=Fabric(latency_us=40, gbps=12, dispatch_us=40))


def chosen(ctx: int, **allowed: object) -> Fit:
    types = (("bf16", "bf16"), ("q8_0", "q8_0"))
    asked = Allowed(**({"cache_types": types[:1]} | allowed))  # type: ignore
    shape, weights = large(8)
    return fit(shape, eight(), PlanOptions(ctx=ctx, itemsize=2), weights, asked)


@pytest.mark.parametrize("kv_heads", [8, 32])
def test_eight_devices_and_64_layers_take_less_than_two_seconds(kv_heads: int):
    shape, weights = large(kv_heads)
    began = time.thread_time()
    fit(shape, eight(), PlanOptions(ctx=32768, itemsize=2), weights, Allowed((("f16", "f16"),)))
    assert time.thread_time() - began < 2


def test_too_many_devices_are_refused():
    shape, weights = large(8)
    many = Mesh(eight().devices * 5, fabric=eight().fabric)
    with pytest.raises(FitError, match="at most 32 devices and there are 40"):
        fit(shape, many, PlanOptions(ctx=32768, itemsize=2), weights, Allowed((("f16", "f16"),)))


def test_only_what_is_allowed_is_chosen():
    found = chosen(32768, split_modes=("tensor",), ubatches=(256,), prefetches=(2,))
    options = found.plan.options
    assert (options.split_mode, options.ubatch, options.prefetch) == ("tensor", 256, 2)
    assert (options.cache_type_k, options.cache_type_v) == ("bf16", "bf16")
    both = chosen(262144, cache_types=(("bf16", "bf16"), ("q8_0", "q4_0")))
    assert (both.plan.options.cache_type_k, both.plan.options.cache_type_v) == ("q8_0", "q4_0")
    assert both.chosen.seconds < chosen(262144).chosen.seconds


def test_too_large_a_context_is_told_with_the_largest():
    fabric = replace(eight().fabric, host_memory=1 << 30)
    mesh = Mesh(eight().devices[:2], fabric=fabric)
    shape, weights = large(8, 14)
    allowed = Allowed((("bf16", "bf16"),))

    def at(ctx: int) -> Fit:
        return fit(shape, mesh, PlanOptions(ctx=ctx, itemsize=2), weights, allowed)

    with pytest.raises(FitError, match="the largest that fits is") as refused:
        at(1 << 20)
    largest = refused.value.largest_ctx
    assert largest is not None and 65536 < largest < 1 << 20
    assert at(largest).plan.options.ctx == largest
    with pytest.raises(FitError, match=f"fits is {largest} "):
        at(largest + 1024)


def test_a_search_tells_what_it_is_at():
    told: list[tuple[str, int, int]] = []

    def tell(what: str, done: int, steps: int) -> None:
        told.append((what, done, steps))

    shape, weights = large(8, 2)
    fit(shape, eight(), PlanOptions(ctx=4096, itemsize=2), weights, ONE, tell=tell)
    assert {what.split()[0] for what, _, _ in told} == {"cuts", "plan"}
    assert all(0 <= done < steps for _, done, steps in told)
    told.clear()
    with pytest.raises(FitError, match="the largest that fits"):
        few = Mesh(eight().devices[:1], fabric=Fabric(host_memory=1 << 28))
        fit(shape, few, PlanOptions(ctx=1 << 24, itemsize=2), weights, ONE, tell=tell)
    assert told[-1][0] == "largest context"


def test_weights_larger_than_all_memory():
    mesh = Mesh(eight().devices[:3])
    shape, weights = large(8)
    with pytest.raises(
        FitError, match="with any context: weights take 1[0-9]{11} bytes"
    ) as refused:
        fit(shape, mesh, PlanOptions(ctx=4096, itemsize=2), weights, ONE)
    assert refused.value.largest_ctx is None


def test_reports():
    found = chosen(32768)
    text, data = str(found), json.loads(json.dumps(found.to_dict()))
    assert "chosen" in text and "does not fit: weights take" in text
    assert "times the time" in text and "devices compute one after another" in text
    assert text.splitlines()[-1] == f"options: {data['options']}"
    assert [c["way"] for c in data["considered"]] == [c.kind for c in found.considered]
    assert all(c.why for c in found.considered[1:]) and not found.chosen.why
    assert "limited by" in explain(found) and "left" in explain(found)
    assert found._repr_html_().count("<tr>") == len(found.considered) + 1
    again = make_plan(*large(8)[:1], eight(), replace(found.plan.options), large(8)[1])
    assert again.layers == found.plan.layers


def test_rates_that_nobody_told():
    shape, weights = large(8, 2)
    with pytest.raises(PlanError, match="read_gbps of device cpu:0 is None"):
        fit(shape, Mesh.virtual(2), PlanOptions(), weights, ONE)
