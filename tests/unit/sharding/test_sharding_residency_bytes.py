"""Bytes, notes and reports of plans that keep pages on devices, and errors."""

import json
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
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
    layer_sums,
    links,
    plan_of,
    shape,
    with_room,
)

import sharding.plan as plan_module
from sharding import LayerShape, PlanError, full_pages


@pytest.mark.parametrize("options", [HOST, TENSOR])
@pytest.mark.parametrize("window", [1, 255, 256, 257, 1000])
@pytest.mark.parametrize("room", [0, 5, 9, 23, 57, 71, 99, None])
def test_link_bytes_are_those_of_the_pages_that_do_not_stay(options, window, room):
    model = shape(*(replace(WINDOW, window=window), ATTENTION, READER, RECURRENT) * 2, DRAFT)
    rooms = (None, None) if room is None else (room * SLICE // 16, room * SLICE // 32)
    asked = replace(options, group_pages=2, tensor_split=(1, 1), kv_gpu_layers=3)
    mesh = with_room(model, links(FAST, SLOW), asked, *rooms)
    plan = plan_of(model, mesh, asked).check_fit()
    most = [[0] * len(model.layers) for _ in range(2)]
    for position in range(0, 4097, 64):
        for device in (0, 1):
            sent = 0
            for i, layer in enumerate(model.layers):
                reach = position if layer.window is None else layer.window - 1
                seen = {k // 256 for k in range(position // 256 * 256) if position - k <= reach}
                streamed = [p for p in seen if not plan.resident(device, i, p * 256)]
                sent += len(streamed) * plan.page_bytes(i, device)
                most[device][i] = max(most[device][i], len(seen) - len(streamed))
            assert plan.link_bytes(device, position) == sent
    # No more pages are resident at a time than are paid for.
    for device in (0, 1):
        for i in range(len(model.layers)):
            assert most[device][i] <= plan.residency.pages[model.cache_owner(i)][device]


LAYERS = st.lists(
    st.sampled_from([ATTENTION, RECURRENT, WINDOW, LATENT, DRAFT]), min_size=1, max_size=9
).map(lambda found: [ATTENTION, *found])
ROOMS = st.one_of(st.none(), st.integers(-1, 200).map(lambda n: n * SLICE // 30))


@settings(deadline=None, max_examples=150)
@given(
    LAYERS,
    st.lists(st.tuples(st.sampled_from([None, 1.0, 1.1, 8.0]), ROOMS), min_size=1, max_size=4),
    st.one_of(
        st.integers(0, 12).map(lambda n: {"kv_gpu_layers": n}),
        st.integers(0, 5 * SLICE).map(lambda n: {"kv_device_bytes": n}),
    ),
    st.booleans(),
    st.integers(1, 2),
)
def test_any_budget(layers, devices, budget, tensor, slots):
    model, n = shape(*layers), len(devices)
    options = replace(TENSOR if tensor else HOST, slots=slots, tensor_split=(1,) * n)
    mesh = with_room(model, links(*(r for r, _ in devices)), options, *(m for _, m in devices))
    nothing = plan_of(model, mesh, options)
    options = replace(options, **budget)
    plan = plan_of(model, mesh, options)
    assert plan == plan_of(model, mesh, options)
    asked = budget.get("kv_gpu_layers")
    if asked is not None:
        assert sum(layer_sums(plan)) <= asked + 1e-9
    for device, info in enumerate(mesh.devices):
        kept, rows = plan.residency.devices[device], [r[device] for r in plan.residency.pages]
        pages = sum(k * plan.page_bytes(i, device) for i, k in enumerate(rows)) * slots
        assert kept.bytes == pages <= budget.get("kv_device_bytes", pages)
        partial = 0
        for layer, k, cut in zip(model.layers, rows, plan.layers, strict=True):
            full = full_pages(options, layer.window)
            counts = layer.cache_context == "main" and device in cut.attn_devices
            assert 0 <= k <= (full if counts else 0)
            partial += 0 < k < full
            assert k in (0, full) or k % options.group_pages == 0
        assert partial <= 1
        before, after = nothing.cache_bytes(device), plan.cache_bytes(device)
        assert after == {"device": before["device"] + pages, "host": before["host"] - pages}
        streams = after["host"] > 0
        assert (plan.staging_bytes(device) > 0) == streams
        assert plan.link_bytes(device, 4000) <= nothing.link_bytes(device, 4000)
        if info.free is not None and nothing.needed_bytes(device) <= info.free:
            assert plan.needed_bytes(device) <= info.free
    if all(m is None for _, m in devices) and asked is not None:
        owned = sum(1 for i in model.layers if i.kv_heads and i.cache_context == "main")
        assert sum(layer_sums(plan)) > min(asked, owned) - 1


def test_when_a_budget_cannot_pay():
    def told(plan):
        return [n for n in plan.notes if "cannot make a decode step faster" in n]

    # The slow link has little to carry: what stays of it makes no step shorter.
    few = replace(TENSOR, tensor_split=(1, 1), attn_split=(3, 1))
    [note] = told(plan_of(EIGHT, links(5.0, 4.0), few, kv_gpu_layers=1))
    assert "gpu:0" in note
    assert told(plan_of(EIGHT, links(5.0, 4.0), few, kv_gpu_layers=3)) == []
    # No room on the device that all wait for.
    even = replace(TENSOR, tensor_split=(1, 1), kv_gpu_layers=2)
    mesh = with_room(EIGHT, links(FAST, SLOW), even, None, 0)
    [note] = told(plan_of(EIGHT, mesh, even))
    assert "gpu:1" in note
    assert told(plan_of(EIGHT, links(FAST, SLOW), even)) == []
    # One slice in turn, of two like devices.
    mesh = with_room(EIGHT, links(FAST, FAST), even, None, 0)
    assert len(told(plan_of(EIGHT, mesh, even))) == 1
    assert told(plan_of(EIGHT, links(None, None), even)) == []
    # Whole layers run one after another: any budget pays.
    whole = replace(HOST, tensor_split=(1, 1), kv_gpu_layers=2)
    mesh = with_room(EIGHT, links(FAST, SLOW), whole, None, 0)
    assert told(plan_of(EIGHT, mesh, whole)) == []
    # A window that reaches into no full page streams nothing.
    model = shape(replace(WINDOW, window=1))
    assert told(plan_of(model, links(1, 1), TENSOR, kv_gpu_layers=1)) == []


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"kv_gpu_layers": -1}, "--kv-gpu-layers/-kvgl is -1"),
        ({"kv_gpu_layers": 1.5}, "--kv-gpu-layers/-kvgl is 1.5"),
        ({"kv_gpu_layers": True}, "--kv-gpu-layers/-kvgl is True"),
        ({"kv_device_bytes": -1}, "--kv-device-bytes is -1"),
        ({"kv_device_bytes": "all"}, "--kv-device-bytes is 'all'; give bytes, as 512M"),
        ({"kv_device_bytes": "-1G"}, "--kv-device-bytes is '-1G'"),
        ({"kv_device_bytes": 1.5}, "--kv-device-bytes is 1.5"),
        ({"kv_gpu_layers": 1, "kv_device_bytes": 1}, "-kvgl does not go with --kv-device-bytes"),
        ({"kv_gpu_layers": 0, "kv": "device"}, "--kv-gpu-layers/-kvgl .*--no-kv-offload/-nkvo"),
        ({"kv_device_bytes": "auto", "kv": "device"}, "--kv-device-bytes .*--no-kv-offload/-nkvo"),
    ],
)
def test_budgets_that_cannot_be(change, match):
    with pytest.raises(PlanError, match=match) as error:
        replace(HOST, **change)
    assert "\n" not in str(error.value)


