"""What measured rates are held against: what the machine allows, and what the cost model predicts.

A decoded token reads every weight, and all that its query sees, once, and what the plan streams
crosses the link; a prompt takes two operations for each weight of the layers.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from jaxllm.bench.tests import Test
from jaxllm.calibration import Limits
from sharding import CostModel, Mesh, Plan, position_bytes


def expected(plan: Plan, mesh: Mesh, limits: Limits, test: Test) -> dict[str, Any]:
    """Columns of a test: its limit and prediction in tokens a second, and the plan's bytes.

    `mesh` is the plan's with rates for the cost model. Weight, cache and link bytes are those of a
    decoded token, or of a prompt's token in the middle of the prompt.
    """
    middle = test.depth + (test.prompt + test.predict) // 2
    devices = range(len(plan.mesh))
    sent = sum(plan.link_bytes(i, middle) for i in devices)
    found: dict[str, Any] = {
        "limit": _join(test, prompt_limit(plan, limits), decode_limit(plan, limits, middle)),
        "predicted": _predicted(plan, mesh, test),
        "link_bytes": sent if test.predict else sent / plan.options.ubatch,
        "compute_bytes": max(plan.compute_bytes(i) for i in devices),
    }
    if not test.prompt:
        found |= {"weight_bytes": weight_bytes(plan), "cache_bytes": cache_bytes(plan, middle)}
    return found


def _predicted(plan: Plan, mesh: Mesh, test: Test) -> float | None:
    cost = CostModel(replace(plan, mesh=mesh))
    prompt = cost.prefill_rate(test.depth + test.prompt // 2)
    decode = cost.decode_rate(test.depth + test.prompt + test.predict // 2)
    return _join(test, prompt, decode)


def _join(test: Test, prompt: float | None, decode: float | None) -> float | None:
    """The rate of a test from those of a prompt and of decoding."""
    if not test.predict or not test.prompt:
        return prompt if test.prompt else decode
    if prompt is None or decode is None:
        return None
    return (test.prompt + test.predict) / (test.prompt / prompt + test.predict / decode)


def weight_bytes(plan: Plan) -> int:
    """Bytes of weights that a decode step reads, on all devices."""
    found = sum(plan.weight_bytes(i) for i in range(len(plan.mesh)))
    if any(t.name.startswith("head") for t in plan.tensors):
        # of the input table only one row is read
        tables = [t for t in plan.tensors if t.name.startswith("table")]
        found -= sum(math.prod(t.shape) * t.itemsize for t in tables)
    return found


def cache_bytes(plan: Plan, position: int) -> int:
    """Bytes of cache that a query at a position sees, on all devices."""
    return sum(
        position_bytes(layer, plan.options)
        * layer.kv_heads
        * min(position, layer.window or position)
        for layer in plan.model.layers
    )


def _side_by_side(plan: Plan) -> bool:
    """Whether several real devices work, each with a memory of its own."""
    return len(plan.mesh) > 1 and any(d.platform != "cpu" for d in plan.mesh.devices)


def decode_limit(plan: Plan, limits: Limits, position: int) -> float | None:
    """The most tokens a second of all sequences at a position; None for several real devices."""
    if _side_by_side(plan):
        return None
    slots = plan.options.slots
    read = weight_bytes(plan) + slots * cache_bytes(plan, position)
    seconds = read / (limits.read_gb_s * 1e9)
    if limits.link_gb_s is not None:
        sent = slots * max(plan.link_bytes(i, position) for i in range(len(plan.mesh)))
        seconds = max(seconds, sent / (limits.link_gb_s * 1e9))
    return slots / seconds


def prompt_limit(plan: Plan, limits: Limits) -> float | None:
    """The most prompt tokens a second, attention and head (which is asked for one token alone) not
    counted; None for several real devices."""
    if _side_by_side(plan):
        return None
    weights = {}
    for tensor in plan.tensors:
        if tensor.layer is not None:  # each array of a quantised matrix covers all its values
            matrix = tensor.name.rpartition(".")[0] if tensor.packs > 1 else tensor.name
            weights[matrix] = math.prod(tensor.shape) * tensor.packs
    return limits.matmul_gflop_s * 1e9 / (2 * sum(weights.values()))
