"""Byte figures against values worked out by hand, and the report that shows them."""

import json
import math
from dataclasses import replace

import pytest
from sharding_models import model, tensors

from sharding import (
    DeviceInfo,
    DoesNotFit,
    LayerShape,
    Mesh,
    ModelShape,
    PlanError,
    PlanOptions,
    full_pages,
    make_plan,
    pages_read,
    ring_positions,
    rotates,
)

SMALL = PlanOptions(split_mode="tensor", ctx=1000, page=64, ubatch=128, slots=2)


def test_rings():
    assert ring_positions("fused", SMALL) == 1024
    assert ring_positions("fused", SMALL, window=16) == 256  # 16 + 128 to whole 128
    assert ring_positions("fused", SMALL, window=4096) == 1024
    assert ring_positions("staged", SMALL) == 256  # 64 + 128 to whole 128
    assert ring_positions("staged", SMALL, window=16) == 256
    assert ring_positions("staged", replace(SMALL, page=256)) == 512
    assert ring_positions("staged", replace(SMALL, tail_pages=4)) == 384  # 4 * 64 + 128
    assert full_pages(replace(SMALL, tail_pages=4)) == 12
    assert full_pages(SMALL) == 15
    assert full_pages(SMALL, window=16) == 2
    assert full_pages(SMALL, window=65) == 3
    assert full_pages(SMALL, window=4096) == 15


