"""Giving out groups to devices: a dynamic program over devices and the sums of what they have.

Each device takes one of O options, or no part. Every option is worth so many blocks, to each device
its own, or minus infinity where the device cannot take it. In layers of a set only so many devices
may take part. Many such questions, one a box, are answered together.

Sums of devices in each set beside those of groups would be many. So what is out of a set is paid
for at first. Whatever the price, no distribution that keeps the bounds is worth more than the most
that any is paid, less the price of those that must be out. Prices that rise where too few are out
(a subgradient method) soon prove by this that there is none, or find one. Where they do neither,
one set after the other is counted in sums, which leaves nothing open.
"""

from __future__ import annotations

from collections.abc import Sequence

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
        self._sums: dict[tuple[int, ...], Sums] = {}

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
        prices, todo = np.zeros(need.shape), np.arange(len(worth))
        found, chosen = np.zeros(len(worth), bool), np.full(worth.shape[:2], -1)
        for counted in np.repeat(np.arange(len(bound) + 1), [TRIES] * len(bound) + [1]):
            if not len(todo):
                break
            prices[:, :counted] = 0.0
            paid = worth[todo] + (prices[todo] @ out)[:, None]
            goal = least[todo] + (prices * need)[todo].sum(1)
            sums = self._over(bound[:counted], need[todo, :counted])
            self._effort.left -= paid.size * sums.count
            may, options = sums.best(paid, need[todo, :counted], goal - TINY)
            todo, paid, goal = todo[may], paid[may], goal[may]
            more = (out[:, options] & (options >= 0)).sum(2).T - need[todo]
            keeps = (more >= 0).all(1) & (of(worth[todo], options).sum(1) >= least[todo])
            found[todo[keeps]], chosen[todo[keeps]] = True, options[keeps]
            slope = np.where((more < 0) | (prices[todo] > 0), more, 0)
            over = of(paid, options).sum(1) - goal + 1
            rise = 2 * over / np.maximum((slope**2).sum(1), 1)
            prices[todo] = np.maximum(prices[todo] - rise[:, None] * slope, 0.0)
            todo = todo[~keeps]
        return found, chosen[found]

    def _over(self, counted: np.ndarray, need: np.ndarray) -> Sums:
        """Sums of groups, and of devices out of the sets that are `counted`."""
        most = (*map(int, need.max(0)), *self._totals)
        key = (*map(int, counted), -1, *most)
        if key not in self._sums:
            adds = np.concatenate((~self._options.takes[counted], self._groups))
            self._sums[key] = Sums(adds.T.astype(int), self._n, most, len(counted))
        return self._sums[key]


class Sums:
    """All sums up to `most` [D] that options of some of `n` devices, in any order, can lead to and
    on from; `adds` [O, D] is what an option adds. Of the first, `at_least`, more is as good as
    most. `count` tells how many sums there are."""

    def __init__(self, adds: np.ndarray, n: int, most: Sequence[int], at_least: int):
        self._n, self._most, self._at_least = n, most, at_least
        self._sizes = n + 1, *(each + 1 for each in most)
        sums = np.indices(self._sizes).reshape(len(self._sizes), -1).T  # by devices used first
        left = sums - np.column_stack((np.ones(len(adds), int), adds))[:, None]
        first = left[..., 1 : 1 + at_least]
        np.maximum(first, 0, out=first)
        index = np.ravel_multi_index(tuple(np.maximum(left, 0).transpose(2, 0, 1)), self._sizes)
        before = np.where((left >= 0).all(2), index, len(sums))  # none, [O, S]
        levels = [np.flatnonzero(sums[:, 0] == used) for used in range(n + 1)]
        led, leads = np.zeros((2, len(sums) + 1), bool)
        led[0] = leads[0] = True
        leads[levels[n]] = (sums[levels[n], 1 + at_least :] == most[at_least:]).all(1)
        for level in levels[1:]:
            led[level] = led[before[:, level]].any(0)
        for level in reversed(levels[1:]):
            leads[before[:, level[leads[level]]]] = True
        kept = np.flatnonzero((led & leads)[:-1])
        self.count = len(kept)
        self._index = np.full(len(sums) + 1, self.count)  # `count`: none
        self._index[kept] = np.arange(self.count)
        self._before = self._index[before[:, kept]]
        self._starts = np.searchsorted(sums[kept, 0], np.arange(n + 2))

    def best(self, worth: Floats, need: np.ndarray, least: Floats) -> tuple[np.ndarray, np.ndarray]:
        """In which boxes all sums that are not `at_least` some, `need` [N, at_least], can be
        `most` and are worth `least` [N] at least, [N], and the options that are worth most, -1
        for no part, [boxes in which they are, R]; `worth` is [N, R, O]."""
        count, devices, _ = worth.shape
        n = self._n
        total = np.full((count, self.count + 1), -np.inf)
        total[:, self._index[0]] = 0.0
        steps = [total]
        able = np.isfinite(np.max(worth, axis=0))
        for d in range(devices):
            # Used before: not more than there are, and so many that n can be reached.
            first, last = max(0, n - devices + d), min(d, n - 1) + 1
            rows = slice(self._starts[first + 1], self._starts[last + 1])
            own = np.flatnonzero(able[d])
            total = total.copy()  # the device takes no part
            if len(own):
                led = total.take(self._before[own, rows], axis=1)
                led += worth[:, d, own, None]
                np.maximum(total[:, rows], led.max(1), out=total[:, rows])
            steps.append(total)
        ends = np.full((count, len(self._sizes)), (n, *self._most))
        ends[:, 1 : 1 + self._at_least] = need
        at = self._index[np.ravel_multi_index(tuple(ends.T), self._sizes)]
        found = total[np.arange(count), at] >= least
        rows = np.flatnonzero(found)
        at, chosen = at[rows], np.full((len(rows), devices), -1)
        for d in reversed(range(devices)):
            now, before = steps[d + 1][rows, at], steps[d]
            led = before[rows[:, None], self._before[:, at].T] + worth[rows, d]
            takes = before[rows, at] != now
            option = (led == now[:, None]).argmax(1)
            chosen[:, d] = np.where(takes, option, -1)
            at = np.where(takes, self._before[option, at], at)
        return found, chosen


def of(values: Floats, chosen: np.ndarray) -> Floats:
    """Of the options that devices have, [N, R], 0 for no part."""
    own = np.take_along_axis(values, np.maximum(chosen, 0)[..., None], axis=2)[..., 0]
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
