"""Plans: cuts, who holds what, which engine, and the errors."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sharding_models import model, tensors

from sharding import (
    DeviceInfo,
    LayerShape,
    Mesh,
    ModelShape,
    PlanError,
    PlanOptions,
    ShareError,
    TensorShape,
    make_plan,
    replications,
)


def tensor_plan(shape, devices, split=None, attn=None, **kw):
    options = PlanOptions(split_mode="tensor", tensor_split=split, attn_split=attn, **kw)
    mesh = Mesh.virtual(devices)
    return make_plan(shape, mesh, options, tensors(shape, replications(shape, mesh, options)))


def counts(ranges):
    return tuple(stop - start for start, stop in ranges)


SHARES = [
    (1, 1),
    (2, 1),
    (3, 1),
    (1, 0),
    (0.33, 0.67),
    (7, 1),
    (1, 1, 1),
    (2, 1, 0),
    (1, 0, 1),
    (1, 1, 1, 1, 1),
    (3, 1, 0, 2, 1),
    (1,) * 8,
    (1, 0, 0, 2, 0, 0, 0, 1),
]


@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("kv", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    "how", [{}, {"dither": True}, {"rounding": "llama.cpp"}, {"kv_replicate": True}, {"kv": "host"}]
)
def test_every_element_is_held_exactly_once_along_its_split_axis(shares, kv, how):
    shape = model(3, kv, 4, 32, vocab=130, mlp=704)
    plan = tensor_plan(shape, len(shares), shares, **how)
    for tensor in plan.tensors:
        seen = np.zeros(tensor.shape, np.int8)
        held = [d for d in range(len(shares)) if plan.holds(tensor, d)]
        assert held
        assert all(shares[d] > 0 for d in held)
        for d in range(len(shares)):
            index = plan.slices(tensor, d)
            part = seen[index]
            if tensor.split_axis is not None:
                assert (part.size > 0) == (d in held)
                part += 1
        if tensor.split_axis is not None:
            assert (seen == 1).all()
    for d, share in enumerate(shares):
        if share == 0:
            assert d not in plan.used_devices
            if not plan.padded:
                assert plan.weight_bytes(d) == 0
            assert plan.cache_bytes(d) == {"device": 0, "host": 0}
            assert plan.staging_bytes(d) == plan.link_bytes(d, 2047) == 0


@pytest.mark.parametrize(
    ("kv", "shares", "expect"),
    [
        (8, (1, 1), (4, 4)),
        (8, (2, 1), (5, 3)),
        (8, (3, 1), (6, 2)),
        (8, (1, 0), (8, 0)),
        (8, (0.33, 0.67), (3, 5)),
        (8, (7, 1), (7, 1)),
        (8, (1, 1, 1), (3, 3, 2)),
        (8, (2, 1, 0), (5, 3, 0)),
        (8, (1, 0, 1), (4, 0, 4)),
        (8, (3, 1, 0, 2, 1), (4, 1, 0, 2, 1)),
        (8, (1,) * 8, (1,) * 8),
        (8, (1, 0, 0, 2, 0, 0, 0, 1), (2, 0, 0, 4, 0, 0, 0, 2)),
        (4, (1,) * 5, (1, 1, 1, 1, 0)),
        (4, (1, 1, 1), (2, 1, 1)),
        (3, (2, 1), (2, 1)),
    ],
)
def test_groups_by_hand(kv, shares, expect):
    plan = tensor_plan(model(2, kv, 4), len(shares), shares)
    assert {counts(layer.groups) for layer in plan.layers} == {expect}


def test_the_attention_share_is_a_knob_of_its_own():
    plan = tensor_plan(model(2, 8, 2, mlp=384), 2, (1, 1), (3, 1))
    assert counts(plan.layers[0].groups) == (6, 2)
    assert counts(plan.layers[0].mlp) == (192, 192)
    assert counts(plan.vocab) == (64, 64)
    plan = tensor_plan(model(2, 8, 2), 3, (0, 1, 1), (1, 0, 0))
    assert plan.layers[0].attn_devices == (0,)
    assert plan.layers[0].mlp_devices == (1, 2)
    assert plan.layers[0].devices == (0, 1, 2)
    norm = TensorShape("output_norm", (256,), ("embed",), None, 4)
    assert [plan.holds(norm, d) for d in range(3)] == [False, True, True]
    assert [plan.holds(replace(norm, layer=0), d) for d in range(3)] == [True] * 3
    rope = TensorShape("rope_freqs", (32,), ("rope",), None, 4)
    assert [plan.holds(rope, d) for d in range(3)] == [True, False, False]


@pytest.mark.parametrize("field", ["tensor_split", "attn_split"])
@pytest.mark.parametrize("n", [3, 5])
def test_exactly_one_share_a_device(field, n):
    shares: dict[str, Any] = {field: (1,) * n}
    options = PlanOptions(split_mode="tensor", **shares)
    argument = {"tensor_split": "--tensor-split/-ts", "attn_split": "--attn-split/-as"}[field]
    with pytest.raises(ShareError, match=argument):
        make_plan(model(), Mesh.virtual(4), options)
    shares = {field: "1,1,1,1"}
    four = PlanOptions(split_mode="tensor", **shares)
    assert make_plan(model(), Mesh.virtual(4), four).used_devices == (0, 1, 2, 3)
    shares = {field: "1,nan"}
    with pytest.raises(ShareError, match=argument):
        PlanOptions(split_mode="tensor", **shares)


@pytest.mark.parametrize("devices", [2, 4])
def test_layers_that_differ_are_split_each_by_its_own_heads(devices):
    window, whole = LayerShape(4, 2, 64, 64, 384, window=16), LayerShape(1, 8, 128, 128, 384)
    shape = ModelShape((window, whole) * 2, 128, 256)
    plan = tensor_plan(shape, devices)
    assert counts(plan.layers[0].groups) == (4 // devices,) * devices
    assert counts(plan.layers[1].groups) == (1,) + (0,) * (devices - 1)
    assert plan.engine == "staged"
    assert len([n for n in plan.notes if "no attention work in 2 of 4 layers" in n]) == devices - 1

    plan = tensor_plan(shape, devices, kv_replicate=True)
    assert [layer.replication for layer in plan.layers] == [1, devices, 1, devices]
    assert counts(plan.layers[1].groups) == (1,) * devices
    extra = (devices - 1) * 2  # copies in two layers
    weights, cache = extra * (128 + 128) * 256 * 4, extra * (128 + 128) * 4 * 2048
    assert any(f"{weights} bytes of K and V" in n and f"{cache} bytes" in n for n in plan.notes)


def test_more_devices_than_heads():
    plan = tensor_plan(model(2, 2, 4), 8)
    assert counts(plan.layers[0].groups) == (1, 1, 0, 0, 0, 0, 0, 0)
    assert sum("has no attention work" in n for n in plan.notes) == 6
    plan = tensor_plan(model(2, 2, 4), 8, kv_replicate=True)
    assert plan.layers[0].replication == 4
    assert counts(plan.layers[0].groups) == (1,) * 8
    plan = tensor_plan(model(2, 2, 3), 8, kv_replicate=True)
    assert plan.layers[0].replication == 3
    assert counts(plan.layers[0].groups) == (1,) * 6 + (0, 0)
    assert sum("has no attention work" in n for n in plan.notes) == 2
    assert tensor_plan(model(2, 2, 3), 2, kv_replicate=True).layers[0].replication == 1


@pytest.mark.parametrize("shares", [(0.49, 0.51), (55, 45)])
def test_dithering_keeps_the_model_at_the_request(shares):
    plan = tensor_plan(model(16, 4, 6, gated_q=True), 2, shares, dither=True)
    for d, share in enumerate(shares):
        mean = sum(counts(layer.groups)[d] for layer in plan.layers) / 64
        assert abs(mean - share / sum(shares)) <= 1 / 64


def test_llama_cpp_rounding_rotates_over_layers_of_a_kind():
    plan = tensor_plan(model(4, 8, 4, 128, mlp=704), 2, (55, 45), rounding="llama.cpp")
    assert [counts(layer.groups) for layer in plan.layers] == [(4, 4), (5, 3)] * 2
    plan = tensor_plan(model(4, 8, 4, 128, mlp=704), 2, rounding="llama.cpp")
    assert [counts(layer.mlp) for layer in plan.layers] == [(256, 448), (448, 256)] * 2
    attention = LayerShape(3, 3, 64, 64, 384)
    none = replace(attention, kv_heads=0)
    shape = ModelShape((attention, none, none, attention), 128, 256)
    plan = tensor_plan(shape, 2, (0.33, 0.67), rounding="llama.cpp")
    assert [counts(layer.groups) for layer in plan.layers] == [(0, 3), (0, 0), (0, 0), (1, 2)]


def test_vocabulary_rows():
    assert counts(tensor_plan(model(vocab=130), 3).vocab) == (44, 43, 43)


def test_the_block_of_the_down_tensor():
    assert counts(tensor_plan(model(mlp=768, mlp_block=256), 2).layers[0].mlp) == (512, 256)
    assert counts(tensor_plan(model(mlp=768, mlp_block=1), 2).layers[0].mlp) == (384, 384)


def layer_plan(shape, mesh, split=None, **kw):
    options = PlanOptions(split_mode="layer", tensor_split=split, **kw)
    return make_plan(shape, mesh, options, tensors(shape))


def test_whole_layers():
    plan = layer_plan(model(6), Mesh.virtual(3), (2, 1, 0))
    assert [layer.devices for layer in plan.layers] == [(0,)] * 4 + [(1,)] * 2
    assert counts(plan.vocab) == (0, 128, 0)
    assert plan.parts("kv_group", 0, 0) == (0, 4)
    assert plan.parts("kv_group", 0, 1) == plan.parts("mlp", 5, 0) == (0, 0)
    assert plan.parts("embed", 0, 1) is None
    assert plan.engine == "staged"
    assert [plan.holds(plan.tensors[-1], d) for d in range(3)] == [False, True, False]
    assert layer_plan(model(6), Mesh.virtual(3)).layers[2].devices == (1,)


def test_free_memory_decides_where_layers_go():
    mesh = Mesh((DeviceInfo("a", free=3 << 30), DeviceInfo("b", free=1 << 30)))
    assert [layer.devices[0] for layer in layer_plan(model(4), mesh).layers] == [0, 0, 0, 1]
    half = Mesh((DeviceInfo("a", free=3 << 30), DeviceInfo("b")))
    assert [layer.devices[0] for layer in layer_plan(model(4), half).layers] == [0, 0, 1, 1]
    full = Mesh.virtual(2, free=0)
    assert [layer.devices[0] for layer in layer_plan(model(4), full).layers] == [0, 0, 1, 1]


def test_everything_on_the_first_device():
    options = PlanOptions(split_mode="none")
    plan = make_plan(model(3), Mesh.virtual(2), options)
    assert plan.used_devices == (0,)
    assert (plan.engine, plan.padded) == ("fused", False)


def test_layers_that_share_a_cache_stay_together():
    own = LayerShape(4, 2, 64, 64, 384)
    reader = replace(own, owns_cache=False)
    shape = ModelShape((own, own, own, reader), 128, 256)
    plan = layer_plan(shape, Mesh.virtual(2), (3, 1))
    assert [layer.devices[0] for layer in plan.layers] == [0, 0, 1, 1]
    assert any("share a cache" in note for note in plan.notes)
    plan = tensor_plan(shape, 2, (0.49, 0.51), dither=True)
    assert plan.layers[3].groups == plan.layers[2].groups
    with pytest.raises(PlanError, match="owns no cache"):
        ModelShape((reader,), 128, 256)


BAD_TENSORS = [
    (TensorShape("t", (4, 8), ("heads", "embed"), 0, 4), "tensor t.*'heads' is not declared"),
    (TensorShape("t", (4,), ("kv_group", "embed"), 0, 4), "one axis a dimension"),
    (TensorShape("t", (5, 8), ("kv_group", "embed"), 0, 4), "5 along kv_group .* splits 4"),
    (TensorShape("t", (383,), ("mlp",), 0, 4), "383 along mlp .* splits 384"),
    (TensorShape("t", (129,), ("vocab",), None, 4), "129 along vocab .* splits 128"),
    (TensorShape("t", (384,), ("mlp",), None, 4), "belongs to no layer"),
    (TensorShape("t", (384,), ("mlp",), 2, 4), "layer 2 is not one"),
    (TensorShape("t", (4, 384), ("kv_group", "mlp"), 0, 4), "kv_group and mlp"),
]


@pytest.mark.parametrize(("tensor", "message"), BAD_TENSORS)
def test_a_tensor_whose_split_nobody_declared_is_an_error_at_plan_time(tensor, message):
    options = PlanOptions(split_mode="tensor")
    good = tensors(model())
    with pytest.raises(PlanError, match=message):
        make_plan(model(), Mesh.virtual(2), options, [*good, tensor])


def test_a_device_that_does_not_exist():
    plan = tensor_plan(model(), 2)
    for device in (-1, 2):
        with pytest.raises(PlanError, match=f"device {device}"):
            plan.parts("vocab", None, device)
        with pytest.raises(PlanError, match=f"device {device}"):
            plan.holds(plan.tensors[-1], device)


UNLIKE = Mesh((DeviceInfo("a", kind="big"), DeviceInfo("b", kind="small")))


@pytest.mark.parametrize(
    ("mesh", "options", "engine"),
    [
        (Mesh.virtual(1), {}, "fused"),
        (Mesh.virtual(1), {"kv": "host"}, "staged"),
        (Mesh.virtual(1), {"engine": "staged"}, "staged"),
        (Mesh.virtual(2), {}, "fused"),
        (Mesh.virtual(2), {"tensor_split": (1, 0)}, "fused"),
        (Mesh.virtual(2), {"tensor_split": (2, 1)}, "staged"),
        (Mesh.virtual(2), {"tensor_split": (2, 1), "engine": "fused"}, "fused"),
        (Mesh.virtual(2), {"kv": "host"}, "staged"),
        (Mesh.virtual(2), {"split_mode": "layer"}, "staged"),
        (Mesh.virtual(2), {"split_mode": "layer", "tensor_split": (0, 1)}, "fused"),
        (UNLIKE, {}, "staged"),
        (UNLIKE, {"split_mode": "none"}, "fused"),
    ],
)
def test_which_engine(mesh, options, engine):
    plan = make_plan(model(), mesh, PlanOptions(**({"split_mode": "tensor"} | options)))
    assert plan.engine == engine
    assert plan.why
    assert any("zero-padded" in n for n in plan.notes) == (
        options.get("engine") == "fused" and options.get("tensor_split") == (2, 1)
    )


def test_engines_that_cannot():
    with pytest.raises(PlanError, match="-nkvo"):
        PlanOptions(engine="fused", kv="host")
    with pytest.raises(PlanError, match="--recurrent-state host"):
        PlanOptions(engine="fused", recurrent_state="host")
    assert PlanOptions(recurrent_state="host", kv_pinned=False).kv_pinned is False
    with pytest.raises(PlanError, match="needs recurrent layers"):
        make_plan(model(), Mesh.virtual(1), PlanOptions(recurrent_state="host"))
    with pytest.raises(PlanError, match="-sm layer"):
        make_plan(model(), Mesh.virtual(2), PlanOptions(engine="fused"))
    with pytest.raises(PlanError, match="of one kind"):
        make_plan(model(), UNLIKE, PlanOptions(split_mode="tensor", engine="fused"))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"split_mode": "row"}, "-sm"),
        ({"kv": "disk"}, "-nkvo"),
        ({"cache_type_k": "iq4_nl"}, "-ctk is 'iq4_nl'; .* f32, f16, bf16, q8_0, q4_0"),
        ({"cache_type_v": ["f32"]}, "-ctv"),
        ({"kv_rotate": 1}, "--kv-rotate"),
        ({"engine": "fast"}, "--engine"),
        ({"rounding": "up"}, "--rounding"),
        ({"ctx": 0}, "-c"),
        ({"ctx": 1.5}, "-c"),
        ({"ctx": True}, "-c"),
        ({"slots": 0}, "--parallel/-np"),
        ({"page": 100}, "--page"),
        ({"page": -1}, "--page"),
        ({"ubatch": 48}, "-ub"),
        ({"group_pages": 0}, "--group-pages"),
        ({"prefetch": -1}, "--prefetch"),
        ({"group_pages": 3}, "--group-pages"),
        ({"itemsize": 0}, "--dtype"),
        ({"dither": 1}, "--dither"),
        ({"kv_replicate": "yes"}, "--kv-replicate"),
        ({"dither": True, "rounding": "llama.cpp"}, "--dither"),
        ({"split_mode": "none", "tensor_split": (1,)}, "-ts"),
        ({"split_mode": "none", "attn_split": (1,)}, "-as"),
        ({"split_mode": "layer", "attn_split": (1,)}, "-as"),
    ],
)
def test_bad_options_are_named(options, name):
    with pytest.raises(PlanError, match=name):
        PlanOptions(**options)


def test_a_batch_that_is_not_given_goes_with_chunks():
    assert PlanOptions().prompt_batch == PlanOptions(ubatch=2048).prompt_batch == 2048
    options = replace(PlanOptions(), ubatch=4096)
    assert options.prompt_batch == options.ubatch
    assert PlanOptions(batch=700).prompt_batch == 700
    with pytest.raises(PlanError, match="--batch-size/-b is 2048; .*-ub 4096"):
        PlanOptions(batch=2048, ubatch=4096)


@pytest.mark.parametrize(
    "change", [{"kv_heads": -1}, {"q_per_kv": 0}, {"k_dim": 0}, {"window": 0}, {"mlp": 1.0}]
)
def test_bad_shapes(change):
    with pytest.raises(PlanError, match=next(iter(change))):
        replace(LayerShape(4, 2, 64, 64, 384), **change)
    with pytest.raises(PlanError):
        ModelShape((), 128, 256)


@pytest.mark.parametrize("field", ["ctx", "page", "ubatch", "slots"])
def test_sizes_are_numbers_of_32_bits(field: str):
    with pytest.raises(PlanError, match="at most 2147483647"):
        PlanOptions(**{field: 1 << 64})
