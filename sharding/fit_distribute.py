"""Giving out groups to devices: a dynamic program over devices and the sums of what they have.

Each device takes one of O options, or no part. Every option is worth so many blocks, to each device
its own, or minus infinity where the device cannot take it. In layers of a set only so many devices
may take part. Many such questions, one a box, are answered together.

Sums of devices in each set beside those of groups would be many. So what is out of a set is paid
for at first. Whatever the price, no distribution that keeps the bounds is worth more than the most
that any is paid, less the price of those that must be out. Prices that rise where too few are out
(a subgradient method, whose steps do not lead back) soon prove by this that there is none, or find
one. Where they do neither, one set after the other is counted in sums, which leaves nothing open
but what `sharding.fit_sums` does.
"""

from __future__ import annotations

import numpy as np

from sharding.fit_joint import Groups
from sharding.fit_options import Options
from sharding.fit_sums import TINY, Priced, Sums, of, sums_of
from sharding.fit_tables import Floats
from sharding.fit_terms import Effort

TRIES = 4  # prices, before one more set is counted


class Distribution:
    """Groups of all totals of `mixers` for `n` devices, by `options`."""

    def __init__(self, options: Options, mixers: Groups, n: int, effort: Effort):
        self._options, self._n, self._effort = options, n, effort
        self._groups, self._totals = options.groups, mixers.totals

    def best(
        self, worth: Floats, devices: np.ndarray, least: Floats
    ) -> tuple[np.ndarray, np.ndarray]:
        """In which boxes options by which at most so many `devices` [N, sets] take part in sets
        are worth `least` [N] at least, [N], and which these are, -1 for no part, [boxes in which
        they are, R]; `worth` is [N, R, O]. Of totals too many to be counted (`sharding.fit_sums`)
        a box may be left open: it is told as one with options, which have other sums."""
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
            may, options, exact = self._over(bound[counted], few).best(paid, few, goal - TINY)
            todo, paid, goal, exact = todo[may], paid[may], goal[may], exact[may]
            chosen[todo] = options
            more = (out[:, options] & (options >= 0)).sum(2).T - need[todo]
            worth_it = of(worth[todo], options).sum(1) >= least[todo] - TINY
            keeps = exact & (more >= 0).all(1) & worth_it
            found[todo[keeps]] = True
            slope = np.where((more < 0) | (prices[todo] > 0), more, 0)
            slopes[todo] = slope = _ahead(slope, slopes[todo])
            over = of(paid, options).sum(1) - goal + 1
            rise = 2 * over / np.maximum((slope**2).sum(1), TINY)
            prices[todo] = np.maximum(prices[todo] - rise[:, None] * slope, 0.0)
            todo, tries = todo[~keeps], tries - 1
            if not tries or not slope[~keeps].any():  # all of them would lead back
                count, tries = count + 1, TRIES
        found[todo] = True
        return found, chosen[found]

    def _over(self, counted: np.ndarray, need: np.ndarray) -> Sums | Priced:
        """Sums of groups, and of devices out of the sets that are `counted`."""
        most = (*map(int, need.max(0)), *self._totals)
        adds = np.concatenate((~self._options.takes[counted], self._groups)).T.astype(int)
        key = self._n, most, len(counted), adds.tobytes()
        if key not in self._effort.sums:
            self._effort.sums[key] = sums_of(adds, self._n, most, len(counted), self._effort)
        return self._effort.sums[key]


def _ahead(slopes: Floats, before: Floats) -> Floats:
    """Directions [N, sets], less what in them leads back along those before: prices would go to and
    fro between what two distributions need."""
    back = np.minimum((slopes * before).sum(1), 0.0) / np.maximum((before**2).sum(1), TINY)
    return slopes - back[:, None] * before


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
