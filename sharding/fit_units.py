"""Whole units of layers that are not alike. Shares are given in the units of the layers that have
most; layers with fewer follow by largest remainder (`sharding.shares.apportion`). All that other
shares give of mixers is in `sharding.fit_joint`.

In `primary` units [..., R] of `totals[0]` in all, a device's quota of another total T is
primary * T / totals[0] = primary * part / whole, in lowest terms. Whose remainder is rounded up
depends on all devices, but in one number: a threshold says from which remainder on, and up to which
device among equal ones, devices are. Under a known threshold each device's count follows from its
own primary units, as (primary * part + offset) // whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import gcd
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = np.ndarray
Floats = NDArray[np.float64]


Limited = tuple[Floats, Floats]  # rooms and units, as of `Grid.most`


class Grid:
    """The `totals` of one side of a model's layers, the primary one first. A primary unit is
    `parts` / `wholes` of one of each total; `others` are all three of each but the first."""

    def __init__(self, primary: int, counts: Iterable[int], devices: int):
        others = {n for n in counts if n and n % primary} if primary else set()
        self.totals = (primary, *sorted(others, reverse=True))
        common = [gcd(n, primary) or 1 for n in self.totals]
        self.parts = [n // each for n, each in zip(self.totals, common, strict=True)]
        self.wholes = [primary // each or 1 for each in common]
        self.others = list(zip(self.totals, self.parts, self.wholes, strict=True))[1:]
        self._devices = devices

    def index(self, count: int) -> int:
        """Which total a layer's count follows; a multiple of the primary one follows that."""
        return self.totals.index(count) if count in self.totals else 0

    @property
    def last_thresholds(self) -> Ints:
        """The largest of each total but the first, [U - 1]; 0 is the least."""
        return (np.array(self.wholes[1:], int) - 1) * self._devices

    def counts(self, primary: Ints) -> Ints:
        """Units that devices have of each total, [U, ..., R]."""
        found = [primary]
        for total, part, each in self.others:
            whole, rest = np.divmod(primary * part, each)
            order = np.argsort(-rest, axis=-1, kind="stable")
            rank = np.argsort(order, axis=-1)
            found.append(whole + (rank < total - whole.sum(-1, keepdims=True)))
        return np.array(found)

    def thresholds(self, primary: Ints) -> Ints:
        """The least of each total but the first under which these are the counts, [..., U - 1]."""
        found = []
        for total, part, each in self.others:
            whole, rest = np.divmod(primary * part, each)
            left = total - whole.sum(-1, keepdims=True)
            order = np.argsort(-rest, axis=-1, kind="stable")
            last = np.take_along_axis(order, np.clip(left - 1, 0, self._devices - 1), axis=-1)
            key = (each - 1 - np.take_along_axis(rest, last, axis=-1)) * self._devices
            found.append(np.where(left > 0, key + last + 1, 0)[..., 0])
        return np.stack(found, axis=-1) if found else np.zeros((*primary.shape[:-1], 0), int)

    def offsets(self, thresholds: Ints) -> Ints:
        """Of thresholds [N, U - 1], with those of the primary total: [U, N, R]."""
        devices = np.arange(self._devices)
        if len(self.totals) == 1:
            return np.zeros((1, len(thresholds), self._devices), int)
        own = (thresholds.astype(int).T[..., None] + self._devices - 1 - devices) // self._devices
        return np.concatenate((np.zeros((1, *own.shape[1:]), int), own))

    def rounded(self, primary: Ints, offsets: Ints) -> Ints:
        """Units of each total under offsets that broadcast with `primary`, [U, ...]."""
        parts, wholes = self.ratios(primary.ndim)
        return (primary * parts + offsets) // wholes

    def ratios(self, ndim: int) -> tuple[Ints, Ints]:
        """Parts and wholes, [U, ...] with so many more dimensions."""
        shape = -1, *[1] * ndim
        return np.array(self.parts).reshape(shape), np.array(self.wholes).reshape(shape)

    def most(
        self, rooms: Floats, units: Floats, least: Ints, largest: Ints, within: Floats
    ) -> Floats:
        """The most units of every total that keep L limits, [U, ...], under any offsets between
        two, [U, ...]; negative where none do. A limit is one of the `rooms` [L, ...] and what a
        unit of each total takes of it, `units` [L, U, ...]. No more primary units count than are
        `within`, [...]. All broadcast."""
        out = (rooms < 0).any(0)
        if len(self.totals) == 1:
            most = np.minimum(np.floor(rooms / units[:, 0] + 1e-9).min(0), within)
            return np.where(out, -1.0, most)[None]
        parts, wholes = self.ratios(least.ndim - 1)
        each = (units * parts / wholes).sum(1)  # a primary unit, with its quotas of the others
        # A count is a quota more by offset / whole, rounded down.
        over = (units * least / wholes).sum(1)
        under = (units * (least - wholes + 1) / wholes)[:, 1:].sum(1)
        high, low = (
            np.minimum(np.floor((rooms - own) / each + 1e-9).min(0), within)
            for own in (under, over)
        )
        high = np.where(out, -1.0, high)
        low = np.minimum(np.maximum(low, 0.0), high)
        several = units[:, 1:].any(tuple(range(1, units.ndim)))  # the others are kept by now
        limits = rooms[several], units[several]
        return self._with_others(limits, self._between(limits, least, low, high), least, largest)

    def _between(self, limits: Limited, least: Ints, low: Floats, high: Floats) -> Floats:
        """The most primary units between two that keep the limits; `low` do."""
        open_ = low < high
        found, some, many = high.copy(), low[open_], high[open_]
        keeps, offsets = _kept_in(limits, open_), _of_places(least, open_)
        while (some < many).any():
            middle = np.ceil((some + many) / 2)
            kept = keeps(self.rounded(middle.astype(int), offsets))
            some, many = np.where(kept, middle, some), np.where(kept, many, middle - 1)
        found[open_] = some
        return found

    def _with_others(self, limits: Limited, most: Floats, least: Ints, largest: Ints) -> Floats:
        """With the most units of the other totals. Beside the most primary units a device may have
        one more under larger offsets, if that keeps the limits with as many primary units as it
        takes."""
        primary = np.maximum(most, 0).astype(int)
        counts, more = (self.rounded(primary, each) for each in (least, largest))
        for i, (_, part, whole) in enumerate(self.others, 1):
            open_ = (more[i] > counts[i]) & (most >= 0)
            own, few, many = more[i][open_], _of_places(least, open_), _of_places(largest, open_)
            tried = self.rounded(np.maximum(-(-(own * whole - many[i]) // part), 0), few)
            tried[i] = own
            counts[i][open_] = np.where(_kept_in(limits, open_)(tried), own, counts[i][open_])
        return np.where(most < 0, -1.0, counts)


def _kept_in(limits: Limited, some: np.ndarray) -> Callable[[Ints], np.ndarray]:
    """Whether counts [U, K] keep limits in the places where `some` says so, [K]."""
    rooms, units = (_of_places(each, some) for each in limits)
    rooms = rooms + 1e-9 * units[:, 0]
    return lambda counts: ((units * counts).sum(1) <= rooms).all(0)


def _of_places(values: np.ndarray, some: np.ndarray) -> np.ndarray:
    """Of values [..., *shape] those in the places where `some` [*shape] says so, [..., K]."""
    lead = values.shape[: values.ndim - some.ndim]
    return np.broadcast_to(values, (*lead, *some.shape))[..., some]


class LayerSet(NamedTuple):
    """Layers on the same devices: those with any unit of these totals of mixers or of MLPs.
    `exchanges` are how many sums over the devices they take, `layers` how many there are, `folds`
    programs that each of the devices folds pages by in a step of each kind."""

    mixers: frozenset[int]
    mlps: frozenset[int]
    exchanges: int = 0
    layers: int = 0
    folds: tuple[int, int] = (0, 0)