@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("window", [None, 1, 3, 4, 5, 16, 40])
@pytest.mark.parametrize("together", [1, 2])
def test_pages_read_are_the_full_pages_with_a_position_that_is_seen(page, window, together):
    options = replace(SMALL, page=page, tail_pages=together)
    for position in range(80):
        seen = {
            k // page
            for k in range(position // (page * together) * page * together)
            if window is None or position - k < window
        }
        assert pages_read(options, position, window) == len(seen)
        assert len(seen) <= full_pages(options, window)


def test_weights():
    shape = model(2, 4, 2, 64, mlp=384, vocab=130)
    plan = make_plan(shape, Mesh.virtual(2), replace(SMALL, tensor_split=(3, 1)), tensors(shape))
    # A group: (2 + 1 + 1) * 64 rows of qkv and 2 * 64 columns of out; three MLP matrices.
    group, column, norm = (256 + 128) * 256 * 4, 3 * 256 * 4, 256 * 4
    rows = (98, 32)
    for d, (groups, columns) in enumerate([(3, 288), (1, 96)]):
        want = 2 * (groups * group + columns * column + norm) + rows[d] * 256 * 4 + norm
        assert plan.weight_bytes(d) == want
    whole = sum(t.itemsize * math.prod(t.shape) for t in plan.tensors)
    assert plan.weight_bytes(0) + plan.weight_bytes(1) == whole + 3 * norm


def test_widths_come_from_head_dims():
    shape = ModelShape((LayerShape(4, 1, 32, 16, 64),), 128, 64)
    plan = make_plan(shape, Mesh.virtual(1), replace(SMALL, cache_type_v="f16"))
    assert plan.page_bytes(0, 0) == 4 * 64 * (32 * 4 + 16 * 2)


@pytest.mark.parametrize(
    ("k", "v", "position"), [("q8_0", "q4_0", 6 * 34 + 4 * 18), ("q4_0", "f16", 6 * 18 + 128 * 2)]
)
def test_quantised_rows_are_whole_blocks(k, v, position):
    shape = ModelShape((LayerShape(4, 1, 192, 128, 64),) * 2, 128, 64)
    options = replace(SMALL, kv="host", cache_type_k=k, cache_type_v=v)
    plan = make_plan(shape, Mesh.virtual(2), options)
    assert plan.page_bytes(0, 0) == 2 * 64 * position
    tail, pages = 2 * 256 * 2 * 2 * position, 2 * 15 * 64 * 2 * 2 * position
    assert plan.cache_bytes(1) == {"device": tail, "host": pages}
    assert plan.link_bytes(1, 330) == 2 * 5 * plan.page_bytes(0, 1)


@pytest.mark.parametrize(
    ("k", "v", "named"), [("q8_0", "f16", "-ctk q8_0 .* 80"), ("f16", "q4_0", "-ctv q4_0 .* 48")]
)
def test_rows_that_blocks_do_not_divide(k, v, named):
    layers = LayerShape(4, 1, 64, 64, 64), LayerShape(4, 1, 80, 48, 64)
    options = replace(SMALL, cache_type_k=k, cache_type_v=v)
    with pytest.raises(PlanError, match=rf"{named}; use f16") as error:
        make_plan(ModelShape(layers, 128, 64), Mesh.virtual(1), options)
    assert "layer 1 " in str(error.value)
    none = replace(layers[1], kv_heads=0)  # a layer without attention has no cache
    make_plan(ModelShape((layers[0], none), 128, 64), Mesh.virtual(1), options)


def test_which_rows_are_rotated():
    assert rotates("q8_0", 64, None) and rotates("q4_0", 128, True)
    assert not rotates("q8_0", 64, False)
    assert not rotates("q8_0", 96, True) and not rotates("f16", 64, True)
    shape = ModelShape((LayerShape(4, 1, 64, 64, 64), LayerShape(4, 1, 96, 64, 64)), 128, 64)
    options = replace(SMALL, cache_type_k="q8_0", cache_type_v="q8_0")
    assert make_plan(shape, Mesh.virtual(1), options).notes == ()
    [note] = make_plan(shape, Mesh.virtual(1), replace(options, kv_rotate=True)).notes
    assert "-ctk stores of layer 1 " in note and " 96 " in note


def test_cache_of_the_fused_engine():
    shape = ModelShape(
        (LayerShape(4, 2, 64, 64, 384), LayerShape(2, 4, 64, 64, 384, window=16)), 128, 256
    )
    plan = make_plan(shape, Mesh.virtual(2), SMALL)
    assert plan.engine == "fused"
    for d in range(2):
        want = 2 * (2 * 1024 + 1 * 256) * 128 * 4
        assert plan.cache_bytes(d) == {"device": want, "host": 0}
        assert plan.staging_bytes(d) == plan.link_bytes(d, 999) == 0


def test_the_fused_engine_stores_the_largest_share_everywhere():
    shape = model(1, 4)
    options = replace(SMALL, tensor_split=(3, 1, 0), engine="fused")
    plan = make_plan(shape, Mesh.virtual(3), options, tensors(shape))
    alone = make_plan(shape, Mesh.virtual(3), replace(options, engine="staged"), tensors(shape))
    assert plan.padded
    assert {plan.weight_bytes(d) for d in range(3)} == {alone.weight_bytes(0)}
    assert {plan.cache_bytes(d)["device"] for d in range(3)} == {2 * 3 * 1024 * 128 * 4}


@pytest.mark.parametrize("kv", ["host", "device"])
def test_cache_of_the_staged_engine(kv):
    whole = LayerShape(4, 2, 64, 32, 384)
    window = LayerShape(2, 4, 64, 64, 384, window=65)
    reader = replace(whole, owns_cache=False)
    shape = ModelShape((whole, window, reader), 128, 256)
    options = replace(SMALL, kv=kv, engine="staged", tensor_split=(3, 1), cache_type_k="f16")
    plan = make_plan(shape, Mesh.virtual(2), options)
    for d, (a, b) in enumerate([(3, 2), (1, 0)]):
        whole_position, window_position = a * (64 * 2 + 32 * 4), b * (64 * 2 + 64 * 4)
        tail = 2 * 256 * (whole_position + window_position)
        pages = 2 * 64 * (15 * whole_position + 3 * window_position)
        if kv == "host":
            assert plan.cache_bytes(d) == {"device": tail, "host": pages}
            largest = 64 * max(whole_position, window_position)
            assert plan.page_bytes(0, d) == 64 * whole_position
            assert plan.staging_bytes(d) == 4 * 16 * largest
            # At position 330: 5 full pages; the window 266..330 touches page 4 of them.
            assert plan.link_bytes(d, 330) == 64 * (2 * 5 * whole_position + window_position)
            assert plan.link_bytes(d, 63) == 0
        else:
            assert plan.cache_bytes(d) == {"device": tail + pages, "host": 0}
            assert plan.staging_bytes(d) == plan.link_bytes(d, 330) == 0


def test_a_plan_that_does_not_fit():
    shape = model(2)
    need = make_plan(shape, Mesh.virtual(2), SMALL, tensors(shape)).needed_bytes(1)
    roomy, tight = DeviceInfo("gpu:0", free=need), DeviceInfo("gpu:1", free=need - 1)
    with pytest.raises(DoesNotFit) as error:
        make_plan(shape, Mesh((roomy, tight)), SMALL, tensors(shape)).check_fit()
    assert (error.value.device, error.value.needed, error.value.free) == ("gpu:1", need, need - 1)
    smaller = replace(SMALL, ctx=128)
    plan = make_plan(shape, Mesh((roomy, tight)), smaller, tensors(shape))
    assert plan.check_fit() is plan
    assert plan.engine == "fused"
    assert make_plan(shape, Mesh.virtual(2), SMALL, tensors(shape)).check_fit()


def test_the_report():
    shape = replace(model(3, 4, mlp=704, vocab=130), name="toy <1>")
    options = replace(SMALL, kv="host", tensor_split=(0.55, 0.4, 0.05), dither=True)
    mesh = Mesh((DeviceInfo("a" * 40), DeviceInfo("b" * 40), DeviceInfo("c")))
    plan = make_plan(shape, mesh, options, tensors(shape))
    text, page = str(plan), plan._repr_html_()
    for shown in ("a" * 40, "b" * 40, "engine: staged, the cache is in host memory", *plan.notes):
        assert shown in text
    for start, stop in plan.vocab:
        assert f" {stop - start} " in text
    for start, stop in plan.layers[0].mlp:
        assert f" {stop - start} " in text
    assert f"{plan.weight_bytes(0) / 2**20:.1f} MiB" in text
    assert f"{plan.cache_bytes(0)['host'] / 2**20:.1f} MiB" in text
    assert "(mean 2.33)" in text
    assert "toy &lt;1&gt;" in page
    assert page.count("<tr>") == 4

    data = json.loads(json.dumps(plan.to_dict()))
    assert data["engine"] == "staged"
    assert [d["weight_bytes"] for d in data["devices"]] == [plan.weight_bytes(d) for d in range(3)]
    assert data["devices"][1]["cache_bytes"] == plan.cache_bytes(1)
    assert data["layers"][0]["groups"] == [list(r) for r in plan.layers[0].groups]
    assert "-" in str(make_plan(shape, mesh, options))
