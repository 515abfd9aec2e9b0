"""Residency: which full pages of a host cache stay on the device.

A budget is spent once, when a plan is made. Its unit is a slice: one layer's KV groups on one
device. A layer budget of N buys N layers' worth of cache, a slice costing the part of its layer's
groups that it has; a byte budget is each device's own.

    order of devices    slowest host link first, links within 15 % of each other taking turns
    end of a device     its slices, or its room; the next device gets the rest
    choice of layers    those with the largest caches first, spread evenly over layers alike, so
                        that the link works for streamed layers while resident ones compute

Only layers with a cache of their own count: recurrent layers and layers that read another's take
none of a budget. Each context, the main model's and a draft's, has a budget of its own; the draft's
is spent first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import groupby
from typing import TYPE_CHECKING

from sharding.errors import PlanError
from sharding.mesh import DeviceInfo, Mesh, host_rates
from sharding.options import KV_DEVICE_BYTES, Budget
from sharding.residency_notes import budget_notes, pay_note
from sharding.rings import full_pages, position_bytes
from sharding.shapes import Context
from sharding.sizes import context_staging

if TYPE_CHECKING:
    from sharding.plan import Plan

ALIKE = 0.15
LEAST_RESERVE = 64 << 20
RESERVE_PERCENT = 5


@dataclass(frozen=True)
class Kept:
    """What one device was asked to keep and what it keeps, of the layers that a budget counts.

    Layers are sums of the device's parts of layers; bytes are those of all slots.
    """

    requested_layers: float = 0.0
    requested_bytes: int = 0
    layers: float = 0.0
    bytes: int = 0


@dataclass(frozen=True)
class Residency:
    """What stays: `pages[layer][device]` of the full pages a slot, and one `Kept` a device of the
    main context, and of a draft's.

    A layer that reads another's cache has no pages of its own.
    """

    pages: tuple[tuple[int, ...], ...]
    devices: tuple[Kept, ...]
    drafts: tuple[Kept, ...] = ()

    def of_layers(self, layers: Sequence[int]) -> Residency:
        """The pages of some layers alone."""
        return replace(self, pages=tuple(self.pages[i] for i in layers) if self.pages else ())


@dataclass(frozen=True)
class _Slice:
    """One layer on one device: `cost` in units of the budget, `pages` a slot, `page_bytes` of all
    slots, `layer_bytes` of the whole layer's full pages in one slot, `heads` of the whole layer."""

    layer: int
    cost: int
    pages: int
    page_bytes: int
    layer_bytes: int
    heads: int

    @property
    def alike(self) -> tuple[int, int, int]:
        """What layers alike have in common; in the order in which they are chosen."""
        return -self.layer_bytes, self.pages, self.heads

    @property
    def bytes(self) -> int:
        return self.pages * self.page_bytes


@dataclass(frozen=True)
class _Room:
    """Bytes for pages while a device streams any, and when it streams none and needs no staging;
    None where unknown."""

    streaming: int | None = None
    all_resident: int | None = None

    def less(self, reserve: int) -> _Room:
        return _Room(*(None if n is None else n - reserve for n in self._both))

    def at_most(self, limit: int) -> _Room:
        return _Room(*(limit if n is None else min(n, limit) for n in self._both))

    @property
    def _both(self) -> tuple[int | None, int | None]:
        return self.streaming, self.all_resident


Pages = Mapping[_Slice, int]


def _cost(kept: Pages) -> int | Fraction:
    return sum(s.cost if n == s.pages else Fraction(s.cost * n, s.pages) for s, n in kept.items())


def _bytes(kept: Pages) -> int:
    return sum(n * s.page_bytes for s, n in kept.items())


def _all(slices: Sequence[_Slice]) -> dict[_Slice, int]:
    return {s: s.pages for s in slices}


