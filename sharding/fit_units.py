"""Whole units of layers that are not alike. Shares are given in the units of the layers that have
most; layers with fewer follow by largest remainder (`sharding.shares.apportion`). All that other
shares give of mixers is in `sharding.fit_joint`.

In `primary` units [..., R] of `totals[0]` in all, a device's quota of another total T is
primary * T / totals[0]. Whose remainder is rounded up depends on all devices, but in one number: a
threshold says from which remainder on, and up to which device among equal ones, devices are. Under
a known threshold each device's count follows from its own primary units, as
(primary * T + offset) // totals[0].
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = np.ndarray
Floats = NDArray[np.float64]


class Grid:
    """The `totals` of one side of a model's layers, the primary one first."""

    def __init__(self, primary: int, counts: Iterable[int], devices: int):
        others = {n for n in counts if n and n % primary} if primary else set()
        self.totals = (primary, *sorted(others, reverse=True))
        self._devices = devices

    def index(self, count: int) -> int:
        """Which total a layer's count follows; a multiple of the primary one follows that."""
        return self.totals.index(count) if count in self.totals else 0

    @property
    def last_threshold(self) -> int:
        """The largest there is; 0 is the least."""
        return (self.totals[0] - 1) * self._devices

    def counts(self, primary: Ints) -> Ints:
        """Units that devices have of each total, [U, ..., R]."""
        found = [primary]
        for total in self.totals[1:]:
            whole, rest = np.divmod(primary * total, self.totals[0])
            order = np.argsort(-rest, axis=-1, kind="stable")
            rank = np.argsort(order, axis=-1)
            found.append(whole + (rank < total - whole.sum(-1, keepdims=True)))
        return np.array(found)

    def thresholds(self, primary: Ints) -> Ints:
        """The least of each total but the first under which these are the counts, [..., U - 1]."""
        found = []
        for total in self.totals[1:]:
            whole, rest = np.divmod(primary * total, self.totals[0])
            left = total - whole.sum(-1, keepdims=True)
            order = np.argsort(-rest, axis=-1, kind="stable")
            last = np.take_along_axis(order, np.maximum(left - 1, 0), axis=-1)
            key = (self.totals[0] - 1 - np.take_along_axis(rest, last, axis=-1)) * self._devices
            found.append(np.where(left > 0, key + last + 1, 0)[..., 0])
        return np.stack(found, axis=-1) if found else np.zeros((*primary.shape[:-1], 0), int)

    def offsets(self, thresholds: Ints) -> Ints:
        """Of thresholds [N, U - 1], with those of the primary total: [U, N, R]; without others
        [1, 1, R]."""
        devices = np.arange(self._devices)
        if len(self.totals) == 1:
            return np.zeros((1, 1, self._devices), int)
        own = (thresholds.astype(int).T[..., None] + self._devices - 1 - devices) // self._devices
        return np.concatenate((np.zeros((1, *own.shape[1:]), int), own))

    def rounded(self, primary: Ints, offsets: Ints) -> Ints:
        """Units of each total under offsets that broadcast with `primary`, [U, ...]."""
        totals = np.array(self.totals).reshape(-1, *[1] * primary.ndim)
        return (primary * totals + offsets) // self.totals[0]

    def most(self, limits: Sequence[tuple[Floats, Floats]], offsets: Ints) -> Floats:
        """The most primary units that keep all limits, under offsets [U, ...]; negative where none
        do. A limit is a room and what a unit of each total takes of it, [U, ...]; all broadcast."""
        first, most = self.totals[0], np.full((), float(self.totals[0]))
        if len(self.totals) == 1:
            for room, units in limits:
                most = np.minimum(most, np.floor(room / units[0] + 1e-9))
                most = np.where(room < 0, -1.0, most)
            return most
        least = most
        quotas = np.array(self.totals).reshape(-1, *[1] * (offsets.ndim - 1)) / first
        for room, units in limits:
            each = (units * quotas).sum(0)  # a primary unit, with its quotas of the other totals
            # A count is a quota more by offset / first, rounded down.
            over = (units * offsets).sum(0) / first
            under = ((units * (offsets - first + 1))[1:]).sum(0) / first
            most = np.minimum(most, np.floor((room - under) / each + 1e-9))
            least = np.minimum(least, np.floor((room - over) / each + 1e-9))
            most, least = np.where(room < 0, -1.0, most), np.where(room < 0, -1.0, least)
        least = np.maximum(least, np.where(most < 0, most, 0.0))
        rounded = [each for each in limits if each[1][1:].any()]  # the others are kept by now
        while (least < most).any():
            middle = np.ceil((least + most) / 2)
            counts = self.rounded(middle.astype(int), offsets)
            keeps = np.logical_and.reduce(
                [(units * counts).sum(0) <= room + 1e-9 * units[0] for room, units in rounded]
            )
            least, most = np.where(keeps, middle, least), np.where(keeps, most, middle - 1)
        return most


class LayerSet(NamedTuple):
    """Layers on the same devices: those with any unit of these totals of mixers or of MLPs.
    `exchanges` are how many sums over the devices they take, `layers` how many there are, `folds`
    programs that each of the devices folds pages by in a step of each kind."""

    mixers: frozenset[int]
    mlps: frozenset[int]
    exchanges: int = 0
    layers: int = 0
    folds: tuple[int, int] = (0, 0)
