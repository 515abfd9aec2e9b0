"""Sums of what devices have, by a dynamic program over devices; see `sharding.fit_distribute`.

The sums of several totals are as many as their product. Where these are very many, the units of the
largest total are not counted but paid for: at any price, distributions with the right sum of them
are worth no more than the most that any is paid, less the price of that sum. What is paid at most
is a convex function of the price, a line for each distribution; the lowest point that two of its
lines leave is the next price. Where that proves nothing, units of that total are given out beside
what was found of the others; and where that leads to none, all totals are counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from sharding.fit_tables import Floats
from sharding.fit_terms import Effort

AT_ONCE = 15000  # sums, times the largest total, for which all totals are counted at once
AT_LAST = 1 << 22  # sums, times options, for which they are counted at all
PRICES = 6  # that are tried
TINY = 1e-6  # of whole numbers of blocks
Best = tuple[np.ndarray, np.ndarray, np.ndarray]


def sums_of(
    adds: np.ndarray, n: int, most: Sequence[int], at_least: int, effort: Effort
) -> Sums | Priced:
    """Those of some options, counted or not; see `Sums`."""
    totals = most[at_least:]
    if len(totals) > 1 and math.prod(n + 1 for n in totals) * max(totals) > AT_ONCE:
        return Priced(adds, n, most, at_least, effort)
    return Sums(adds, n, most, at_least, effort)


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
    most."""

    def __init__(
        self, adds: np.ndarray, n: int, most: Sequence[int], at_least: int, effort: Effort
    ):
        self._n, self._most, self._at_least, self._effort = n, most, at_least, effort
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
        self._count = len(kept)
        self._index = np.full(whole + 1, self._count)  # `count`: none
        self._index[kept] = np.arange(self._count)
        used, rest = np.divmod(kept, size)
        one_less = (used - 1) * size + before[:, rest]
        led_by = (used > 0) & (before[:, rest] < size)
        before = self._index[np.where(led_by, one_less, whole)]
        self._before = np.concatenate((np.arange(self._count)[None], before))  # first: no part
        self._starts = np.searchsorted(used, np.arange(n + 2))
        self._parts: dict[tuple[int, int], Ways] = {}

    def best(self, worth: Floats, need: np.ndarray, least: Floats) -> Best:
        """In which boxes all sums that are not `at_least` some, `need` [N, at_least], can be
        `most` and are worth `least` [N] at least, [N], and the options that are worth most, -1
        for no part, [boxes in which they are, R]; and in which boxes these are known, [N], which
        is all of them. `worth` is [N, R, O]."""
        count, devices, n = *worth.shape[:2], self._n
        worth = np.concatenate((np.zeros((count, devices, 1)), worth), axis=2)
        steps = np.full((devices + 1, count, self._count + 1), -np.inf)
        steps[:, :, self._index[0]] = 0.0
        for d in range(devices):
            # Used before: not more than there are, and so many that n can be reached.
            ways = self._ways(max(0, n - devices + d), min(d, n - 1) + 1)
            self._effort.left -= count * len(ways.before)
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
        return found, chosen, np.ones(count, bool)

    def _ways(self, first: int, last: int) -> Ways:
        """To the sums of first + 1 .. last + 1 devices."""
        if (first, last) not in self._parts:
            sums = slice(self._starts[first + 1], self._starts[last + 1])
            before = self._before[:, sums].T
            own, options = np.nonzero(before < self._count)
            starts = np.searchsorted(own, np.arange(len(before)))
            self._parts[first, last] = Ways(sums, starts, before[own, options], options)
        return self._parts[first, last]


