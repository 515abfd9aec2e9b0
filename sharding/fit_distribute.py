"""Giving out groups to devices: a dynamic program over devices and the sums of what they have.

Each device takes one of O options, or no part. Every option is worth so many blocks, to each device
its own, or minus infinity where the device cannot take it. In layers of a set only so many devices
may take part. Many such questions, one a box, are answered together.

Sums of devices in each set beside those of groups would be many. So what is out of a set is paid
for at first. Whatever the price, no distribution that keeps the bounds is worth more than the most
that any is paid, less the price of those that must be out. Prices that rise where too few are out
(a subgradient method, whose steps do not lead back) soon prove by this that there is none, or find
one. Where they do neither, one set after the other is counted in sums, which leaves nothing open.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sharding.fit_joint import Groups
from sharding.fit_options import Options
from sharding.fit_tables import Floats
from sharding.fit_terms import Effort

TRIES = 4  # prices, before one more set is counted
TINY = 1e-6  # of whole numbers of blocks


class Distribution:
    """Groups of all totals of `mixers` for `n` devices, by `options`."""

    def __init__(self, options: Options, mixers: Groups, n: int, effort: Effort):
        self._options, self._n, self._effort = options, n, effort
        self._groups = options.groups[mixers.free]
        self._totals = [mixers.totals[u] for u in mixers.free]

    def best(
        self, worth: Floats, devices: np.ndarray, least: Floats
    ) -> tuple[np.ndarray, np.ndarray]:
        """In which boxes options by which at most so many `devices` [N, sets] take part in sets
        are worth `least` [N] at least, [N], and which these are, -1 for no part, [boxes in which
        they are, R]; `worth` is [N, R, O]."""
        out, need = ~self._options.takes, self._n - devices
        bound = np.flatnonzero((need > 0).any(0) & out.any(1))
        bound = bound[need[:, bound].max(0, initial=0).argsort()]
        out, need = out[bound], need[:, bound]  # of devices that take part, those out of a set
        prices, slopes, todo = np.zeros(need.shape), np.zeros(need.shape), np.arange(len(worth))
        found, chosen = np.zeros(len(worth), bool), np.full(worth.shape[:2], -1)
        count, tries = 0, TRIES
        while len(todo) and count <= len(bound):
            counted = np.flatnonzero(need[todo].any(0))[:count]
            prices[:, counted] = 0.0
            paid = worth[todo] + (prices[todo] @ out)[:, None]
            goal = least[todo] + (prices * need)[todo].sum(1)
            few = need[np.ix_(todo, counted)]
            sums = self._over(bound[counted], few)
            self._effort.left -= paid.size * sums.count
            may, options = sums.best(paid, few, goal - TINY)
            todo, paid, goal = todo[may], paid[may], goal[may]
            more = (out[:, options] & (options >= 0)).sum(2).T - need[todo]
            keeps = (more >= 0).all(1) & (of(worth[todo], options).sum(1) >= least[todo] - TINY)
            found[todo[keeps]], chosen[todo[keeps]] = True, options[keeps]
            slope = np.where((more < 0) | (prices[todo] > 0), more, 0)
            slopes[todo] = slope = _ahead(slope, slopes[todo])
            over = of(paid, options).sum(1) - goal + 1
            rise = 2 * over / np.maximum((slope**2).sum(1), TINY)
            prices[todo] = np.maximum(prices[todo] - rise[:, None] * slope, 0.0)
            todo, tries = todo[~keeps], tries - 1
            if not tries or not slope[~keeps].any():  # all of them would lead back
                count, tries = count + 1, TRIES
        return found, chosen[found]

    def _over(self, counted: np.ndarray, need: np.ndarray) -> Sums:
        """Sums of groups, and of devices out of the sets that are `counted`."""
        most = (*map(int, need.max(0)), *self._totals)
        adds = np.concatenate((~self._options.takes[counted], self._groups)).T.astype(int)
        key = self._n, most, len(counted), adds.tobytes()
        if key not in self._effort.sums:
            self._effort.sums[key] = Sums(adds, self._n, most, len(counted))
        return self._effort.sums[key]


class Ways(NamedTuple):
    """All ways in which one more device leads to some `sums`: the sum `before`, and the option, the
    first of which is to take no part. Of each sum they begin at one of the `starts`."""

    sums: slice
    starts: np.ndarray
    before: np.ndarray
    options: np.ndarray


class Sums:
    """All sums up to `most` [D] that options of some of `n` devices, in any order, can lead to and
    on from; `adds` [O, D] is what an option adds. Of the first, `at_least`, more is as good as
    most. `count` tells how many sums there are."""

    def __init__(self, adds: np.ndarray, n: int, most: Sequence[int], at_least: int):
        self._n, self._most, self._at_least = n, most, at_least
        self._sizes = n + 1, *(each + 1 for each in most)  # by devices used first
        sums = np.indices(self._sizes[1:], np.int32).reshape(len(most), -1)
        size, whole = sums.shape[1], (n + 1) * sums.shape[1]
        before = np.zeros((len(adds), size), int)  # with a device less; `size`: none
        able = np.ones_like(before, bool)
        for i, (own, each) in enumerate(zip(sums, adds.T.astype(np.int32), strict=True)):
            left = own - each[:, None]
            if i < at_least:
                np.maximum(left, 0, out=left)
            else:
                able &= left >= 0
            before *= self._sizes[1 + i]
            before += left
        before[~able] = size
        led = np.zeros((n + 1, size + 1), bool)
        led[0, 0] = True
        for used in range(1, n + 1):
            led[used, :size] = led[used - 1][before].any(0)
        led = led[:, :size].reshape(n + 1, -1, math.prod(self._sizes[1 + at_least :]))
        # Devices lead on to `most` from any sum that, taken from it, as many of them lead to.
        leads = np.flip(np.any(led, axis=1, keepdims=True), (0, 2))
        kept = np.flatnonzero(led & leads)
        self.count = len(kept)
        self._index = np.full(whole + 1, self.count)  # `count`: none
        self._index[kept] = np.arange(self.count)
        used, rest = np.divmod(kept, size)
        one_less = (used - 1) * size + before[:, rest]
        led_by = (used > 0) & (before[:, rest] < size)
        before = self._index[np.where(led_by, one_less, whole)]
        self._before = np.concatenate((np.arange(self.count)[None], before))  # first: no part
        self._starts = np.searchsorted(used, np.arange(n + 2))
        self._parts: dict[tuple[int, int], Ways] = {}

    def best(self, worth: Floats, need: np.ndarray, least: Floats) -> tuple[np.ndarray, np.ndarray]:
        """In which boxes all sums that are not `at_least` some, `need` [N, at_least], can be
        `most` and are worth `least` [N] at least, [N], and the options that are worth most, -1
        for no part, [boxes in which they are, R]; `worth` is [N, R, O]."""
        count, devices, n = *worth.shape[:2], self._n
        worth = np.concatenate((np.zeros((count, devices, 1)), worth), axis=2)
        steps = np.full((devices + 1, count, self.count + 1), -np.inf)
        steps[:, :, self._index[0]] = 0.0
        for d in range(devices):
            # Used before: not more than there are, and so many that n can be reached.
            ways = self._ways(max(0, n - devices + d), min(d, n - 1) + 1)
            led = steps[d].take(ways.before, axis=1)
            led += worth[:, d].take(ways.options, axis=1)
            np.maximum.reduceat(led, ways.starts, axis=1, out=steps[d + 1][:, ways.sums])
        ends = np.full((count, len(self._sizes)), (n, *self._most))
        ends[:, 1 : 1 + self._at_least] = need
        at = self._index[np.ravel_multi_index(tuple(ends.T), self._sizes)]
        found = steps[devices, np.arange(count), at] >= least
        rows = np.flatnonzero(found)
        at, chosen = at[rows], np.empty((len(rows), devices), int)
        for d in reversed(range(devices)):
            led = steps[d][rows[:, None], self._before[:, at].T] + worth[rows, d]
            option = led.argmax(1)
            chosen[:, d], at = option - 1, self._before[option, at]
        return found, chosen

    def _ways(self, first: int, last: int) -> Ways:
        """To the sums of first + 1 .. last + 1 devices."""
        if (first, last) not in self._parts:
            sums = slice(self._starts[first + 1], self._starts[last + 1])
            before = self._before[:, sums].T
            own, options = np.nonzero(before < self.count)
            starts = np.searchsorted(own, np.arange(len(before)))
            self._parts[first, last] = Ways(sums, starts, before[own, options], options)
        return self._parts[first, last]


def _ahead(slopes: Floats, before: Floats) -> Floats:
    """Directions [N, sets], less what in them leads back along those before: prices would go to and
    fro between what two distributions need."""
    back = np.minimum((slopes * before).sum(1), 0.0) / np.maximum((before**2).sum(1), TINY)
    return slopes - back[:, None] * before


def of(values: Floats, chosen: np.ndarray) -> Floats:
    """Of the options that devices have, [N, R], 0 for no part."""
    boxes = np.arange(len(values))[:, None]
    own = values[boxes, np.arange(values.shape[1]), np.maximum(chosen, 0)]
    return np.where(chosen >= 0, own, 0)


def in_proportion(least: np.ndarray, most: np.ndarray, total: np.ndarray | int) -> np.ndarray:
    """So many units, [N] or the same everywhere, between bounds [N, R], in proportion to what each
    device can take, each as far from its bound; where all of `least` are more, not all of them."""
    total = np.broadcast_to(np.asarray(total), len(least))[:, None]
    counts = np.clip(total - (least.cumsum(1) - least), 0, least)
    rest, room = total - counts.sum(1, keepdims=True), most - counts
    counts = counts + room * rest // np.maximum(room.sum(1, keepdims=True), 1)
    order = np.argsort(counts - most, axis=1, kind="stable")
    room = np.take_along_axis(most - counts, order, axis=1)
    rest = (total - counts.sum(1, keepdims=True)) - (room.cumsum(1) - room)  # in this order
    more = np.zeros_like(counts)
    np.put_along_axis(more, order, np.clip(rest, 0, room), axis=1)
    return counts + more
