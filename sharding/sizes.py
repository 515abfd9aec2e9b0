"""Bytes of a plan: exact sums over what is stored and what is sent; see `Plan`'s methods.

Device and layer indexes are those of the plan and are not checked here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sharding.rings import full_pages, pages_read, position_bytes, ring_positions
from sharding.shapes import TensorShape
from sharding.splits import Ranges

if TYPE_CHECKING:
    from sharding.plan import Plan


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
    for shape, layer in zip(plan.model.layers, plan.layers, strict=True):
        if not shape.owns_cache:
            continue
        position = _count(plan, layer.groups, device) * position_bytes(shape, options)
        ring = ring_positions(plan.engine, options, shape.window)
        place["device"] += options.slots * ring * position
        if plan.engine == "staged":
            pages = full_pages(options, shape.window)
            place[options.kv] += options.slots * pages * options.page * position
    return place


def staging_bytes(plan: Plan, device: int) -> int:
    """Of the groups of pages in flight, at most."""
    if plan.options.kv != "host":
        return 0
    largest = max(page_bytes(plan, i, device) for i in range(len(plan.layers)))
    return max(1, plan.options.prefetch) * plan.options.group_pages * largest


def link_bytes(plan: Plan, device: int, position: int) -> int:
    """Of the pages sent to the device for one query at `position`."""
    if plan.options.kv != "host":
        return 0
    return sum(
        page_bytes(plan, i, device) * pages_read(plan.options, position, shape.window)
        for i, shape in enumerate(plan.model.layers)
    )


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
