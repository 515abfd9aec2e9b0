"""What a user is told of a plan: where rounding or memory make it other than one would expect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sharding.memory import PINNED_DEFAULT, PINNED_LIMIT
from sharding.mesh import Mesh
from sharding.options import PlanOptions
from sharding.rings import position_bytes, ring_positions
from sharding.shapes import ModelShape
from sharding.splits import LayerPlan, shares_of

if TYPE_CHECKING:
    from sharding.plan import Plan


def pinned_notes(plan: Plan) -> tuple[str, ...]:
    """Whether a full cache needs more pinned memory than the backend of a GPU gives by itself."""
    gpus = any(d.platform in ("gpu", "cuda", "rocm") for d in plan.mesh.devices)
    size = sum(plan.cache_bytes(i)["host"] for i in range(len(plan.mesh)))
    if not gpus or plan.options.kv_pinned is False or size <= PINNED_DEFAULT:
        return ()
    return (
        f"the host cache takes up to {size} bytes and pinned memory ends at {PINNED_DEFAULT >> 30}"
        f" GB unless {PINNED_LIMIT} says more; the rest of it would be in pageable memory, which"
        " reaches a device more slowly.",
    )


def ring_notes(plan: Plan) -> tuple[str, ...]:
    """Whether rounding gives sequences much more cache than their context."""
    options, ring = plan.options, ring_positions(plan.engine, plan.options)
    owners = any(shape.has_pages for shape in plan.model.layers)
    if not owners or ring < 2 * options.ctx:
        return ()
    return (
        f"a sequence takes {ring} positions of cache on the devices for a context of"
        f" {options.ctx}, a multiple of --page {options.page} and -ub {options.ubatch}:"
        " smaller ones take less.",
    )


def attention_notes(
    model: ModelShape, mesh: Mesh, options: PlanOptions, layers: Sequence[LayerPlan]
) -> tuple[str, ...]:
    """Which devices rounding leaves without attention, and what copies of KV heads take."""
    notes = []
    attn = shares_of(mesh, options)[1]
    way_out = "" if options.kv_replicate else " (--kv-replicate stores KV heads more than once)"
    with_attention = [i for i, shape in enumerate(model.layers) if shape.kv_heads]
    for device, info in enumerate(mesh.devices):
        idle = [i for i in with_attention if device not in layers[i].attn_devices]
        if attn[device] > 0 and idle:
            most = max(model.layers[i].kv_heads * layers[i].replication for i in idle)
            notes.append(
                f"device {info.label} has no attention work in {len(idle)} of"
                f" {len(with_attention)} layers: its share of at most {most} KV groups rounds to"
                f" none{way_out}."
            )
    weights = cache = 0
    for shape, layer in zip(model.layers, layers, strict=True):
        extra = shape.kv_heads * (layer.replication - 1)
        rows = shape.k_dim + (0 if shape.k_only else shape.v_dim)
        weights += extra * rows * model.embed * options.itemsize
        if shape.has_pages:
            cache += extra * position_bytes(shape, options) * options.ctx * options.slots
    if weights:
        times = max(layer.replication for layer in layers)
        notes.append(
            f"KV heads are stored up to {times} times: {weights} bytes of K and V weights and"
            f" {cache} bytes of cache are extra copies."
        )
    return tuple(notes)
