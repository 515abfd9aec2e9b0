"""Boxes of cuts of every layer, by bounds of what a cut has; see `sharding.fit_tensor`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import NamedTuple

import numpy as np

from sharding.fit_exchanges import Exchanges
from sharding.fit_tables import Floats
from sharding.fit_terms import TensorParts

SLACK = 1 + 1e-9  # of comparisons of seconds
NEAR = 0.95  # of the way from the least of a bound to what was found: where the last piece begins
GAP = 0.01  # of a chunk, where what was found is no cut
NEARLY = 0.1  # of all thresholds
NOTHING = 1e-7  # of a request: bounds so close are not cut any closer
CHUNK = 0  # the first of a box's bounds


class Box(NamedTuple):
    """Least and most of what cuts have, [axes], and seconds of the request that none of them
    keeps."""

    low: Floats
    high: Floats
    none: float = 0.0


class Evaluated(NamedTuple):
    """Some cuts: groups of every total, [U, N, R], and blocks, [N, R]; whether all cache stays,
    [N]; seconds of computing, of links and of the host thread, [2, N] and [2, N, R], and of the
    request, [N], infinite where a cut does not fit or leaves a device or blocks out; and that of
    which boxes have bounds, [N, axes]."""

    groups: np.ndarray
    blocks: np.ndarray
    resident: np.ndarray
    compute: Floats
    links: Floats
    starts: Floats
    seconds: Floats
    parts: Floats

    @classmethod
    def halves(cls, both: Evaluated) -> tuple[Evaluated, Evaluated]:
        """Of so many cuts, and as many others, each by themselves."""
        n = len(both.seconds) // 2
        first = {"groups", "compute", "links", "starts"}  # kinds before cuts
        found = [
            [each[:, own] if name in first else each[own] for name, each in both._asdict().items()]
            for own in (slice(None, n), slice(n, None))
        ]
        return cls(*found[0]), cls(*found[1])


class Boxes:
    """Those of cuts over `n` devices: which there are, what follows in each from a limit, and how
    one is cut."""

    def __init__(self, parts: TensorParts, n: int):
        t = self._t = parts.tables
        self._n, self._options, self._terms = n, parts.options, parts.terms
        self.exchanges = Exchanges(t, n)
        self.axes = Axes(parts)
        self._count = np.array([stage.count for stage in t.stages])
        # Of the terms of MLPs that follow the first total alone: which these are, and together.
        self._first = [(each.mlps[:, :, 1:] == 0).all((1, 2, 3)) for each in parts.terms]
        both = list(zip(parts.terms, self._first, strict=True))
        self._together = [each.least_of(each.mlps[own].sum(0), n) for each, own in both]
        self._heaviest = [each.least(n)[1][0] for each in parts.terms]
        # A device of the one set is in the other, too; it is in the one or in the other.
        takes, pairs = parts.options.takes, list(permutations(range(len(t.sets)), 2))
        self._inside = [(a, b) for a, b in pairs if (takes[a] <= takes[b]).all()]
        self._either = [(a, b) for a, b in pairs if (takes[a] | takes[b]).all()]

    def all(self) -> list[Box]:
        """Boxes with all cuts, one a place of their devices."""
        at, found = self.axes, []
        for place in self.exchanges.places:
            low, high = np.zeros(at.size), np.full(at.size, np.inf)
            low[at.place] = high[at.place] = high[at.places] = place
            if place < self.exchanges.several:
                low[at.places] = place
            for s, terms in enumerate(self._terms):
                mixers, mlps = terms.least(self._n)
                low[at.mixers[s]], low[at.mlps[s]] = mixers, mlps[1:]
            for axis, levels in at.levels.items():
                high[axis] = levels[-1] * SLACK
            low[at.groups], high[at.groups] = self._t.mixers.first, self._t.mixers.last
            high[at.blocks] = self._t.mlps.last_thresholds
            high[at.own] = self._t.mlps.totals[0]
            takes = self._options.takes.all(1)  # all options of any device
            low[at.sets], high[at.sets] = np.where(takes, self._n, 1), self._n
            found.append(Box(low, high))
        return found

    def bounds(self, low: Floats, high: Floats, limit: float) -> tuple[Floats, Floats, Floats]:
        """What follows for boxes from a limit of the request's seconds: least and most values, [N,
        axes], and most seconds of a step of each kind, [N, 2]."""
        at, x, low, high = self.axes, self.exchanges, low.copy(), high.copy()
        few, many = low[:, at.sets], high[:, at.sets]  # views
        for a, b in self._either:
            few[:, a] = np.maximum(few[:, a], self._n - many[:, b])
        for a, b in self._inside:
            few[:, b] = np.maximum(few[:, b], few[:, a])
        cells = self._t.mixers.tightened(low[:, at.groups].T, high[:, at.groups].T)
        low[:, at.groups], high[:, at.groups] = (each.T for each in cells)
        wires, set_wires, sets = self.wires(low, high)
        for axis, (levels, implied) in at.implied.items():
            own = np.minimum(np.searchsorted(levels, low[:, axis] / SLACK), len(levels) - 1)
            low[:, at.terms] = np.maximum(low[:, at.terms], implied[own])
        least, programs = np.empty((len(low), 2)), np.empty((len(low), 2, sets.shape[1]))
        for s in range(2):
            mlps = low[:, at.mlps[s]]
            apart = mlps[:, ~self._first[s][1:]].sum(1)
            apart += 0.0 if self._first[s][0] else self._heaviest[s]
            alone = self._heaviest[s] + mlps.sum(1)
            least[:, s] = low[:, at.mixers[s]].sum(1) + np.maximum(alone, apart + self._together[s])
            exchanges, programs[:, s] = x.of_sets(set_wires, sets, s)
            least[:, s] += self._terms[s].constant + x.least[wires, s] + exchanges.sum(1)
        starts = x.starts + programs.sum(2)
        least = np.maximum(least, starts)
        least[:, 0] = low[:, CHUNK] = np.maximum(low[:, CHUNK], least[:, 0])
        most = (limit - least[:, ::-1] * self._count[::-1]) / self._count
        most[:, 0] = np.minimum(most[:, 0], high[:, CHUNK])
        left = (most * SLACK - starts)[..., None] + programs
        devices = (x.set_starts * (1 - 1e-12) <= left[..., None]).sum(-1) - 1  # [N, 2, sets]
        np.minimum(many, devices.min(1), out=many)
        for a, b in self._inside:
            many[:, a] = np.minimum(many[:, a], many[:, b])
        for axis, u in at.partial:
            self._partial(low, high, axis, u)
        return low, high, most

    def wires(self, low: Floats, high: Floats) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What is known of where all devices and those of sets are, [N] and [N, sets], and the
        fewest devices of sets, [N, sets]."""
        at, x = self.axes, self.exchanges
        sets = low[:, at.sets].astype(int)
        wires = x.known(low[:, at.place], high[:, at.place])
        places = x.known(low[:, at.places], high[:, at.places])
        return wires, np.where(sets == self._n, wires[:, None], places), sets

    def pieces(
        self,
        box: Box,
        least: Floats,
        taken: Evaluated,
        cuts: Evaluated,
        exchanged: Floats,
        off: np.ndarray,
        i: int,
        many: int,
    ) -> list[Box]:
        """The box in pieces: by how many devices sets of layers have; or at parts of the way from a
        least value to what was found in it, that which is worth most of the request; or by how
        units are rounded, where that makes a larger gap between what was found and the cut; or by
        how many blocks a device has, where all else is told. None where nothing is left to cut the
        box by. Values are cut into so `many` pieces. The box is the one numbered `i`; what was
        `exchanged` is of all."""
        at, parts, (low, high, none) = self.axes, taken.parts[i], box
        for axis in range(at.size)[at.sets]:
            if low[axis] < high[axis]:
                return _near(box, axis, parts)
        for axis in range(at.size)[at.places]:  # one of some hosts, and devices are in several
            if low[axis] < high[axis] < parts[axis]:
                return _halves(box, axis, high[axis])
        gap = cuts.seconds[i] - np.nan_to_num(taken.seconds[i], posinf=0.0)
        if not np.isfinite(gap):
            gap = GAP * self._count[0] * parts[CHUNK]
        edges = cuts.parts[i].copy()
        edges[at.groups] = parts[at.groups]
        worth = np.where(parts > high, 0.0, parts - least) * at.worth(self._count)
        worth[at.places] = np.where((low < high)[at.places], exchanged[i], 0.0)
        worth = np.where(parts > high, 0.0, worth)
        axis = int(worth.argmax())
        if worth[axis] <= max(gap, 0.0):
            rounded = self._rounded(box, edges, off, parts)
            if rounded:
                return rounded
        if worth[axis] <= NOTHING * self._count[0] * least[CHUNK]:
            return self._given(box, parts) or self._rounded(box, edges, off, parts)
        if at.places.start <= axis < at.places.stop:
            return _near(box, axis, parts)
        found = []
        for part in NEAR * np.arange(1, many) / (many - 1):
            below = above = least[axis] + part * (parts[axis] - least[axis])
            if axis in at.levels:
                steps = at.levels[axis]
                step = min(int(np.searchsorted(steps, below)), len(steps) - 1)
                below, above = steps[step - 1] if step else -1.0, steps[step]
            if below >= low[axis]:
                most = high.copy()
                most[axis] = below
                found.append(Box(low, most, none))
            low = low.copy()
            low[axis] = max(above, low[axis])
        return [*found, Box(low, high, none)] if low[axis] <= high[axis] else found

    def exchanged(self, boxes: Sequence[Box], taken: Evaluated) -> Floats:
        """What exchanges of each set, or programs where the host thread is the slowest, take in
        what was found in boxes, more than in the place that is fastest for as many, [N, sets]."""
        at, x, parts = self.axes, self.exchanges, taken.parts
        low, high, _ = (np.array(each) for each in zip(*boxes, strict=True))
        _, known, _ = self.wires(low, high)
        late = taken.starts > np.maximum(taken.compute, taken.links.max(2))
        sets = np.minimum(parts[:, at.sets].astype(int), self._n)
        own = np.where(parts[:, at.places] < x.several, 0, 1)

        def seconds(wires: np.ndarray, counts: np.ndarray) -> Floats:
            found = np.zeros(counts.shape)
            for s, slow in enumerate(late[..., None]):
                exchanges, programs = x.of_sets(wires, counts, s)
                found = found + self._count[s] * np.where(slow, programs, exchanges)
            return found

        return seconds(own, sets) - seconds(known, sets)

    def _rounded(self, box: Box, edges: Floats, off: np.ndarray, parts: Floats) -> list[Box]:
        """The box in two, at the cell or threshold by which most units of a cut are rounded
        otherwise, or in the middle of its bounds; none where there is one of each. Where the
        threshold is told nearly, but not which units devices have, few cuts have just that one and
        bounds cannot tell that none does: the box is then cut by what devices have."""
        at, (low, high, _) = self.axes, box
        axes = [*range(at.size)[at.groups], *range(at.size)[at.blocks]]
        wide = [(n, high[axis] - low[axis], axis) for n, axis in zip(off, axes, strict=True)]
        wide = [each for each in wide if each[1] > 0]
        if not wide:
            return []
        axis = max(wide)[2]
        u = axis - at.blocks.start
        if u >= 0 and high[axis] - low[axis] < NEARLY * self._t.mlps.last_thresholds[u]:
            part, whole = self._t.mlps.parts[u + 1], self._t.mlps.wholes[u + 1]
            if (high - low)[at.own].max() * part > whole:
                return self._given(box, parts)
        edge = edges[axis]
        if not low[axis] < edge <= high[axis]:
            edge = low[axis] + 1 if edge == low[axis] else (low[axis] + high[axis] + 1) // 2
        return _halves(box, axis, edge)

    def _given(self, box: Box, parts: Floats) -> list[Box]:
        """The box in two by how many blocks the device has whose bounds are furthest apart; none
        where all are told."""
        own = self.axes.own
        wide = (box.high - box.low)[own]
        return _near(box, own.start + int(wide.argmax()), parts) if wide.any() else []

    def _partial(self, low: Floats, high: Floats, axis: int, u: int) -> None:
        """What follows where some devices with blocks have no unit of a total, and so no part in a
        set (bounded by `axis`): each quota of theirs is one that others are rounded up by, by the
        same threshold that rounds theirs down."""
        part, whole, devices = self._t.mlps.parts[u], self._t.mlps.wholes[u], len(self._t.cap)
        lead = self.axes.blocks.start + u - 1
        takes = np.maximum(high[:, axis], 1)
        some = takes < self._n
        low[:, axis] = np.maximum(low[:, axis], -(-self._n * part // whole))
        offset = np.ceil((self._n - takes) * part / takes)
        low[:, lead] = np.maximum(low[:, lead], some * (offset * devices - devices + 1))
        most = np.where(some, (whole - part) * devices - 1, np.inf)
        high[:, lead] = np.minimum(high[:, lead], most)


class Axes:
    """Which of a box's bounds are of what: of each kind of step a slice of `terms` of mixers and of
    MLPs but the heaviest, slices of cells of groups and of thresholds of blocks, of how many
    devices sets have and of where these are, and where all are; and, where blocks are of several
    totals, of each device's `own` of the first."""

    def __init__(self, parts: TensorParts):
        t, self.size = parts.tables, 1
        self.mixers = [self._next(len(terms.mixers)) for terms in parts.terms]
        self.mlps = [self._next(len(terms.mlps) - 1) for terms in parts.terms]
        self.groups = self._next(len(t.mixers.pairs))
        self.blocks = self._next(len(t.mlps.totals) - 1)
        self.sets = self._next(len(t.sets))
        self.places = self._next(len(t.sets))
        self.place = self.size
        self.size += 1
        self.own = self._next(len(t.cap) if len(t.mlps.totals) > 1 else 0)
        # Of terms of mixers: all values there are.
        self.terms = slice(self.mixers[0].start, self.mixers[-1].stop)
        terms = np.concatenate([each.mixers for each in parts.terms])
        axes = range(self.size)[self.terms]
        self.levels = {axis: np.unique(own) for axis, own in zip(axes, terms, strict=True)}
        # Some device has what the slowest of a term takes at least, so every term takes at least
        # what the fastest such device does.
        self.implied = {axis: _implied(own, terms) for axis, own in zip(axes, terms, strict=True)}

        # Sets whose devices have groups or units of some totals: others have neither, but blocks.
        self.partial = [
            (self.sets.start + c, u)
            for c, each in enumerate(t.sets)
            if t.mixers.leading <= each.mixers
            for u in each.mlps
        ]

    def _next(self, count: int) -> slice:
        self.size += count
        return slice(self.size - count, self.size)

    def worth(self, count: Floats) -> Floats:
        """How many steps a bound of seconds is of; 0 for other bounds."""
        found = np.zeros(self.size)
        found[CHUNK] = count[0]
        for s in range(2):
            found[self.mixers[s]] = found[self.mlps[s]] = count[s]
        return found


def _near(box: Box, axis: int, parts: Floats) -> list[Box]:
    """A box in two, below what was found of whole numbers and from there on."""
    return _halves(box, axis, float(np.clip(parts[axis], box.low[axis] + 1, box.high[axis])))


def _halves(box: Box, axis: int, edge: float) -> list[Box]:
    """A box in two, below a whole number and from there on."""
    below, above = box.high.copy(), box.low.copy()
    below[axis], above[axis] = edge - 1, edge
    return [box._replace(high=below), box._replace(low=above)]


def _implied(one: Floats, terms: Floats) -> tuple[Floats, Floats]:
    """Values of one term, [R, O], in order; and the least of all `terms` where the one is at least
    that, [values, terms]."""
    order = np.argsort(one, axis=None)
    least = np.minimum.accumulate(terms.reshape(len(terms), -1)[:, order[::-1]], axis=1)
    return one.ravel()[order], least[:, ::-1].T