def _spread(slices: Sequence[_Slice], count: int) -> list[_Slice]:
    """`count` of a device's slices."""
    found: list[_Slice] = []
    # A layer with a window costs as much of a layer budget as one without, and saves little.
    by_size = sorted(slices, key=lambda s: s.alike)
    for _, alike in groupby(by_size, key=lambda s: s.alike):
        kind = list(alike)
        n = min(count - len(found), len(kind))
        found += [kind[(2 * i + 1) * len(kind) // (2 * n)] for i in range(n)]
    return found


@dataclass
class _Device:
    """One device while a budget is spent; `kept` grows by whole slices until the room ends."""

    slices: Sequence[_Slice]
    room: _Room
    group_pages: int
    kept: dict[_Slice, int] = field(default_factory=dict)

    def take(self, budget: int | Fraction | None) -> bool:
        """Keep one slice more, or what the room allows of it in whole groups of pages; whether
        there may be a next one. `budget` is for this device, what it keeps included."""
        count = len(self.kept) + 1
        if count > len(self.slices):
            return False
        more = _all(_spread(self.slices, count))
        if budget is not None and _cost(more) > budget:
            return False
        if self._fits(more):
            self.kept = more
            return True
        part = next(s for s in more if s not in self.kept)
        left = (self.room.streaming or 0) - _bytes(self.kept)
        groups = max(0, left) // (self.group_pages * part.page_bytes)
        if groups:
            self.kept[part] = min(groups * self.group_pages, part.pages)
        return False

    def take_all(self, budget: int | Fraction | None) -> None:
        """Keep everything where that fits, for it takes no staging."""
        everything = _all(self.slices)
        if (budget is None or _cost(everything) <= budget) and self._fits(everything):
            self.kept = everything

    def _fits(self, kept: Pages) -> bool:
        all_resident = len(kept) == len(self.slices)
        room = self.room.all_resident if all_resident else self.room.streaming
        return room is None or _bytes(kept) <= room


def _spend(
    slices: Sequence[Sequence[_Slice]],
    classes: Sequence[Sequence[int]],
    budget: int | None,
    rooms: Sequence[_Room],
    group_pages: int,
) -> list[dict[_Slice, int]]:
    """Pages kept a device of each slice; a budget of None ends with the rooms."""
    devices = [_Device(s, r, group_pages) for s, r in zip(slices, rooms, strict=True)]

    def left_for(index: int) -> int | Fraction | None:
        if budget is None:
            return None
        return budget - sum(_cost(d.kept) for i, d in enumerate(devices) if i != index)

    for members in classes:
        turns = list(members)
        while turns:
            turns = [i for i in turns if devices[i].take(left_for(i))]
        for i in members:
            devices[i].take_all(left_for(i))
    return [d.kept for d in devices]


def link_classes(mesh: Mesh, devices: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Devices by host link rate, slowest first; those within 15 % of the slowest of a class are
    in it. Where any rate is unknown all are alike."""
    rates = dict(zip(devices, host_rates([mesh.devices[i] for i in devices]), strict=True))
    classes: list[list[int]] = []
    for i in sorted(devices, key=lambda i: (rates[i], i)):
        if classes and rates[i] <= rates[classes[-1][0]] * (1 + ALIKE):
            classes[-1].append(i)
        else:
            classes.append([i])
    return tuple(map(tuple, classes))


def _slices(plan: Plan, context: Context) -> tuple[list[list[_Slice]], int]:
    """The slices that the budget of a context counts, a device, and the cost of a whole layer."""
    counted = []
    for index, (shape, layer) in enumerate(zip(plan.model.layers, plan.layers, strict=True)):
        pages = full_pages(plan.options, shape.window)
        units = sum(stop - start for start, stop in layer.groups)
        if shape.has_pages and shape.cache_context == context and units and pages:
            counted.append((index, pages, units))
    scale = math.lcm(*(units for _, _, units in counted))
    found: list[list[_Slice]] = [[] for _ in plan.mesh.devices]
    for index, pages, units in counted:
        position = position_bytes(plan.model.layers[index], plan.options)
        layer_bytes = units * pages * plan.options.page * position
        for device in plan.layers[index].attn_devices:
            start, stop = plan.layers[index].groups[device]
            page_bytes = plan.options.slots * plan.page_bytes(index, device)
            cost = (stop - start) * scale // units
            found[device].append(_Slice(index, cost, pages, page_bytes, layer_bytes, units))
    return found, scale


def _room(plan: Plan, device: int, context: Context) -> _Room:
    """Of a device that streams everything of a context in `plan`."""
    free = plan.mesh.devices[device].free
    if free is None:
        return _Room()
    left = free - plan.needed_bytes(device)
    return _Room(left, left + context_staging(plan, device, context))


def reserve(info: DeviceInfo) -> int:
    """Bytes that an automatic budget leaves free on a device."""
    memory = info.memory or info.free or 0
    return max(LEAST_RESERVE, memory * RESERVE_PERCENT // 100)


def _auto_room(info: DeviceInfo, room: _Room) -> _Room:
    """What --kv-device-bytes auto stands for."""
    if info.free is None:
        raise PlanError(
            f"{KV_DEVICE_BYTES} auto needs the free memory of device {info.label}, which does not"
            " tell it; give a number of bytes."
        )
    return room.less(reserve(info))


def streaming_all(plan: Plan) -> Residency:
    """The residency of a plan with no budget: with a host cache nothing stays."""
    pages = []
    for shape, layer in zip(plan.model.layers, plan.layers, strict=True):
        stays = plan.options.kv == "device" and shape.has_pages
        n = full_pages(plan.options, shape.window) if stays else 0
        pages.append(tuple(n if stop > start else 0 for start, stop in layer.groups))
    nothing = (Kept(),) * len(plan.mesh)
    return Residency(tuple(pages), nothing, nothing)


def spend_budget(plan: Plan) -> tuple[Residency, tuple[str, ...]]:
    """Decide what stays on the devices of `plan`, which keeps nothing yet; also notes.

    Raises:
        PlanError: for an automatic budget on a device whose free memory is unknown.
    """
    spent, notes = plan, ()
    for budget in plan.options.budgets:
        if budget.layers is not None or budget.bytes is not None:
            residency, more = _spend_one(spent, budget)
            spent, notes = replace(spent, residency=residency), notes + more
    return spent.residency, notes + pay_note(plan, spent.residency)


def _spend_one(plan: Plan, asked_for: Budget) -> tuple[Residency, tuple[str, ...]]:
    """The budget of one context, of which `plan` keeps nothing yet."""
    infos, asked, context = plan.mesh.devices, asked_for.bytes, asked_for.context
    slices, scale = _slices(plan, context)
    owning = [i for i, own in enumerate(slices) if own]
    classes = link_classes(plan.mesh, owning)
    rooms = [_room(plan, i, context) for i in range(len(infos))]
    budget = None
    if asked_for.layers is not None:
        budget = asked_for.layers * scale
        wanted_rooms = [_Room()] * len(infos)
    elif isinstance(asked, int):
        wanted_rooms = [_Room().at_most(asked)] * len(infos)
        rooms = [r.at_most(asked) for r in rooms]
    else:
        for i in owning:
            rooms[i] = _auto_room(infos[i], rooms[i])
        wanted_rooms = rooms
    group_pages = plan.options.group_pages
    wanted = _spend(slices, classes, budget, wanted_rooms, group_pages)
    kept = _spend(slices, classes, budget, rooms, group_pages)

    pages = [list(row) for row in plan.residency.pages]
    devices = []
    for i, (want, have) in enumerate(zip(wanted, kept, strict=True)):
        requested = _bytes(want)
        if isinstance(asked, int):
            requested = asked if slices[i] else 0
        elif asked == "auto" and slices[i]:
            requested = max(requested, rooms[i].streaming or 0)
        layers = float(_cost(want)) / scale, float(_cost(have)) / scale
        devices.append(Kept(layers[0], requested, layers[1], _bytes(have)))
        for own, n in have.items():
            pages[own.layer][i] = n
    both = {"main": plan.residency.devices, "draft": plan.residency.drafts}
    both[context] = tuple(devices)
    everything = [_bytes(_all(own)) for own in slices]
    layers = len({s.layer for d in slices for s in d})
    notes = budget_notes(plan, asked_for, devices, everything, layers)
    return Residency(tuple(map(tuple, pages)), both["main"], both["draft"]), notes
