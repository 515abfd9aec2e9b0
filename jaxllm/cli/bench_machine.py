"""What a machine could do at most: the limits that measured rates are held against."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sharding import Plan, position_bytes

if TYPE_CHECKING:
    from jaxllm.llm import LLM


@dataclass(frozen=True)
class Machine:
    """Rates of the first device: 1e9 bytes a second that it reads from its memory, 1e9 operations
    a second of products in the model's type, and 1e9 bytes a second of its host link, where
    pages cross it."""

    read_gb_s: float
    matmul_gflop_s: float
    link_gb_s: float | None


def measure_machine(llm: LLM) -> Machine:
    """Measure, each the best of five, as these are limits.

    Reading is the better of a sum and a matrix-vector product over an array no cache holds; which
    of them XLA makes fast differs by platform. An accelerator is given several calls at a time, so
    that it never waits for the host.
    """
    import jax
    import jax.numpy as jnp

    from sharding.links import Delivery, host_place, measure_link

    def best(fn: Callable[..., Any], *operands: Any) -> float:
        jitted = jax.jit(fn)
        jitted(*operands).block_until_ready()
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            jax.block_until_ready([jitted(*operands) for _ in range(calls)])
            seconds.append((time.perf_counter() - start) / calls)
        return min(seconds)

    plan = llm.plan
    devices = list(plan.mesh.jax_devices or ())
    on_cpu = devices[0].platform == "cpu"
    calls = 1 if on_cpu else 8
    with jax.default_device(devices[0]):
        rows = 1 << (13 if on_cpu else 16)
        large, vector = jnp.ones((rows, 1 << 13)), jnp.ones(1 << 13)
        read = large.nbytes / min(best(jnp.sum, large), best(jnp.matmul, large, vector))
        size = 2048 if on_cpu else 8192
        square = jnp.ones((size, size), llm.model.dtype)
        with jax.default_matmul_precision("highest"):
            flops = 2 * size**3 / best(jnp.matmul, square, square)
    link = None
    if any(plan.link_bytes(i, plan.options.ctx) for i in range(len(devices))):
        place = host_place(devices, plan.options.kv_pinned)
        link = measure_link(devices[0], Delivery(place, 64 << 20, 4))
    return Machine(read / 1e9, flops / 1e9, link)


def decode_limit(plan: Plan, machine: Machine, position: int) -> dict[str, float] | None:
    """The most tokens a second at a position: every weight and all that a query sees are read
    once, what the plan streams also crosses the link. None for several real devices, whose
    memories are read side by side."""
    devices = range(len(plan.mesh))
    if len(devices) > 1 and any(d.platform != "cpu" for d in plan.mesh.devices):
        return None
    weights = sum(plan.weight_bytes(i) for i in devices)
    if any(t.name.startswith("head") for t in plan.tensors):
        # of the input table only one row is read
        tables = [t for t in plan.tensors if t.name.startswith("table")]
        weights -= sum(math.prod(t.shape) * t.itemsize for t in tables)
    cache = sum(
        position_bytes(layer, plan.options)
        * layer.kv_heads
        * min(position, layer.window or position)
        for layer in plan.model.layers
    )
    streamed = max(plan.link_bytes(i, position) for i in devices)
    seconds = (weights + cache) / (machine.read_gb_s * 1e9)
    if machine.link_gb_s is not None:
        seconds = max(seconds, streamed / (machine.link_gb_s * 1e9))
    return {
        "weight_bytes": weights,
        "cache_bytes": cache,
        "link_bytes": streamed,
        "tokens_per_second": 1 / seconds,
    }


def prompt_limit(plan: Plan, machine: Machine) -> float:
    """The most prompt tokens a second: two operations a weight of the layers, attention and the
    head (which is asked for one token alone) not counted."""
    weights = {}
    for tensor in plan.tensors:
        if tensor.layer is not None:  # each array of a quantised matrix covers all its values
            matrix = tensor.name.rpartition(".")[0] if tensor.packs > 1 else tensor.name
            weights[matrix] = math.prod(tensor.shape) * tensor.packs
    return machine.matmul_gflop_s * 1e9 / (2 * sum(weights.values()))
