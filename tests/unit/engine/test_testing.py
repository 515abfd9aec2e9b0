"""The assertions that the package offers to tests of mesh configurations fail when they should."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jaxllm import LLM
from jaxllm.testing import (
    assert_partition,
    assert_weights_as_planned,
    random_llm,
    small_config,
    virtual_mesh,
)
from sharding import Plan

CONFIG = small_config(k_dim=16, embed=64, mlp=96)
TENSOR = dict(devices=3, split_mode="tensor")
MESHES: dict[str, dict[str, Any]] = {
    "one": dict(devices=1),
    "one, staged": dict(devices=1, kv="host"),
    "layers": dict(devices=2, split_mode="layer"),
    "uneven": dict(TENSOR, attn_split=(2, 1, 0), kv="host"),
    "weights apart": dict(TENSOR, tensor_split=(1, 0, 3), attn_split=(0, 1, 1)),
    "padded": dict(TENSOR, tensor_split=(2, 1, 1), engine="fused"),
    "more devices than heads": dict(devices=8, split_mode="tensor", engine="staged"),
    "copied heads": dict(devices=8, split_mode="tensor", kv_replicate=True, engine="staged"),
}


def make(mesh: str) -> LLM:
    return random_llm(CONFIG, ubatch=16, **MESHES[mesh])


def with_layers(plan: Plan, **changes: Any) -> Plan:
    """A plan with ranges of its first layer replaced."""
    first, *others = plan.layers
    return replace(plan, layers=(replace(first, **changes), *others))


@pytest.mark.parametrize("mesh", MESHES)
def test_good_plans_pass(mesh: str):
    llm = make(mesh)
    assert_partition(llm.plan)
    assert_weights_as_planned(llm)


@pytest.mark.parametrize("tied", [True, False])
def test_both_kinds_of_heads_pass(tied: bool):
    llm = random_llm(small_config(k_dim=16, embed=64, tied=tied), **MESHES["uneven"])
    assert_partition(llm.plan)
    assert_weights_as_planned(llm)


@pytest.mark.parametrize(
    "changes",
    [
        dict(groups=((0, 2), (1, 4), (4, 4))),
        dict(groups=((0, 2), (3, 4), (4, 4))),
        dict(groups=((0, 4), (0, 4), (0, 4))),
        dict(mlp=((0, 32), (32, 64), (64, 95))),
        dict(mlp=((0, 33), (32, 64), (64, 96))),
    ],
)
def test_overlaps_and_gaps_in_a_layer_fail(changes: dict[str, Any]):
    plan = make("uneven").plan
    with pytest.raises(AssertionError, match="is held"):
        assert_partition(with_layers(plan, **changes))


@pytest.mark.parametrize(
    "vocab", [((0, 50), (50, 100), (100, 127)), ((0, 60), (50, 100), (100, 128))]
)
def test_overlaps_and_gaps_in_the_vocabulary_fail(vocab: Any):
    with pytest.raises(AssertionError, match="is held"):
        assert_partition(replace(make("uneven").plan, vocab=vocab))


@pytest.mark.parametrize(
    ("mesh", "other"), [("uneven", "weights apart"), ("weights apart", "uneven"), ("one", "layers")]
)
def test_weights_of_another_plan_fail(mesh: str, other: str):
    llm = make(mesh)
    broken = replace(make(other).plan, mesh=llm.plan.mesh) if mesh != "one" else None
    if broken is None:
        broken = llm.plan.with_tensors(llm.plan.tensors[:-1])
    llm.model = replace(llm.model, plan=broken)
    assert llm.plan is broken
    with pytest.raises(AssertionError, match="weights take"):
        assert_weights_as_planned(llm)


def test_a_mesh_of_virtual_devices():
    mesh = virtual_mesh(3)
    assert len(mesh) == 3 and len(set(mesh.jax_devices or ())) == 3


def test_random_models_are_the_same_under_every_plan():
    prompt = list(range(32))
    expected = make("one").logits(prompt)
    for mesh in ("weights apart", "padded"):
        assert abs(make(mesh).logits(prompt) - expected).max() < 1e-3, mesh