class Priced:
    """The same as `Sums`, but that units of the largest total are paid for. Options that add the
    same else are a class."""

    def __init__(
        self, adds: np.ndarray, n: int, most: Sequence[int], at_least: int, effort: Effort
    ):
        own = at_least + int(np.argmax(most[at_least:]))
        self._all = adds, n, most, at_least, effort
        self._few = math.prod(each + 1 for each in most) * len(adds) <= AT_LAST
        self._units, self._total, self._effort = adds[:, own], most[own], effort
        rows, classes = np.unique(np.delete(adds, own, 1), axis=0, return_inverse=True)
        self._classes = classes.ravel()
        members = [np.flatnonzero(self._classes == i) for i in range(len(rows))]
        self._members = np.full((len(rows), max(map(len, members))), -1)
        for row, own_members in zip(self._members, members, strict=True):
            row[: len(own_members)] = own_members
        self._sums = Sums(rows, n, np.delete(most, own).tolist(), at_least, effort)

    def best(self, worth: Floats, need: np.ndarray, least: Floats) -> Best:
        """As `Sums.best`. Options may be worth less than most; and of some boxes the last says that
        options with these sums are not known, where there may be none."""
        count, devices, _ = worth.shape
        chosen, prices = np.full((count, devices), -1), np.zeros(count)
        may, exact, todo = np.ones(count, bool), np.zeros(count, bool), np.arange(count)
        lines = np.full((2, 3, count), np.nan)  # with too few units and with too many
        for _ in range(PRICES):
            paid = worth[todo] + prices[todo, None, None] * self._units
            goal = least[todo] + prices[todo] * self._total
            found, options = self._of_classes(paid, need[todo], goal)
            may[todo[~found]] = False
            over = of(paid[found], options).sum(1) - goal[found]
            todo = todo[found]
            more = self._units_of(options) - self._total
            chosen[todo], exact[todo] = options, more == 0
            lines[(more > 0).astype(int), :, todo] = np.array((prices[todo], over, more)).T
            todo, over, more = (each[more != 0] for each in (todo, over, more))
            (p, v, slope), (q, w, other) = lines[:, :, todo]
            meet = (w - v + slope * p - other * q) / (slope - other)
            proves = ~(v + slope * (meet - p) >= 0)  # may prove that there are none
            prices[todo] = np.where(np.isnan(meet), prices[todo] - 2 * (over + 1) / more, meet)
            todo = todo[proves]
        rest = np.flatnonzero(may & ~exact)
        exact[rest], chosen[rest] = self._given_out(worth[rest], chosen[rest], least[rest])
        rest = rest[~exact[rest]]
        if self._few and len(rest):
            may[rest], options, _ = self._counted.best(worth[rest], need[rest], least[rest])
            chosen[rest[may[rest]]], exact[rest] = options, True
        return may, chosen[may], exact

    @cached_property
    def _counted(self) -> Sums:
        """With the largest total as well."""
        return Sums(*self._all)

    def _units_of(self, options: np.ndarray) -> np.ndarray:
        """Of the largest total, that options [N, R] have together."""
        return np.where(options >= 0, self._units[options], 0).sum(1)

    def _of_classes(
        self, paid: Floats, need: np.ndarray, least: Floats
    ) -> tuple[np.ndarray, np.ndarray]:
        """As `Sums.best`, of what is paid for options, with any units of the largest total."""
        none = np.full((*paid.shape[:2], 1), -np.inf)
        members = np.concatenate((paid, none), axis=2)[..., self._members]  # [N, R, C, J]
        found, classes, _ = self._sums.best(members.max(3), need, least)
        boxes, devices = np.indices(classes.shape)
        own = members[found][boxes, devices, classes].argmax(2)
        return found, np.where(classes >= 0, self._members[classes, own], -1)

    def _given_out(
        self, worth: Floats, chosen: np.ndarray, least: Floats
    ) -> tuple[np.ndarray, np.ndarray]:
        """In which boxes options of the same classes as those chosen, [N, R], have all units of the
        largest total and are worth `least` [N] at least, and those that are worth most, or the
        chosen."""
        count, devices = chosen.shape
        boxes, sums, none = np.arange(count), np.arange(self._total + 1), chosen < 0
        members = self._members[self._classes[chosen]]
        value = np.take_along_axis(worth, np.maximum(members, 0), axis=2)
        value = np.where((members < 0) | none[..., None], -np.inf, value)
        value[none, 0] = 0.0  # no part
        units = np.where(value > -np.inf, self._units[members], 0)
        units[none] = 0
        self._effort.left -= 2 * units.size * len(sums)
        steps = np.full((devices + 1, count, self._total + 1), -np.inf)
        steps[0, :, 0] = 0.0

        def led(d: int, sums: np.ndarray) -> Floats:  # [N, J, sums]
            before = sums[:, None] - units[:, d, :, None]
            own = steps[d][boxes[:, None, None], np.maximum(before, 0)]
            return np.where(before < 0, -np.inf, own + value[:, d, :, None])

        for d in range(devices):
            steps[d + 1] = led(d, np.broadcast_to(sums, (count, len(sums)))).max(1)
        found = steps[devices, :, self._total] >= least
        at, given = np.full((count, 1), self._total), chosen.copy()
        for d in reversed(range(devices)):
            own = led(d, at)[..., 0].argmax(1)
            given[:, d] = np.where(none[:, d], -1, members[boxes, d, own])
            at = at - units[boxes, d, own][:, None]
        return found, np.where(found[:, None], given, chosen)


def of(values: Floats, chosen: np.ndarray) -> Floats:
    """Of the options that devices have, [N, R], 0 for no part."""
    boxes = np.arange(len(values))[:, None]
    own = values[boxes, np.arange(values.shape[1]), np.maximum(chosen, 0)]
    return np.where(chosen >= 0, own, 0)
