"""A budget keeps pages on devices: the same bytes of every logit, and fewer over the links."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM, ModelConfig
from jaxllm.models.decoder import DecoderBlock
from jaxllm.planning import plan_config
from sharding import DeviceInfo, Mesh
from support import (
    Trace,
    assert_same_bytes,
    layer_config,
    make_llm,
    model_config,
    planned_bytes,
    random_ids,
    run,
    small_model,
)

PROMPT, STEPS = 90, 8  # five full pages, then a sixth
CUT = dict(devices=3, split_mode="tensor", attn_split="2,1,0", link_gbps="24.2,3.3,10")
NEAR, FAR = layer_config(3, 2, 16, window=40), layer_config(3, 2, 16)
MODELS = {"full": model_config([FAR] * 4), "windows": model_config([NEAR, FAR] * 2)}
BUDGETS: dict[str, list[dict[str, Any]]] = {
    "full": [
        *[dict(kv_gpu_layers=n) for n in (0, 1, 3, 99)],
        dict(kv_device_bytes=100_000),
    ],
    "windows": [
        *[dict(kv_gpu_layers=n) for n in (1, 2)],
        *[dict(kv_device_bytes=n) for n in (0, 100_000, 10**9)],
    ],
}
CASES = [
    pytest.param(name, budget, id=f"{name}-{budget}") for name in MODELS for budget in BUDGETS[name]
]


def _run(llm: LLM) -> Trace:
    return run(llm, random_ids(PROMPT), random_ids(STEPS, seed=1))


@cache
def _resident(name: str) -> Trace:
    cut = {key: value for key, value in CUT.items() if key != "link_gbps"}
    return _run(make_llm(MODELS[name], engine="staged", **cut))


@pytest.mark.xdist_group("residency")
@pytest.mark.parametrize(("name", "budget"), CASES)
def test_a_budget_changes_no_bit(name: str, budget: dict[str, Any]):
    llm = make_llm(MODELS[name], kv="host", **CUT, **budget)
    found = _run(llm)
    assert_same_bytes(found.logits, _resident(name).logits, str(budget))
    np.testing.assert_array_equal(found.sent, planned_bytes(llm, PROMPT, STEPS))


def test_the_slow_link_is_spared_first():
    """One layer of four is three groups of twelve: the slow device's four take most of it."""
    sent = {}
    for layers in (0, 1, 2):
        llm = make_llm(MODELS["full"], kv="host", kv_gpu_layers=layers, **CUT)
        sent[layers] = _run(llm).sent[-1]
    assert sent[0][0] == 2 * sent[0][1] > 0
    assert sent[1][0] == sent[0][0] and sent[1][1] == sent[0][1] // 4
    assert sent[2][1] == 0 and 0 < sent[2][0] < sent[0][0]


def test_pages_are_held_where_the_plan_says():
    llm = make_llm(MODELS["full"], kv="host", kv_gpu_layers=2, **CUT)
    for row in range(128):
        llm.engine.forward(np.asarray([[row]], np.int32), 0, np.asarray([row]))
        llm.engine.settle(0, np.asarray([row + 1]))
    for device, store in enumerate(llm.engine.stores):
        held, kept = store.held_bytes(), llm.plan.residency.devices[device].bytes
        assert held["device"] == kept
        assert held["pinned"] + held["pageable"] == llm.plan.cache_bytes(device)["host"]


def test_measured_links_decide(monkeypatch: pytest.MonkeyPatch):
    """Rates are measured where several devices share a budget and none are given."""
    asked = []

    def measure(mesh: Any, how: Any, store: Any, *_: Any) -> Any:
        asked.append(how)
        return with_links(mesh, "3,9")

    from sharding.links import with_links

    monkeypatch.setattr("jaxllm.planning.measured", measure)
    model: ModelConfig = MODELS["full"]
    cut = dict(devices=2, split_mode="layer", kv="host")
    plan = make_llm(model, kv_gpu_layers=2, **cut).plan
    assert [kept.layers for kept in plan.residency.devices] == [2, 0]
    assert len(asked) == 1 and asked[0].group_bytes >= 4 * plan.page_bytes(0, 0)
    make_llm(model, **cut)
    assert len(asked) == 1


def test_less_than_was_asked_for_is_a_warning():
    """Room for no page beside weights and steps; a budget that is met says nothing."""
    cfg, cut = small_model(), dict(split_mode="tensor", kv="host", ctx=128, page=16, ubatch=16)
    whole = plan_config(DecoderBlock, cfg, Mesh.virtual(2), **cut).plan
    free = [whole.needed_bytes(i) for i in (0, 1)]
    infos = (DeviceInfo(f"gpu:{i}", free=n) for i, n in enumerate(free))
    with pytest.warns(UserWarning, match="device gpu:. keeps .* were asked for") as told:
        made = plan_config(DecoderBlock, cfg, Mesh(tuple(infos)), kv_gpu_layers=1, **cut)
    short = [d for d in made.plan.residency.devices if d.layers < d.requested_layers]
    assert len(told) == len(short) > 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan_config(DecoderBlock, cfg, Mesh.virtual(2), kv_gpu_layers=1, **cut)
