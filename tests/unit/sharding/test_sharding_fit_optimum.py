"""The choice of a fit against all plans there are, at sizes where those can be counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from fit_models import BLOCKS, GROUPS, Model, parts, small
from sharding_models import model, tensors

from sharding import (
    CostModel,
    DeviceInfo,
    Fabric,
    Mesh,
    ModelShape,
    Plan,
    PlanOptions,
    TensorShape,
    make_plan,
)
from sharding.errors import FitError
from sharding.fit import fit
from sharding.fit_search import Allowed
from sharding.fit_tables import Workload
from sharding.fit_ties import TIE
from sharding.residency import reserve
from sharding.shares import apportion

MIB = 1 << 20
LAYERS = 4
LARGEST_SUM = 20
SMALL = model(LAYERS, kv=GROUPS, dim=64, mlp=BLOCKS * 32, vocab=BLOCKS * 64)
ASKED = PlanOptions(ctx=2048, page=16, group_pages=2, itemsize=4)
ALLOWED = Allowed((("f16", "f16"),), ubatches=(32, 512), prefetches=(4,))
LOADS = Workload(1024, 1024), Workload(2000, 48), Workload(64, 1900), Workload(1900, 140)


def unlike(
    seed: int, devices: int, dispatch_us: float, model: Model, per_host: int | None = None
) -> Mesh:
    """Devices of random memory and rates; together they hold the weights and some of the cache.
    Between hosts an exchange takes up to thirty times as long as inside one."""
    random, (shape, weights) = np.random.default_rng(seed), model
    cache = len(shape.layers) * GROUPS * 2 * 64 * 2 * ASKED.ctx
    needed = sum(t.nbytes for t in weights) + cache * random.uniform(0.2, 1.2)
    found = []
    for i, part in enumerate(random.dirichlet([2] * devices)):
        free = int(65 * MIB + max(MIB / 2, 1.3 * part * (needed + devices * MIB)))
        rates = (float(10 ** random.uniform(low, low + 1)) for low in (-1.5, 0.5, -1))
        found.append(DeviceInfo(f"gpu{i}", "cuda", f"kind{i}", 128 * MIB, free, *rates))
    latency, gbps = float(random.uniform(1, 100)), float(random.uniform(0.5, 10))
    slower = 10 ** random.uniform(0, 1.5), 10 ** random.uniform(0, 1)
    between = per_host, latency * float(slower[0]), gbps / float(slower[1])
    return Mesh(tuple(found), fabric=Fabric(latency, gbps, *between, dispatch_us=dispatch_us))


def all_shares(shape: ModelShape, devices: int) -> list[tuple[int, ...]]:
    """Attention shares, one for each way in which any round the heads and states of all layers;
    over more than two devices any that are whole numbers with a small sum."""
    totals = {n for layer in shape.layers for n in (layer.kv_heads, layer.states) if n}
    sums = totals if len(totals) == 1 else range(1, LARGEST_SUM + 1)
    every = (shares for total in sums for shares in parts(total, devices))
    found: dict[tuple[tuple[int, ...], ...], tuple[int, ...]] = {}
    for shares in halves(totals) if devices == 2 else every:
        found.setdefault(tuple(apportion(n, shares) for n in totals), shares)
    return list(found.values())


def halves(totals: set[int]) -> Iterator[tuple[int, int]]:
    """Shares of two devices: those by which some total is about to be rounded otherwise, and some
    between each two of these."""
    edges = {Fraction(2 * n + 1, 2 * total) for total in totals for n in range(total)} | {0, 1}
    ordered = sorted(map(Fraction, edges))
    middles = [(a + b) / 2 for a, b in pairwise(ordered)]
    for share in [*ordered, *middles]:
        yield share.numerator, share.denominator - share.numerator


def every_plan(shape: ModelShape, weights: list[TensorShape], mesh: Mesh) -> Iterator[Plan]:
    """All cuts of a small model under all options that may be chosen; of one with more layers those
    of whole layers."""
    n, layers = len(mesh), len(shape.layers)
    columns = max(layer.mlp for layer in shape.layers) // 32 or shape.vocab
    cuts: list[dict[str, Any]] = [
        dict(split_mode="layer", tensor_split=s) for s in parts(layers, n)
    ]
    for groups in all_shares(shape, n) if layers <= LAYERS else ():
        for blocks in parts(columns, n):
            split = {"split_mode": "tensor", "tensor_split": blocks, "attn_split": groups}
            cuts.append(split)
    places = {"kv": "device"}, {"kv": "host", "kv_device_bytes": "auto"}
    rooms = [(d.free or 0) - reserve(d) for d in mesh.devices]
    base = replace(ASKED, cache_type_k="f16", cache_type_v="f16")
    for cut, place in product(cuts, places):
        for ubatch in sorted(ALLOWED.ubatches):
            asked = replace(base, ubatch=ubatch, **cut, **place)
            plan = make_plan(shape, mesh, asked, weights)
            if any(plan.needed_bytes(i) > room for i, room in enumerate(rooms)):
                break  # nor does it fit with larger chunks
            yield plan


def seconds(cost: CostModel, load: Workload) -> float:
    options = cost.plan.options
    rates = cost.prefill_rate(load.prefill_at(options.ubatch)), cost.decode_rate(load.decode_at)
    return load.seconds(options.slots, *rates)


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


def simplicity(plan: Plan) -> tuple[int, ...]:
    """As docs/fit.md has it; the smaller, the simpler."""
    options, devices = plan.options, len(plan.used_devices)
    tensor = devices > 1 and options.split_mode == "tensor"
    return options.kv == "host", devices, tensor, options.ubatch != 512


def shortest_and_simplest(model: Model, mesh: Mesh, loads: tuple[Workload, ...]) -> None:
    """Hold fits against all plans."""
    shape, weights = model
    plans = list(every_plan(shape, weights, mesh))
    costs = [CostModel(plan) for plan in plans]
    for load in loads:
        took = [seconds(cost, load) for cost in costs]
        for modes in (("none", "layer", "tensor"), ("layer",), ("tensor",)):
            pairs = [
                (second, plan)
                for second, plan in zip(took, plans, strict=True)
                if plan.options.split_mode in modes
                and (modes != ("tensor",) or len(plan.used_devices) > 1)
            ]
            allowed = replace(ALLOWED, split_modes=modes)
            if not pairs:
                with pytest.raises(FitError):
                    fit(shape, mesh, ASKED, weights, allowed, load)
                continue
            best = min(second for second, _ in pairs)
            found = fit(shape, mesh, ASKED, weights, allowed, load)
            fastest = min(c.seconds for c in found.considered if c.plan is not None)
            assert fastest / best == pytest.approx(1, abs=2e-5)
            assert found.missed == 0
            assert found.chosen.seconds == seconds(CostModel(found.plan), load)
            assert found.chosen.seconds <= fastest * (1 + TIE)
            nearly = [plan for second, plan in pairs if second <= fastest * (1 + TIE)]
            assert simplicity(found.plan) == min(map(simplicity, nearly))


@pytest.mark.parametrize(
    ("seed", "devices", "dispatch_us", "change"),
    [
        *((seed, 2, dispatch, None) for seed, dispatch in enumerate((0.0, 0.5, 5.0) * 2)),
        (0, 3, 0.0, None),
        (1, 3, 5.0, None),
        (2, 3, 0.5, None),
        (3, 3, 0.0, quantised),
        (5, 3, 5.0, hybrid),
    ],
)
def test_no_plan_is_faster_and_none_as_fast_is_simpler(
    seed: int, devices: int, dispatch_us: float, change: Callable[..., Any] | None
):
    mesh, model = (
        unlike(seed, devices, dispatch_us, (SMALL, tensors(SMALL))),
        (SMALL, tensors(SMALL)),
    )
    shortest_and_simplest(model if change is None else change(*model), mesh, LOADS)


@pytest.mark.parametrize(
    ("seed", "name", "per_host"),
    [
        (0, "windows", None),
        (1, "windows", 2),
        (2, "heads", None),
        (0, "heads", 2),
        (28, "layers of one unit", None),  # a fast cut of which does not fit
        (1, "dense, then mixtures", None),
        (3, "dense, then mixtures", 2),
        (0, "dense, then mixtures with an MLP beside", None),
        (0, "dense, then mixtures with one as wide beside", None),
        (1, "dense, then mixtures of two thirds", None),
        (2, "dense, then mixtures of two thirds", 2),
        (1, "hybrid", None),
        (3, "hybrid", 2),
        (23, "hybrid", None),  # one device holds it with small chunks as one program
        (2, "parts in layers of their own", None),
        (1, "parts in layers of their own", 2),
        (0, "four kinds", None),
        (0, "no MLPs", None),
    ],
)
def test_the_same_of_layers_that_are_not_alike(seed: int, name: str, per_host: int | None):
    model = small(name)
    mesh = unlike(seed, 3, (0.0, 0.5, 5.0)[seed % 3], model, per_host)
    shortest_and_simplest(model, mesh, LOADS[::2])


@pytest.mark.parametrize(
    ("seed", "name"),
    [
        (0, "many states"),  # so many that units of them are not counted at once
        (1, "many states"),
        (4, "mixtures on one device alone"),  # whose programs hand on what else attention has
        (9, "mixtures on one device alone"),
    ],
)
def test_the_same_of_two_devices(seed: int, name: str):
    model = small(name)
    mesh = unlike(seed, 2, (0.0, 0.5, 5.0)[seed % 3], model)
    shortest_and_simplest(model, mesh, LOADS[::2])


@pytest.mark.parametrize("seed", [0, 1])
def test_the_same_of_two_hosts_with_two_devices_each(seed: int):
    layer = replace(SMALL.layers[0], kv_heads=2, mlp=3 * 32)
    window = replace(layer, window=128)
    shape = replace(SMALL, layers=(window, layer, window, layer), vocab=3 * 64)
    model = shape, tensors(shape)
    shortest_and_simplest(model, unlike(seed, 4, 0.5, model, 2), LOADS[::2])


def test_what_a_small_host_leaves_open_is_told():
    """Where host memory has room for a part of the cache, cuts without any are looked for alone."""
    weights = tensors(SMALL)
    mesh, most = unlike(11, 2, 0.5, (SMALL, weights)), LAYERS * GROUPS * 2 * 64 * 2 * ASKED.ctx
    mesh = replace(mesh, fabric=replace(mesh.fabric, host_memory=most // 10))
    allowed = replace(ALLOWED, split_modes=("tensor",))
    found = fit(SMALL, mesh, ASKED, weights, allowed, LOADS[0])
    fastest = min(c.seconds for c in found.considered if c.plan is not None)
    best = min(
        seconds(CostModel(plan), LOADS[0])
        for plan in every_plan(SMALL, weights, mesh)
        if plan.options.split_mode == "tensor" and len(plan.used_devices) > 1
        if sum(plan.cache_bytes(i)["host"] for i in range(2)) <= most // 10
    )
    assert (1 - found.missed) * fastest < best < 0.95 * fastest


@pytest.mark.parametrize("seed", [4, 17])  # shortest paths alone do not tell of the second
def test_no_cut_of_many_layers_is_faster(seed: int):
    shape = replace(SMALL, layers=SMALL.layers[:1] * 9)
    weights = tensors(shape)
    mesh = unlike(seed, 4, (seed % 3) * 3.0, (shape, weights))
    costs = [CostModel(plan) for plan in every_plan(shape, weights, mesh)]
    allowed = replace(ALLOWED, split_modes=("layer",))
    for load in LOADS:
        found = fit(shape, mesh, ASKED, weights, allowed, load)
        fastest = min(c.seconds for c in found.considered if c.plan is not None)
        assert fastest / min(seconds(c, load) for c in costs) == pytest.approx(1, abs=5e-5)
