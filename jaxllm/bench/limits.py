"""What measured rates are held against: what the machine allows, and what the cost model predicts.

A decoded token reads its weights, and all that its query sees, once, and what the plan streams
crosses the link; a prompt takes two operations for each of its weights. The cost model counts both,
of a mixture those of the experts that tokens are sent to. Several real devices, whose memories are
read side by side, have no limit here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxllm.bench.tests import Test
from jaxllm.calibration import Limits
from sharding import CostModel, Mesh, Plan


def expected(plan: Plan, mesh: Mesh, limits: Limits, test: Test) -> dict[str, Any]:
    """Columns of a test: its limit and prediction in tokens a second, and the plan's bytes.

    `mesh` is the plan's with rates for the cost model. Weight, cache and link bytes are those of a
    decoded token, or of a prompt's token in the middle of the prompt.
    """
    cost, slots = CostModel(replace(plan, mesh=mesh)), plan.options.slots
    middle = test.depth + (test.prompt + test.predict) // 2
    devices = range(len(plan.mesh))
    rows, tokens = (slots, slots) if test.predict else (1, plan.options.ubatch)  # of a step
    sent = sum(plan.step_bytes(i, middle, rows) for i in devices)
    weights = _read(cost, slots, 0)
    cache = _read(cost, slots, middle) - weights
    found: dict[str, Any] = {
        "limit": None,
        "predicted": _join(
            test,
            cost.prefill_rate(test.depth + test.prompt // 2),
            cost.decode_rate(test.depth + test.prompt + test.predict // 2),
        ),
        "link_bytes": sent / tokens,
        "compute_bytes": max(plan.compute_bytes(i) for i in devices),
    }
    if len(plan.mesh) == 1 or all(d.platform == "cpu" for d in plan.mesh.devices):
        seconds = (weights + cache) / (limits.read_gb_s * 1e9)
        if limits.link_gb_s is not None:
            most = max(plan.step_bytes(i, middle, slots) for i in devices)
            seconds = max(seconds, most / (limits.link_gb_s * 1e9))
        prompt = limits.matmul_gflop_s * 1e9 / _operations(cost)
        found["limit"] = _join(test, prompt, slots / seconds)
    if not test.prompt:
        found |= {"weight_bytes": weights, "cache_bytes": cache / slots}
    return found


def _read(cost: CostModel, slots: int, position: int) -> float:
    """Bytes that a decode step of all sequences reads, on all devices."""
    return sum(float(size.sum()) for size, _ in cost.work(slots, slots, position))


def _operations(cost: CostModel) -> float:
    """Of a prompt's token, attention and head (which is asked for one token alone) not counted."""
    attn, mlp, _ = cost.work(1, 1, 0)
    return float(attn[1].sum() + mlp[1].sum())


def _join(test: Test, prompt: float, decode: float) -> float:
    """The rate of a test from those of a prompt and of decoding."""
    if not test.predict or not test.prompt:
        return prompt if test.prompt else decode
    return (test.prompt + test.predict) / (test.prompt / prompt + test.predict / decode)