def test_without_a_budget():
    plan = plan_of(EIGHT, links(FAST, SLOW), HOST)
    assert layer_sums(plan) == [0, 0]
    assert plan.notes == ()
    assert not plan.resident(0, 0, 0)
    on_device = plan_of(EIGHT, links(FAST, SLOW), HOST, kv="device", engine="staged")
    assert on_device.resident(0, 0, 0)
    assert on_device.staging_bytes(0) == on_device.link_bytes(0, 4000) == 0
    # Fewer positions than a page: nothing to keep, nothing to stream.
    plan = plan_of(EIGHT, links(1, 1), HOST, ctx=100, kv_gpu_layers=4)
    assert layer_sums(plan) == [0, 0]
    assert plan.staging_bytes(0) == plan.link_bytes(0, 100) == 0
    assert not plan.resident(0, 0, 0)
    with pytest.raises(PlanError, match="device 2"):
        plan.resident(2, 0, 0)
    with pytest.raises(PlanError, match="layer 8"):
        plan.resident(0, 8, 0)


def test_a_budget_is_resolved_once(monkeypatch):
    calls = []

    def count(plan, original=plan_module.spend_budget):
        calls.append(plan)
        return original(plan)

    monkeypatch.setattr(plan_module, "spend_budget", count)
    plan = plan_of(EIGHT, links(FAST, SLOW), HOST, kv_gpu_layers=3)
    again = plan.with_tensors(plan.tensors[:1])
    assert again.residency is plan.residency
    for device in (0, 1):
        plan.cache_bytes(device), plan.link_bytes(device, 99), plan.needed_bytes(device)
    plan.check_fit().to_dict()
    assert len(calls) == 1


def test_the_report_tells_what_was_asked_and_what_is_kept():
    options = replace(HOST, kv_gpu_layers=4, tensor_split=(1, 1))
    mesh = with_room(EIGHT, links(FAST, SLOW), options, 5 * SLICE // 2, SLICE)
    plan = plan_of(EIGHT, mesh, options)
    text = str(plan)
    assert "asked to keep" in text
    assert "2.5 layers, 40.0 MiB" in text
    assert "1 layer, 16.0 MiB" in text
    assert "4 layers, 64.0 MiB" in text
    assert "asked to keep" in plan._repr_html_()
    data = json.loads(json.dumps(plan.to_dict()))
    assert data["options"]["kv_gpu_layers"] == 4
    assert data["devices"][1]["kept"] == {
        "requested_layers": 4.0,
        "requested_bytes": 4 * SLICE,
        "layers": 1.0,
        "bytes": SLICE,
    }
    assert [row["resident_pages"] for row in data["layers"]] == [
        list(row) for row in plan.residency.pages
    ]
    assert data["devices"][0]["compute_bytes"] == plan.compute_bytes(0)
    on_device = plan_of(EIGHT, mesh, HOST, kv="device")
    assert "asked to keep" not in str(on_device)
    assert on_device.to_dict()["devices"][0]["kept"] is None


@pytest.mark.parametrize("budget", [{"kv_gpu_layers": 37}, {"kv_device_bytes": 3 << 30}])
def test_large_plans_are_made_at_once(budget):
    model = shape(*(LayerShape(16, 4, 128, 128, 512),) * 64)
    options = replace(TENSOR, ctx=1 << 20, tensor_split=(5, 4, 3, 3, 2, 2, 1, 1), dither=True)
    start = time.perf_counter()
    plan = plan_of(model, links(*range(1, 9)), options, **budget)
    assert plan.notes is not None and sum(d.bytes for d in plan.residency.devices)
    sum(plan.link_bytes(d, (1 << 20) - 1) for d in range(8))
    assert time.perf_counter() - start < 1
