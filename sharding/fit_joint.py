"""Which roundings of unlike totals one vector of shares gives together, and such shares.

Largest remainder (`sharding.shares.apportion`) gives the counts n of a total T under shares p where
all of n - T p are within one unit of each other: for some b, each share is above (n - b - 1) / T
and below (n - b) / T. (Ties are nothing more: shares a little larger for the lower of two devices
round all totals as they do.) So a device with n units of T and m of a larger total S needs that
b / T is above that of S by more than n / T - m / S - 1 / T and by less than n / T - m / S + 1 / S.
If all devices can have the same such distances between totals, there are shares: what all of them
have too much or too little moves every b / T by as much. A device without units has a share of 0.

The bounds that devices have for a distance are multiples of one number, so it is in one of few
cells between them. In the first and the last cell that there may be, no device can have less, or
more, of a part of T than of S, so that all have the same part of both. Then the bounds of their
shares for T can be around those for S, with a distance in a cell between.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, combinations, count
from math import lcm

import numpy as np

from sharding.fit_units import Grid, Ints
from sharding.shares import apportion


class Groups(Grid):
    """The totals of mixers: of KV groups, and of groups of recurrent states.

    Attributes:
        pairs: of totals, P in all.
        first, last: cells that their distances may be in, [P].
        leading: totals such that a device with any unit has one of these.
    """

    def __init__(self, heads: Iterable[int], states: Iterable[int], devices: int):
        counts = {*heads, *states}
        super().__init__(max(counts), counts, devices)
        self.pairs = list(combinations(range(len(self.totals)), 2))
        self._pairs = np.array(self.pairs, int).reshape(-1, 2).T
        whole = lcm(*self.totals)
        self._sizes = np.array([whole // max(1, n) for n in self.totals], int)  # of a unit
        self._cells = np.gcd(*self._sizes[self._pairs])
        ends = self.cells(np.zeros((len(self.totals), 1), int))
        self.first, self.last = ends[0][:, 0] + 1, ends[1][:, 0] - 1
        multiple = all(self.totals[0] % n == 0 for n in self.totals[1:])
        self.leading = frozenset({0} if multiple else range(len(self.totals)))

    def cells(self, units: Ints) -> tuple[Ints, Ints]:
        """The first and the last cell that a device with such units of every total, [U, ...], can
        have: [P, ...] each."""
        s, t = self._pairs
        cells, sizes = (
            each.reshape(-1, *[1] * (units.ndim - 1)) for each in (self._cells, self._sizes)
        )
        own = units * sizes
        more = own[t] - own[s]
        return (more - sizes[t]) // cells, (more + sizes[s]) // cells - 1

    def tightened(self, first: Ints, last: Ints) -> tuple[Ints, Ints]:
        """Of bounds of cells [P, N] what their sums leave of each; the last is less than the first
        where there is no distance."""
        count = len(self.totals)
        if count < 3:
            return first, last
        most = np.zeros((count, count, first.shape[1]))  # that the second is after the first
        for (s, t), cell, low, high in zip(self.pairs, self._cells, first, last, strict=True):
            most[s, t], most[t, s] = (high + 1) * cell, -low * cell
        for m in range(count):
            most = np.minimum(most, most[:, m, None] + most[None, m])
        s, t = self._pairs
        low, high, cells = -most[t, s], most[s, t], self._cells[:, None]
        first, last = np.floor(low / cells), np.ceil(high / cells) - 1
        return first, np.where(low < high, last, first - 1)

    def cells_of(self, units: Ints) -> tuple[Ints, Ints]:
        """The first and the last cell of cuts [U, N, R], [P, N] each; the last is less than the
        first of some pair where no shares give such units."""
        first, last = self.cells(units)
        return self.tightened(first.max(2), last.min(2))


def shares_of(units: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Whole numbers by which every total is apportioned as told, [U, R]: the units of the smallest
    total that does, else some with a small sum; any where there are no units. There must be shares
    that do."""

    def right(shares: Sequence[int]) -> bool:
        return all(apportion(sum(own), shares) == tuple(own) for own in units)

    rows = sorted((own for own in units if any(own)), key=sum)
    if not rows:
        return (1,) * len(units[0])
    middle = _middle(np.array(units))
    tries = chain(rows, (apportion(n, middle) for n in count(1)))
    return tuple(next(shares for shares in tries if right(shares)))


def _middle(units: Ints) -> list[float]:
    """Shares that are within the bounds of all totals, [U, R]."""
    used = np.flatnonzero(units.any(0))
    own, totals = units[:, used], units.sum(1)
    whole = lcm(*map(int, totals))
    sizes = whole // totals[:, None, None]
    # How much larger than the first device's share the second's can be.
    most = (sizes * (1 + own[:, None, :] - own[:, :, None])).min(0)
    np.fill_diagonal(most, 0)
    for m in range(len(used)):
        most = np.minimum(most, most[:, m, None] + most[None, m])
    # The largest shares beside each device's are at the edge of what can be, all of them together
    # are not.
    shares = np.zeros(units.shape[1])
    shares[used] = (most.mean(0) - most.mean()) / whole + 1 / len(used)
    return shares.tolist()
