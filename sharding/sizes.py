"""Bytes of a plan: exact sums over what is stored and what is sent; see `Plan`'s methods.

Device and layer indexes are those of the plan and are not checked here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sharding.rings import (
    full_pages,
    live_pages,
    position_bytes,
    resident_pages,
    ring_positions,
)
from sharding.shapes import TensorShape
from sharding.splits import Ranges

if TYPE_CHECKING:
    from sharding.plan import Plan

LOGIT_ROWS = 64  # places of a prompt whose logits are made at once


def weight_bytes(plan: Plan, device: int) -> int:
    """Of the tensors given to the plan, what the device stores."""
    return sum(_stored(plan, tensor, device) for tensor in plan.tensors)


def page_bytes(plan: Plan, layer: int, device: int) -> int:
    """Of one page of one slot, the device's own groups of the layer."""
    start, stop = plan.layers[layer].groups[device]
    return (
        (stop - start) * plan.options.page * position_bytes(plan.model.layers[layer], plan.options)
    )


def cache_bytes(plan: Plan, device: int) -> dict[str, int]:
    """Of the device's cache when all slots are full, by place."""
    options = plan.options
    place = {"device": 0, "host": 0}
    for index, (shape, layer) in enumerate(zip(plan.model.layers, plan.layers, strict=True)):
        if not shape.owns_cache:
            continue
        position = _count(plan, layer.groups, device) * position_bytes(shape, options)
        ring = ring_positions(plan.engine, options, shape.window)
        place["device"] += options.slots * ring * position
        if plan.engine == "staged":
            kept = plan.residency.pages[index][device]
            page = options.slots * options.page * position
            place["device"] += kept * page
            place["host"] += (full_pages(options, shape.window) - kept) * page
    return place


def staging_bytes(plan: Plan, device: int) -> int:
    """Of the groups of pages in flight, at most."""
    if plan.options.kv != "host":
        return 0
    streamed = [
        page_bytes(plan, i, device)
        for i, shape in enumerate(plan.model.layers)
        if _kept(plan, i, device) < full_pages(plan.options, shape.window)
    ]
    largest = max(streamed, default=0)
    return max(1, plan.options.prefetch) * plan.options.group_pages * largest


def link_bytes(plan: Plan, device: int, position: int) -> int:
    """Of the pages sent to the device for one query at `position`."""
    if plan.options.kv != "host":
        return 0
    sent = 0
    for i, shape in enumerate(plan.model.layers):
        live = live_pages(plan.options, position, shape.window)
        full = full_pages(plan.options, shape.window)
        streamed = len(live) - resident_pages(live, _kept(plan, i, device), full)
        sent += streamed * page_bytes(plan, i, device)
    return sent


def compute_bytes(plan: Plan, device: int) -> int:
    """Of what a step makes while it runs, at most: by the arrays that live together in its widest
    part, the attention or the MLP of one layer or the logits."""
    if device not in plan.used_devices:
        return 0
    options = plan.options
    tokens = max(options.ubatch, options.slots)
    # Blocks in which a chunk folds its context (`jaxllm.cache.attention.ring_step`).
    block = options.page if plan.engine == "staged" else max(128, min(tokens, 512))
    # The residual, its norm, and the partials of up to three devices.
    partials = min(3, len(plan.used_devices))
    residual = (2 + partials) * tokens * plan.model.embed * options.itemsize
    start, stop = plan.vocab[device]
    largest = max(options.slots, LOGIT_ROWS) * (stop - start) * 4
    for shape, layer in zip(plan.model.layers, plan.layers, strict=True):
        groups, columns = _count(plan, layer.groups, device), _count(plan, layer.mlp, device)
        heads = groups * (shape.q_per_kv // layer.replication)
        # Queries in three layouts, keys and values; three float32 carries; float32 scores of a
        # block, before and after the exponential.
        narrow = 3 * heads * shape.k_dim + groups * (shape.k_dim + shape.v_dim)
        wide = heads * (3 * (shape.v_dim + 2) + 2 * block)
        attention = tokens * (narrow * options.itemsize + wide * 4)
        largest = max(largest, attention, 3 * tokens * columns * options.itemsize)
    return residual + largest


def _kept(plan: Plan, layer: int, device: int) -> int:
    """Pages a slot that stay of the cache that a layer reads."""
    return plan.residency.pages[plan.model.cache_owner(layer)][device]


def _count(plan: Plan, ranges: Ranges, device: int) -> int:
    """Units that a device stores, padding of the fused engine included."""
    counts = [stop - start for start, stop in ranges]
    return max(counts) if plan.padded else counts[device]


def _stored(plan: Plan, tensor: TensorShape, device: int) -> int:
    if not plan.padded and not plan.holds(tensor, device):
        return 0
    split = tensor.split_axis
    size = tensor.itemsize
    for name, n in zip(tensor.axes, tensor.shape, strict=True):
        ranges = plan.ranges(name, tensor.layer) if split and name == split.name else None
        size *= n if ranges is None else _count(plan, ranges, device)
    return size
