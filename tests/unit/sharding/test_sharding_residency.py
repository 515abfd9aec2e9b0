"""Which layers and pages of a host cache stay on which device."""

from dataclasses import replace

import pytest
from residency_models import (
    ATTENTION,
    DRAFT,
    EIGHT,
    FAST,
    HOST,
    LATENT,
    READER,
    RECURRENT,
    SLICE,
    SLOW,
    TENSOR,
    WINDOW,
    kept_layers,
    layer_sums,
    links,
    plan_of,
    shape,
    with_room,
)

from sharding import Kept, LayerShape, Mesh, PlanError

# ctx 20480, from public measurements of a model with 16 attention layers, 4 KV heads of 256, every
# fourth layer of 64 having attention: 4096 bytes a position and layer in f16.
HYBRID = shape(*((RECURRENT,) * 3 + (ATTENTION,)) * 16)
LAYER_BYTES = 20480 * 4096


@pytest.mark.parametrize(
    ("budget", "slowest_first", "in_turn"),
    [(0, (0, 0), (0, 0)), (2, (0, 2), (1, 1)), (4, (0, 4), (2, 2)), (8, (0, 8), (4, 4))]
    + [(16, (8, 8), (8, 8))],
)
def test_the_measured_layer_split(budget, slowest_first, in_turn):
    for mesh, expect in (
        (links(FAST, SLOW), slowest_first),
        (links(SLOW, FAST), slowest_first[::-1]),
        (links(FAST, FAST), in_turn),
        (links(None, SLOW), in_turn),
    ):
        plan = plan_of(HYBRID, mesh, HOST, ctx=20480, kv_gpu_layers=budget)
        for device, n in enumerate(expect):
            assert len(kept_layers(plan, device)) == n
            kept = plan.residency.devices[device]
            assert (kept.layers, kept.bytes) == (n, n * LAYER_BYTES)
            assert (kept.requested_layers, kept.requested_bytes) == (n, n * LAYER_BYTES)
            assert plan.cache_bytes(device)["host"] == (8 - n) * LAYER_BYTES
            assert plan.link_bytes(device, 15216) == (8 - n) * (15216 // 256) * 256 * 4096
            assert (plan.staging_bytes(device) == 0) == (n == 8)
        assert plan.notes == ()


def test_the_layers_that_stay_alternate_with_those_that_are_streamed():
    plan = plan_of(HYBRID, links(FAST, SLOW), HOST, kv_gpu_layers=4)
    attention = [i for i in range(32, 64) if HYBRID.layers[i].kv_heads]
    assert kept_layers(plan, 1) == attention[1::2]
    for n in range(1, 8):
        plan = plan_of(HYBRID, links(FAST, SLOW), HOST, kv_gpu_layers=n)
        kept = [attention.index(i) for i in kept_layers(plan, 1)]
        gaps = [b - a for a, b in zip(kept, [*kept[1:], kept[0] + 8], strict=True)]
        assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize(
    ("attn", "budget", "expect"),
    [
        # The measured rows: ctx 65536, weights 50/50, in f16 here.
        (None, 0, (0, 0)),
        (None, 4, (0, 8)),
        (None, 8, (0, 16)),
        (None, 12, (8, 16)),
        (None, 16, (16, 16)),
        ((3, 1), 0, (0, 0)),
        ((1, 0), 0, (0, 0)),
        ((1, 0), 4, (4, 0)),
        ((1, 0), 8, (8, 0)),
        # A slice costs the part of its layer's heads that it has.
        ((3, 1), 3, (0, 12)),
        ((3, 1), 7, (4, 16)),
    ],
)
def test_the_measured_tensor_split(attn, budget, expect):
    shares = {"tensor_split": (1, 1), "attn_split": attn, "ctx": 65536}
    plan = plan_of(HYBRID, links(FAST, SLOW), TENSOR, kv_gpu_layers=budget, **shares)
    groups = {None: (2, 2), (3, 1): (3, 1), (1, 0): (4, 0)}[attn]
    for device, n in enumerate(expect):
        assert len(kept_layers(plan, device)) == n
        kept = plan.residency.devices[device]
        assert kept.layers == n * groups[device] / 4
        assert kept.bytes == n * groups[device] * 65536 * 1024
        assert plan.cache_bytes(device)["host"] == (16 - n) * groups[device] * 65536 * 1024
    assert sum(layer_sums(plan)) == budget
    assert plan.notes == () or attn == (1, 0)
    assert not any("cannot make" in note for note in plan.notes)


def test_links_within_fifteen_percent_take_turns():
    model = shape(*(ATTENTION,) * 12)
    plan = plan_of(model, links(10.0, 11.4, 11.6), HOST, kv_gpu_layers=5)
    assert layer_sums(plan) == [3, 2, 0]
    # The class is that of its slowest: 11.4 is within 15 % of 10, 13 is not, though of 11.4.
    plan = plan_of(model, links(13.0, 11.4, 10.0), HOST, kv_gpu_layers=9)
    assert layer_sums(plan) == [1, 4, 4]


@pytest.mark.parametrize("budget", [0, 1, 2, 99])
@pytest.mark.parametrize("options", [HOST, TENSOR])
def test_scenario_14_a_budget_counts_the_layers_that_the_main_context_owns(budget, options):
    """8 main layers with attention in every fourth, and a draft layer."""
    model = shape(*(RECURRENT, RECURRENT, RECURRENT, ATTENTION) * 2, DRAFT)
    plan = plan_of(model, links(FAST, SLOW), options, kv_gpu_layers=budget)
    assert sum(layer_sums(plan)) == min(2, budget)
    assert sum(d.requested_layers for d in plan.residency.devices) == min(2, budget)
    assert set(kept_layers(plan, 0) + kept_layers(plan, 1)) <= {3, 7}
    assert plan.residency.pages[8] == (0, 0)
    clamped = [n for n in plan.notes if "--kv-gpu-layers/-kvgl 99 is more than the 2 layers" in n]
    assert len(clamped) == (budget == 99)
    assert plan.residency.drafts == (Kept(),) * 2
    draft = 4096 * 4096
    assert sum(plan.cache_bytes(d)["host"] for d in (0, 1)) == (3 - min(2, budget)) * draft
    # The draft's cache is streamed still.
    holder = [d for d in (0, 1) if d in plan.layers[8].attn_devices]
    assert all(plan.staging_bytes(d) and plan.link_bytes(d, 4096) for d in holder)
    # Its own budget counts it alone.
    own = plan_of(model, links(FAST, SLOW), options, kv_gpu_layers_draft=budget)
    assert own.residency.devices == (Kept(),) * 2
    assert sum(k.layers for k in own.residency.drafts) == min(1, budget)
    assert sum(k.requested_bytes for k in own.residency.drafts) == min(1, budget) * draft
    assert sum(own.cache_bytes(d)["host"] for d in (0, 1)) == (3 - min(1, budget)) * draft
    clamped = [n for n in own.notes if "-draft/-kvgld" in n and "the 1 layer with" in n]
    assert len(clamped) == (budget > 1)


def test_layers_that_read_anothers_cache_follow_it_and_cost_nothing():
    model = shape(ATTENTION, READER, RECURRENT, LATENT, ATTENTION, READER, READER)
    plan = plan_of(model, Mesh.virtual(1), HOST, kv_gpu_layers=3)
    assert kept_layers(plan, 0) == [0, 3, 4]
    assert plan.link_bytes(0, 4096) == plan.staging_bytes(0) == plan.cache_bytes(0)["host"] == 0
    plan = plan_of(model, Mesh.virtual(1), HOST, kv_gpu_layers=1)
    [only] = kept_layers(plan, 0)
    assert only == 4
    for layer, resident in enumerate([False, False, False, False, True, True, True]):
        assert plan.resident(0, layer, 0) is resident
    assert plan.link_bytes(0, 4096) == 16 * sum(plan.page_bytes(i, 0) for i in (0, 1, 3))


def test_a_latent_layer_is_one_slice_of_one_device():
    plan = plan_of(shape(*(LATENT,) * 4), links(FAST, SLOW), TENSOR, kv_gpu_layers=3)
    assert layer_sums(plan) == [3, 0]
    assert plan.residency.devices[0].bytes == 3 * 4096 * (576 + 512) * 2


def test_a_draft_layer_may_not_read_a_main_layers_cache():
    with pytest.raises(PlanError, match="owns no cache"):
        shape(ATTENTION, replace(DRAFT, owns_cache=False))
    with pytest.raises(PlanError, match="cache_context"):
        replace(ATTENTION, cache_context="other")
    with pytest.raises(PlanError, match="role is 'other'"):
        replace(ATTENTION, role="other")
    with pytest.raises(PlanError, match="layer 1 owns no cache"):
        shape(ATTENTION, replace(READER, role="cross"))
    assert shape(ATTENTION, DRAFT, READER).cache_owner(2) == 0


def test_scenario_15_the_rest_goes_where_there_is_room():
    """Device 0 has room for three layers, device 1 for none, and the slower link."""
    options = replace(HOST, kv_gpu_layers=4, tensor_split=(1, 1), prefetch=1)
    mesh = with_room(EIGHT, links(FAST, SLOW), options, 3 * SLICE, 0)
    plan = plan_of(EIGHT, mesh, options).check_fit()
    assert layer_sums(plan) == [3, 0]
    assert [d.requested_layers for d in plan.residency.devices] == [0, 4]
    asked = (
        f"device gpu:1 was asked to keep 4 layers ({4 * SLICE} bytes) of cache and keeps 0 layers"
    )
    took = "device gpu:0 was asked to keep 0 layers (0 bytes) of cache and keeps 3 layers"
    assert [n for n in plan.notes if asked in n and "no room for more" in n]
    assert [n for n in plan.notes if took in n and "other devices have no room" in n]
    assert all("\n" not in n and n.endswith(".") and n.count(". ") == 0 for n in plan.notes)

    # Slowest first up to its room, the rest to the next.
    mesh = with_room(EIGHT, links(FAST, SLOW), options, 3 * SLICE, 2 * SLICE)
    assert layer_sums(plan_of(EIGHT, mesh, options).check_fit()) == [2, 2]
    # In turn until one is full.
    mesh = with_room(EIGHT, links(4.0, 4.4), options, 3 * SLICE, SLICE)
    assert layer_sums(plan_of(EIGHT, mesh, options).check_fit()) == [3, 1]
    # No room at all, or even less, is no failure of residency.
    mesh = with_room(EIGHT, links(FAST, SLOW), options, 0, -1)
    assert layer_sums(plan_of(EIGHT, mesh, options)) == [0, 0]


def test_where_the_room_ends_a_slice_stays_in_whole_groups():
    options = replace(HOST, kv_gpu_layers=3, tensor_split=(1, 1))
    # A layer has 16 pages, a group 4: room for 1 layer and 11 pages.
    mesh = with_room(EIGHT, links(FAST, SLOW), options, 0, SLICE + 11 * SLICE // 16)
    plan = plan_of(EIGHT, mesh, options).check_fit()
    assert sorted(row[1] for row in plan.residency.pages) == [0] * 6 + [8, 16]
    assert layer_sums(plan) == [0, 1.5]
    part = next(i for i, row in enumerate(plan.residency.pages) if row[1] == 8)
    assert [plan.resident(1, part, p * 256) for p in range(16)] == [True] * 8 + [False] * 8
    # Where the budget ends there are no parts.
    three = replace(TENSOR, attn_split=(3, 1), tensor_split=(1, 1))
    plan = plan_of(EIGHT, links(SLOW, FAST), three, kv_gpu_layers=1)
    assert layer_sums(plan) == [0.75, 0.25]
    plan = plan_of(EIGHT, links(SLOW, FAST), replace(three, attn_split=(1, 0)), kv_gpu_layers=1)
    assert layer_sums(plan) == [1, 0]
    odd, five = replace(TENSOR, attn_split=(3, 2)), LayerShape(5, 1, 64, 64, 64)
    plan = plan_of(shape(five), links(1, 1), odd, kv_gpu_layers=1)
    assert layer_sums(plan) == [0.6, 0.4]
    plan = plan_of(shape(five, five), links(9, 1), odd, kv_gpu_layers=1)
    assert layer_sums(plan) == [0, 0.8]
    assert any("buys 0.8 layers of cache" in n for n in plan.notes)


def test_a_device_that_streams_nothing_needs_no_staging():
    options = replace(HOST, kv_gpu_layers=8, tensor_split=(1, 1))
    staging = plan_of(EIGHT, links(1, 1), options, kv_gpu_layers=0).staging_bytes(0)
    assert 0 < staging < 4 * SLICE
    # The room is short of four layers by what staging would take.
    mesh = with_room(EIGHT, links(1, 1), options, 4 * SLICE - staging, 4 * SLICE - staging - 1)
    plan = plan_of(EIGHT, mesh, options).check_fit()
    assert plan.residency.devices[0].layers == 4
    assert plan.residency.devices[1].layers < 4
    assert (plan.staging_bytes(0), plan.staging_bytes(1)) == (0, staging)
    one = plan_of(EIGHT, mesh, options, kv_gpu_layers=7)
    assert sum(layer_sums(one)) <= 7


def test_a_byte_budget_is_each_devices_own():
    plan = plan_of(EIGHT, links(FAST, SLOW), HOST, kv_device_bytes=SLICE + 5 * SLICE // 16)
    assert layer_sums(plan) == [1.25, 1.25]
    for device in (0, 1):
        kept = plan.residency.devices[device]
        assert (kept.bytes, kept.requested_bytes) == (20 * SLICE // 16, 21 * SLICE // 16)
    assert sum("whole groups of 4" in n for n in plan.notes) == 2
    plan = plan_of(EIGHT, links(FAST, SLOW), HOST, kv_device_bytes=1 << 40)
    assert layer_sums(plan) == [4, 4]
    assert sum("all of its cache" in n for n in plan.notes) == 2
    assert plan_of(EIGHT, links(1, 1), HOST, kv_device_bytes=0).notes == ()
    assert plan_of(EIGHT, links(1, 1), HOST, kv_device_bytes=2 * SLICE, slots=2).notes == ()
    mesh = with_room(EIGHT, links(1, 1), replace(HOST, tensor_split=(1, 1)), SLICE, 9 * SLICE)
    plan = plan_of(EIGHT, mesh, HOST, kv_device_bytes=2 * SLICE)
    assert layer_sums(plan) == [1, 2]
    [note] = plan.notes
    assert "no room for more" in note
    # All slots count.
    plan = plan_of(EIGHT, links(1, 1), HOST, kv_device_bytes=2 * SLICE, slots=2)
    assert layer_sums(plan) == [1, 1]


def test_an_automatic_budget_leaves_a_reserve():
    options = replace(HOST, kv_device_bytes="auto", tensor_split=(1, 1))
    reserve = 64 << 20
    mesh = with_room(EIGHT, links(1, 1), options, reserve + 2 * SLICE, reserve - 1)
    plan = plan_of(EIGHT, mesh, options).check_fit()
    assert layer_sums(plan) == [2, 0]
    assert plan.notes == ()
    large = Mesh(tuple(replace(d, memory=2000 << 20) for d in mesh.devices))
    plan = plan_of(EIGHT, large, options)
    assert layer_sums(plan) == [0, 0]  # 5 % are 100 MiB
    plan = plan_of(EIGHT, links(1, 1, free=(1 << 40, 1 << 40)), options)
    assert layer_sums(plan) == [4, 4]
    with pytest.raises(PlanError, match="--kv-device-bytes auto .*gpu:1"):
        plan_of(EIGHT, links(1, 1, free=(1 << 40, None)), options)
    # Nothing of a device that has no cache matters.
    all_on_first = replace(TENSOR, kv_device_bytes="auto", attn_split=(1, 0))
    assert plan_of(EIGHT, links(1, 1, free=(1 << 40, None)), all_on_first)


def test_layers_with_large_caches_stay_first():
    """One layer of a budget buys much more of a layer without a window."""
    model = shape(*(WINDOW,) * 5, ATTENTION, *(WINDOW,) * 5, ATTENTION)
    plan = plan_of(model, Mesh.virtual(1), HOST, ctx=65536, kv_gpu_layers=2)
    assert kept_layers(plan, 0) == [5, 11]
    plan = plan_of(model, Mesh.virtual(1), HOST, ctx=65536, kv_gpu_layers=4)
    assert kept_layers(plan, 0) == [2, 5, 8, 11]
