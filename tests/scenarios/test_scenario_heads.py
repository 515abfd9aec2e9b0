"""Grouped heads over two, three, five and eight devices: uneven cuts, few heads, mixed layers."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import naive
from jaxllm import LLM, ModelConfig, Rope
from jaxllm.engine.build import plan_model
from jaxllm.models.decoder import DecoderBlock
from jaxllm.models.sources import RandomSource
from sharding import DeviceInfo, Mesh, PlanOptions
from support import (
    Trace,
    assert_close,
    assert_same_bytes,
    layer_config,
    make_llm,
    model_config,
    planned_bytes,
    random_ids,
    run,
)

PROMPT, STEPS = 40, 8


def _model(layers: int, kv_heads: int, q_per_kv: int, dim: int, **changes: Any) -> ModelConfig:
    one = layer_config(kv_heads, q_per_kv, dim, scale=5.0, **changes)
    return model_config([one] * layers, embed=256, vocab=128)


def _run(llm: LLM) -> Trace:
    return run(llm, random_ids(PROMPT, 128), random_ids(STEPS, 128, seed=1))


def _host_is_device(model: ModelConfig, **arguments: Any) -> Trace:
    """The same bytes from both places of the cache, one device's results, the planned transfers."""
    arguments = dict(split_mode="tensor") | arguments
    types = {key: arguments[key] for key in ("cache_type_k", "cache_type_v") if key in arguments}
    device = _run(make_llm(model, engine="staged", **arguments))
    llm = make_llm(model, kv="host", **arguments)
    host = _run(llm)
    assert_same_bytes(host.logits, device.logits)
    np.testing.assert_array_equal(host.sent, planned_bytes(llm, PROMPT, STEPS))
    # A rounded cache makes a last bit of float32 a step of its own type now and then.
    limit = 1e-6 if types.get("cache_type_k", "f32") != "f32" else 1e-10
    assert_close(host.logits, _run(make_llm(model, **types)).logits, limit)
    return host


@pytest.mark.parametrize("cache", ["f32", pytest.param("q8_0", marks=pytest.mark.smoke)])
def test_grouped_heads_on_two_devices(cache: str):
    model = _model(2, 4, 2, 64)
    _host_is_device(model, devices=2, attn_split="55,45", cache_type_k=cache, cache_type_v=cache)


def test_labels_of_any_length_on_eight_devices():
    model = _model(1, 8, 2, 32)
    options = PlanOptions(
        split_mode="tensor", kv="host", ctx=128, page=16, ubatch=16, group_pages=4, prefetch=2
    )
    found = []
    for length in (5, 40):
        infos = [DeviceInfo(f"{i}".rjust(length, "x")) for i in range(8)]
        mesh = Mesh(tuple(infos), tuple(jax.devices()[:8]))
        planned = plan_model(DecoderBlock, model, mesh, options, "float32")
        found.append(_run(LLM(planned, RandomSource(planned.whole.cfg), None)))
    assert_same_bytes(found[1].logits, found[0].logits)
    assert_close(found[0].logits, _run(make_llm(model)).logits)


@pytest.mark.parametrize(("devices", "cache"), [(3, "f16"), (5, "q8_0")])
def test_odd_numbers_of_devices(devices: int, cache: str):
    model = _model(2, 4, 6, 64)
    trace = _host_is_device(model, devices=devices, cache_type_k=cache, cache_type_v=cache)
    heads = {3: [2, 1, 1], 5: [1, 1, 1, 1, 0]}[devices]
    np.testing.assert_array_equal(trace.sent[0] / trace.sent[0].sum() * 4, heads)


def _mixed() -> ModelConfig:
    """Window layers of four KV heads of 64, and global layers of one KV head of 128."""
    near = layer_config(4, 2, 64, scale=5.0, window=16)
    far = layer_config(1, 8, 128, scale=5.0, rope=Rope(1e6, 128, "halves"))
    return model_config([near, far] * 2, embed=256, vocab=128)


@pytest.mark.parametrize(("devices", "replicate"), [(2, True), (4, False)])
def test_other_heads_in_every_other_layer(devices: int, replicate: bool):
    model = _mixed()
    cut = dict(devices=devices, kv_replicate=replicate)
    _host_is_device(model, **cut)
    llm = make_llm(model, engine="fused", split_mode="tensor", **cut)
    alone = make_llm(model)
    assert_close(_run(llm).logits, _run(alone).logits)
    wide = naive.logits(model, random_ids(PROMPT, 128) + random_ids(STEPS, 128, seed=1))
    assert_close(_run(alone).logits, wide.astype(np.float32))
    for shape, layer in zip(model.layers, llm.plan.layers, strict=True):
        groups = [stop - start for start, stop in layer.groups]
        times = devices if replicate and shape.kv_heads == 1 else 1
        assert layer.replication == times
        assert sum(groups) == shape.kv_heads * times
    report = str(llm.plan)
    if replicate:
        copies = 2 * (devices - 1)
        extra = copies * 2 * 128 * 256 * 4, copies * 2 * 128 * 4 * 128
        assert f"{extra[0]} bytes of K and V weights" in report
        assert f"{extra[1]} bytes of cache" in report
    else:
        assert "no attention work in 2 of 4 layers" in report


@pytest.mark.parametrize("replicate", [False, True])
def test_more_devices_than_heads(replicate: bool):
    """Decided and reported by the plan, before anything runs, and right."""
    model = _model(2, 2, 4, 64)
    trace = _host_is_device(model, devices=8, kv_replicate=replicate)
    plan = make_llm(model, devices=8, split_mode="tensor", kv="host", kv_replicate=replicate).plan
    working = plan.layers[0].attn_devices
    assert len(working) == (8 if replicate else 2)
    assert tuple(np.flatnonzero(trace.sent[-1])) == working
    assert plan.layers[0].replication == (4 if replicate else 1)
    assert ("extra copies" if replicate else "has no attention work") in " ".join(plan.notes)


@pytest.mark.parametrize("heads", [(4, 32), (2, 96), (8, 8)])
def test_bytes_follow_the_head_dim(heads: tuple[int, int]):
    """Heads need not add up to the width: bytes come from the head dim, not from the quotient."""
    count, dim = heads
    layer = layer_config(count, 1, dim)
    llm = make_llm(model_config([layer] * 2, embed=64, vocab=128), kv="host")
    assert llm.plan.page_bytes(0, 0) == count * 16 * 2 * dim * 4
    assert llm.plan.cache_bytes(0)["host"] == 2 * count * 128 * 2 * dim * 4
    trace = _run(llm)
    np.testing.assert_array_equal(trace.sent, planned_bytes(llm, PROMPT, STEPS))
    assert trace.sent[0, 0] == 2 * 2 * llm.plan.page_bytes(0, 0)


def test_keys_of_192_with_values_of_128():
    types = dict(cache_type_k="f16", cache_type_v="f32")
    _host_is_device(_model(2, 4, 2, 192, v_dim=128), devices=3, attn_split="2,1,0", **types)
