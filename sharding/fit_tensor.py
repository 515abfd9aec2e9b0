"""Cuts of every layer over a number of devices: KV groups and MLP blocks a device.

Exact over whole KV groups and whole blocks of the layers that have most, whatever the layers are. A
step takes the sum of its terms, which wait for their slowest device each (`sharding.fit_terms`),
and of exchanges, which depend on the devices of a layer; and at least as long as every link and as
the host thread. A request takes so many steps of two kinds, chunks of its prompt and decode steps.

Whether any cut keeps a limit of a request's seconds is found by branch and bound. A box has bounds
of the chunk's seconds; of all terms of both kinds of steps but the heaviest of MLPs; of the
thresholds by which layers with fewer units are rounded (`sharding.fit_units`); of how many devices
take part in layers that some may have no part of; and of which host these are in, and all are in,
if they are in one. In a box the seconds of both steps are bounded, so for each option of groups that a
device may take, the blocks beside them are: by what is left of each step and of the request, and by
the memory beside the groups' weights, rings and as much of their cache as must stay for the link to
keep up. `sharding.fit_distribute` finds a cut that keeps these bounds, or that there is none. If
that cut does not keep the limit, the box is cut where what the cut takes is furthest from the least
that the box has.

Bounds never leave out a cut that keeps the limit. In a box that nothing is left to be cut by, and
when a search has looked at many boxes, the answer is that none was found, without the proof.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sharding.fit_distribute import Sums, in_proportion
from sharding.fit_exchanges import Exchanges
from sharding.fit_memory import TensorMemory
from sharding.fit_tables import Cut, Floats, Tables
from sharding.fit_terms import Terms
from sharding.fit_units import Options

SLACK = 1 + 1e-9  # of comparisons of seconds
CLOSE = 4e-6  # a cut keeps a limit to this part
PRICES = 0.0, 1e3, 1.0, 0.4, 2.5, 0.15, 6.0  # of a group, in its even part of the blocks
WIDE = 64  # boxes that are looked at together
MOST_BOXES = 4096  # of one question,
ALL_BOXES = 32768  # and of one search
CHUNK = 0  # the first of a box's bounds
Box = tuple[Floats, Floats]  # least and most


class Answer(NamedTuple):
    """A cut, or none; `proved`: where there is none, that there cannot be one."""

    cut: Cut | None
    proved: bool = True


class Effort:
    """How many boxes a search may still look at before it gives up proofs."""

    left = ALL_BOXES


class TensorParts:
    """What cuts of one set of tables have in common over any number of devices."""

    def __init__(self, tables: Tables, effort: Effort):
        self.tables, self.effort = tables, effort
        self.options = Options(tables.mixers, tables.mlps, tables.sets)
        self.memory = TensorMemory(tables, self.options)
        self.terms = [Terms(stage, tables, self.options) for stage in tables.stages]


class TensorCuts:
    """The cuts of one set of tables over `n` devices. All cuts are in one of the `boxes`, which
    grow smaller by what is asked; those of tables with the same seconds may be given."""

    def __init__(self, parts: TensorParts, n: int, boxes: Sequence[Box] | None = None):
        t, self._effort = parts.tables, parts.effort
        self._t = t
        self._n, self._options, self._terms = n, parts.options, parts.terms
        self._memory = parts.memory.over(n)
        self._exchanges = Exchanges(t, n)
        self._count = np.array([stage.count for stage in t.stages])
        self._sums: dict[tuple[int, ...], Sums] = {}
        self._axes = _Axes(parts)
        self._all_alike = len(t.mixers.totals) == len(t.mlps.totals) == 1
        # Of the terms of MLPs that follow the first total alone: which these are, and together.
        self._first = [(each.mlps[:, :, 1:] == 0).all((1, 2, 3)) for each in parts.terms]
        both = list(zip(parts.terms, self._first, strict=True))
        self._together = [each.least_of(each.mlps[own].sum(0), n) for each, own in both]
        self._heaviest = [each.least(n)[1][0] for each in parts.terms]
        self.boxes = self._all() if boxes is None else list(boxes)

    def within(self, limit: float, resident: bool = False) -> Answer:
        """A cut whose request takes no more seconds than `limit`, but for a millionth part or so.
        `resident`: all of the cache stays on the devices."""
        if not all(self._t.blocks_and_groups):
            return Answer(None)
        todo, done, proved = self.boxes, [], True
        looks = MOST_BOXES
        while todo:
            boxes, todo = todo[:WIDE], todo[WIDE:]
            looks -= len(boxes)
            self._effort.left -= len(boxes)
            low, high = (np.array(each) for each in zip(*boxes, strict=True))
            low, high, most = self._bounds(low, high, limit)
            possible, groups, blocks = self._fill(low, high, most, limit, resident)
            done += [box for box, may in zip(boxes, possible, strict=True) if not may]
            boxes = [box for box, may in zip(boxes, possible, strict=True) if may]
            if not boxes:
                continue
            rounded = self._t.mixers.counts(groups[0]), self._t.mlps.counts(blocks[0])
            cuts = self._evaluate(*rounded)
            taken = cuts if self._all_alike else self._evaluate(groups, blocks)
            off = [abs(a - b)[1:].sum(2) for a, b in zip(rounded, (groups, blocks), strict=True)]
            off = np.concatenate(off)  # units that are rounded otherwise, of each threshold
            best = int(cuts.seconds.argmin())
            if cuts.seconds[best] <= limit * (1 + CLOSE) and (cuts.resident[best] or not resident):
                self.boxes = done + boxes + todo
                return Answer(self._cut(cuts, best))
            for i, (box, least) in enumerate(zip(boxes, low[possible], strict=True)):
                pieces = []
                if min(looks, self._effort.left) > 0:
                    pieces = self._pieces(box, least, taken, cuts, off[:, i], i)
                todo += pieces
                done += [] if pieces else [box]
                proved &= bool(pieces)
        self.boxes = done
        return Answer(None, proved)

    def _all(self) -> list[Box]:
        """Boxes with all cuts, one a place of their devices."""
        at, found = self._axes, []
        for place in self._exchanges.places:
            low, high = np.zeros(at.size), np.full(at.size, np.inf)
            low[at.place] = high[at.place] = high[at.places] = place
            if place < self._exchanges.several:
                low[at.places] = place
            for s, terms in enumerate(self._terms):
                mixers, mlps = terms.least(self._n)
                low[at.mixers[s]], low[at.mlps[s]] = mixers, mlps[1:]
            for axis, levels in at.levels.items():
                high[axis] = levels[-1] * SLACK
            high[at.groups] = self._t.mixers.last_threshold
            high[at.blocks] = self._t.mlps.last_threshold
            takes = self._options.takes.all(1)  # all options of any device
            low[at.sets], high[at.sets] = np.where(takes, self._n, 1), self._n
            found.append((low, high))
        return found

    def _bounds(self, low: Floats, high: Floats, limit: float) -> tuple[Floats, Floats, Floats]:
        """What follows for boxes from a limit of the request's seconds: least and most values, [N,
        axes], and most seconds of a step of each kind, [N, 2]."""
        at, x, low, high = self._axes, self._exchanges, low.copy(), high.copy()
        wires, set_wires, sets = self._wires(low, high)
        for (a, b), (levels, others) in at.implied.items():
            own = np.minimum(np.searchsorted(levels, low[:, a] / SLACK), len(levels) - 1)
            low[:, b] = np.maximum(low[:, b], others[own])
        least, starts = np.empty((2, len(low), 2))
        for s in range(2):
            mlps = low[:, at.mlps[s]]
            apart = mlps[:, ~self._first[s][1:]].sum(1)
            apart += 0.0 if self._first[s][0] else self._heaviest[s]
            alone = self._heaviest[s] + mlps.sum(1)
            least[:, s] = low[:, at.mixers[s]].sum(1) + np.maximum(alone, apart + self._together[s])
            exchanges, programs = x.of_sets(set_wires, sets, s)
            least[:, s] += self._terms[s].constant + x.least[wires, s] + exchanges.sum(1)
            starts[:, s] = x.starts[s] + programs.sum(1)
        least = np.maximum(least, starts)
        least[:, 0] = low[:, CHUNK] = np.maximum(low[:, CHUNK], least[:, 0])
        most = (limit - least[:, ::-1] * self._count[::-1]) / self._count
        most[:, 0] = np.minimum(most[:, 0], high[:, CHUNK])
        for c in range(sets.shape[1]):
            for s in range(2):
                left = most[:, s] * SLACK - starts[:, s] + x.set_starts[s, c, sets[:, c]]
                devices = np.searchsorted(x.set_starts[s, c] * (1 - 1e-12), left, "right") - 1
                high[:, at.sets][:, c] = np.minimum(high[:, at.sets][:, c], devices)
        for axis, total, lead in at.partial:
            self._partial(low, high, axis, total, lead)
        return low, high, most

    def _wires(self, low: Floats, high: Floats) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What is known of where all devices and those of sets are, [N] and [N, sets], and the
        fewest devices of sets, [N, sets]."""
        at, x = self._axes, self._exchanges
        sets = low[:, at.sets].astype(int)
        wires = x.known(low[:, at.place], high[:, at.place])
        places = x.known(low[:, at.places], high[:, at.places])
        return wires, np.where(sets == self._n, wires[:, None], places), sets

    def _partial(self, low: Floats, high: Floats, axis: int, total: int, lead: int) -> None:
        """What follows where some devices with blocks have no unit of a total (bounded by `lead`),
        and so no part in a set (bounded by `axis`): each quota of theirs is one that others are
        rounded up by, by the same threshold that rounds theirs down."""
        first, devices = self._t.mlps.totals[0], len(self._t.cap)
        takes = np.maximum(high[:, axis], 1)
        some = takes < self._n
        low[:, axis] = np.maximum(low[:, axis], -(-self._n * total // first))
        offset = np.ceil((self._n - takes) * total / takes)
        low[:, lead] = np.maximum(low[:, lead], some * (offset * devices - devices + 1))
        most = np.where(some, (first - total) * devices - 1, np.inf)
        high[:, lead] = np.minimum(high[:, lead], most)

    def _fill(
        self, low: Floats, high: Floats, most: Floats, limit: float, resident: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Which boxes may have a cut that keeps the limit, [N], and of those a cut that keeps their
        bounds but perhaps for rounding, as groups and blocks of every total, [U, boxes that may,
        R]."""
        at, options, (first, *others) = self._axes, self._options, self._t.mlps.totals
        taken = self._taken(low, high, most, limit, resident)
        devices = high[:, at.sets].astype(int)
        # Whatever a group is worth in blocks, no way to give them out is worth more than the n
        # devices do that are worth most, each by its best option.
        possible = (devices > 0).all(1) & (low <= high).all(1)
        for price in PRICES:
            price *= first / options.groups[0, -1]
            worth = np.sort((taken + price * options.groups[0]).max(2), axis=1)
            possible &= worth[:, -self._n :].sum(1) * SLACK >= first + price * options.groups[0, -1]
        kept = np.flatnonzero(possible)
        found, chosen = self._distribute(taken[kept], devices[kept], np.full(len(kept), first))
        kept = kept[found]
        for i, total in enumerate(others, 1):
            offsets = self._t.mlps.offsets(high[kept][:, at.blocks])
            counts = self._t.mlps.rounded(np.maximum(taken[kept], 0).astype(int), offsets[..., None])
            own = np.where(np.isfinite(taken[kept]), counts[i], -np.inf)
            few = _of(own, chosen).sum(1) < total
            if few.any():
                found, better = self._distribute(
                    own[few], devices[kept[few]], np.full(few.sum(), total)
                )
                chosen[np.flatnonzero(few)[found]] = better
                keep = ~few
                keep[np.flatnonzero(few)[found]] = True
                kept, chosen = kept[keep], chosen[keep]
        possible = np.isin(np.arange(len(low)), kept)
        return possible, *self._give_out(taken[kept], chosen, low[kept], high[kept])

    def _distribute(
        self, worth: Floats, devices: np.ndarray, least: Floats
    ) -> tuple[np.ndarray, np.ndarray]:
        """`Sums.best` of boxes in which at most so many devices take part in sets, [N, sets]."""
        if not len(worth):
            return np.zeros(0, bool), np.zeros((0, worth.shape[1]), int)
        options, totals = self._options, self._t.mixers.totals
        bound = np.flatnonzero((devices.min(0) < self._n) & ~options.takes.all(1))
        most = np.array([self._n, *devices[:, bound].max(0), *totals])
        key = (*bound, -1, *most)
        if key not in self._sums:
            takes = options.takes[bound].T
            adds = np.column_stack((np.ones(len(takes), int), takes, options.groups.T))
            self._sums[key] = Sums(adds.astype(int), most)
        sums = self._sums[key]
        used, sets, groups = np.split(sums.states, (1, 1 + len(bound)), axis=1)
        ends = (used[:, 0] == self._n) & (groups == totals).all(1)
        return sums.best(worth, ends & (sets <= devices[:, None, bound]).all(2), least)

    def _taken(
        self, low: Floats, high: Floats, most: Floats, limit: float, resident: bool
    ) -> Floats:
        """The most blocks that a device can take beside each option, [N, R, O]; minus infinity
        where the device cannot have that."""
        at, options, grid = self._axes, self._options, self._t.mlps
        wide = (slice(None), None, None)
        offsets, x = grid.offsets(low[:, at.blocks]), self._exchanges
        out, (wires, *of_sets) = self._out(low, high), self._wires(low, high)
        left, all_of_them, limits = np.full((len(low), 1, 1), limit), 0.0, []
        for s, terms in enumerate(self._terms):
            own, least = terms.mixers[:, None], low[:, at.mixers[s]].T[..., None, None]
            longest = np.maximum(own, least).sum(0)
            out = out | (own > high[:, at.mixers[s]].T[..., None, None] * SLACK).any(0)
            fixed = terms.constant + x.least[wires, s] + x.of_sets(*of_sets, s)[0].sum(1)
            room = (most[:, s] - fixed)[wide] - longest
            others = low[:, at.mlps[s]].sum(1)[wide]
            vectors = terms.vectors[:, None]
            left = left - self._count[s] * (longest + vectors + fixed[wide])
            for units in terms.mlps.swapaxes(0, 1)[..., None]:  # [M, U, R, 1]
                limits.append((room - others, units[0]))
                limits.append((room - vectors, units.sum(0)))
                for i, one in enumerate(units[1:]):
                    head = vectors if i == len(units) - 2 else 0.0
                    limits.append((high[:, at.mlps[s]][:, i][wide] - head, one))
            all_of_them = all_of_them + self._count[s] * terms.mlps.sum(0)
        limits += [(left, units[..., None]) for units in all_of_them]
        limits = [(room * SLACK, units[:, None]) for room, units in limits]
        taken = grid.most(limits, offsets[..., None])
        taken = np.minimum(taken, self._memory.blocks(offsets, None if resident else most))
        least, most_blocks = self._ends(low, high)
        taken = np.minimum(taken, most_blocks)
        return np.where(out | (taken < least), -np.inf, taken)

    def _ends(self, low: Floats, high: Floats) -> tuple[np.ndarray, np.ndarray]:
        """The fewest and the most blocks with which a device has units of as many totals as an
        option says, [N, R, O]."""
        options, grid = self._options, self._t.mlps
        ends = (grid.offsets(each[:, self._axes.blocks]) for each in (low, high))
        least, most = options.bounds(grid, *ends)
        # Others need blocks, too, but for those that have groups.
        without = np.maximum(self._n - 1 - (options.groups[0, -1] - options.groups[0]), 0)
        return least, np.minimum(most, grid.totals[0] - without)

    def _out(self, low: Floats, high: Floats) -> np.ndarray:
        """Which options a device cannot have, for how groups are rounded, for a set of layers that
        every device takes part in, or for its host, [N, R, O]."""
        at, options, grid, x = self._axes, self._options, self._t.mixers, self._exchanges
        least, most = (grid.offsets(each[:, at.groups])[1:, ..., None] for each in (low, high))
        up, rest = options.up[:, None, None], options.rest[:, None, None]
        out = np.where(up, rest + most < grid.totals[0], (rest + least >= grid.totals[0]) & (rest > 0))
        all_of_them = (low[:, at.sets] == self._n)[..., None] & ~options.takes
        out = out.any(0) | all_of_them.any(1)[:, None]
        if x.several == 1:
            return out
        for place, takes in zip(range(at.size)[at.places], options.takes, strict=True):
            away = (high[:, place] < x.several) & (low[:, place] == high[:, place])
            out = out | (away[:, None] & (x.hosts != high[:, place, None]))[..., None] & takes
        away = high[:, at.place, None] < x.several
        return out | (away & (x.hosts != high[:, at.place, None]))[..., None]

    def _give_out(
        self, taken: Floats, chosen: np.ndarray, low: Floats, high: Floats
    ) -> tuple[np.ndarray, np.ndarray]:
        """Groups and blocks of every total, [U, N, R], of options [N, R] beside which so many
        fit."""
        grid, first = self._t.mlps, self._t.mlps.totals[0]
        used = chosen >= 0
        groups = np.where(used, self._options.groups[:, chosen], 0)
        most = np.where(used, _of(taken, chosen), 0).astype(int)
        least = np.where(used, _of(self._ends(low, high)[0], chosen), 0)
        blocks = in_proportion(least, most, first)
        for bounds in (high, low):  # with so many units of the next total, and blocks rounded to these
            for i, total in enumerate(grid.totals[1:2], 1):
                offset = grid.offsets(bounds[:, self._axes.blocks])
                units = grid.rounded(most, offset)[i]
                units = in_proportion(0 * units, units, np.minimum(units.sum(1), total))
                some = np.maximum(-(-(units * first - offset[i]) // total), least)
                ends = np.minimum(((units + 1) * first - 1 - offset[i]) // total, most)
                some = np.minimum(some, ends)
                fits = (some.sum(1) <= first) & (ends.sum(1) >= first) & (units.sum(1) == total)
                blocks = np.where(fits[:, None], in_proportion(some, ends, first), blocks)
        return groups, grid.rounded(blocks, grid.offsets(low[:, self._axes.blocks]))

    def _evaluate(self, groups: np.ndarray, blocks: np.ndarray) -> _Evaluated:
        """What cuts take, of groups and blocks of every total, [U, N, R]."""
        t, at, units = self._t, self._axes, (groups, blocks)
        groups, blocks = groups[0], blocks[0]
        used = (groups > 0) | (blocks > 0)
        has = [[own > 0 for own in each] for each in units]
        takes = np.array(
            [
                np.any([*(has[0][i] for i in each.mixers), *(has[1][i] for i in each.mlps)], axis=0)
                for each in t.sets
            ],
            bool,
        ).reshape(-1, *groups.shape)
        sent, resident, fits = self._memory.sent(*units, takes)
        links = t.link_seconds(sent)
        exchange, starts, places = self._exchanges.seconds(used, takes)
        parts = np.zeros((len(groups), at.size))
        compute = np.zeros_like(starts)
        for s, terms in enumerate(self._terms):
            mixers, mlps = terms.waits(*units, takes)
            parts[:, at.mixers[s]], parts[:, at.mlps[s]] = mixers.T, mlps[1:].T
            compute[s] = terms.constant + mixers.sum(0) + mlps.sum(0) + exchange[s]
        steps = np.maximum(np.maximum(compute, starts), links.max(2))
        parts[:, CHUNK] = steps[0]
        parts[:, at.groups] = t.mixers.thresholds(groups)
        parts[:, at.blocks] = t.mlps.thresholds(blocks)
        parts[:, at.sets], parts[:, at.places] = takes.sum(2).T, places.T
        seconds = np.where((fits | ~used).all(1), self._count @ steps, np.inf)
        held = np.asarray((resident | ~used).all(1))
        return _Evaluated(groups, blocks, held, compute, links, starts, seconds, parts)

    def _pieces(
        self, box: Box, least: Floats, taken: _Evaluated, cuts: _Evaluated, off: np.ndarray, i: int
    ) -> list[Box]:
        """The box in pieces, at thirds of the way from a least value to what was found in it, that
        which is worth most of the request, or by how units are rounded where that makes a larger
        gap between what was found and the cut; none where nothing is left to cut the box by."""
        gap = cuts.seconds[i] - np.nan_to_num(taken.seconds[i], posinf=0.0)
        parts, cut = taken.parts[i], cuts.parts[i]
        late = taken.starts[:, i] > np.maximum(taken.compute[:, i], taken.links[:, i].max(1))
        low, high = box
        at = self._axes
        worth = np.where(parts > high, 0.0, parts - least) * at.worth(self._count)
        worth[at.sets], worth[at.places] = self._exchanged(box, parts, late)
        worth = np.where(parts > high, 0.0, worth)
        for axis in range(at.size)[at.places]:  # one of some hosts, and devices are in several
            if low[axis] < high[axis] < parts[axis]:
                return _halves(box, axis, high[axis])
        axis = int(worth.argmax())
        if worth[axis] <= max(gap, 0.0):
            rounded = self._rounded(box, cut, off)
            if rounded or worth[axis] <= 0:
                return rounded
        found = []
        for part in (1 / 3, 2 / 3):
            below = above = least[axis] + part * (parts[axis] - least[axis])
            if axis in at.levels:
                steps = at.levels[axis]
                step = min(int(np.searchsorted(steps, below)), len(steps) - 1)
                below, above = steps[step - 1] if step else -1.0, steps[step]
            elif at.sets.start <= axis < at.places.stop:
                below, above = parts[axis] - 1, parts[axis]
                if part > 0.5 and axis >= at.places.start:
                    below, above = parts[axis], parts[axis] + 1
            if below >= low[axis]:
                most = high.copy()
                most[axis] = below
                found.append((low, most))
            low = low.copy()
            low[axis] = max(above, low[axis])
        return [*found, (low, high)] if low[axis] <= high[axis] else found

    def _exchanged(self, box: Box, parts: Floats, late: np.ndarray) -> tuple[Floats, Floats]:
        """What exchanges of each set, or programs where the host thread is `late` [2], take in what
        was found in a box, more than with the fewest devices, and more than in the place that is
        fastest for as many."""
        (low, high), at, x = box, self._axes, self._exchanges
        sets = np.minimum(parts[at.sets].astype(int), self._n)[None]
        own = np.where(parts[at.places] < x.several, 0, 1)[None]
        _, wires, fewest = self._wires(low[None], high[None])
        seconds = [
            [x.of_sets(*each, s)[int(late[s])][0] for s in range(2)]
            for each in ((wires, fewest), (wires, sets), (own, sets))
        ]
        least, place, cut = (self._count @ np.array(each) for each in seconds)
        return place - least, cut - place

    def _rounded(self, box: Box, parts: Floats, off: np.ndarray) -> list[Box]:
        """The box in two, at the threshold by which most units of a cut are rounded otherwise, or
        in the middle of its bounds; none where there is one threshold."""
        at, (low, high) = self._axes, box
        axes = [*range(at.size)[at.groups], *range(at.size)[at.blocks]]
        wide = [(n, high[axis] - low[axis], axis) for n, axis in zip(off, axes, strict=True)]
        wide = [each for each in wide if each[1] > 0]
        if not wide:
            return []
        axis = max(wide)[2]
        edge = parts[axis]
        if not low[axis] < edge <= high[axis]:
            edge = low[axis] + 1 if edge == low[axis] else (low[axis] + high[axis] + 1) // 2
        return _halves(box, axis, edge)

    def _cut(self, cuts: _Evaluated, i: int) -> Cut:
        shares = tuple(map(int, cuts.blocks[i])), tuple(map(int, cuts.groups[i]))
        places = (*shares, bool(cuts.resident[i]))
        took = cuts.compute[:, i], cuts.links[:, i], cuts.starts[:, i]
        return self._t.cut(places, *took, "computing and exchanges")


class _Axes:
    """Which of a box's bounds are of what: of each kind of step a slice of terms of mixers and of
    MLPs but the heaviest, slices of thresholds of groups and of blocks, of how many devices sets
    have and of where these are, and where all are."""

    def __init__(self, parts: TensorParts):
        t, self.size = parts.tables, 1
        self.mixers = [self._next(len(terms.mixers)) for terms in parts.terms]
        self.mlps = [self._next(len(terms.mlps) - 1) for terms in parts.terms]
        self.groups = self._next(len(t.mixers.totals) - 1)
        self.blocks = self._next(len(t.mlps.totals) - 1)
        self.sets = self._next(len(t.sets))
        self.places = self._next(len(t.sets))
        self.place = self.size
        self.size += 1
        # Of terms of mixers: all values there are.
        terms = {
            axis: own
            for at, each in zip(self.mixers, parts.terms, strict=True)
            for axis, own in zip(range(at.start, at.stop), each.mixers, strict=True)
        }
        self.levels = {axis: np.unique(own) for axis, own in terms.items()}
        # Some device has what the slowest of a term takes at least, so another term takes at least
        # what the fastest such device does.
        self.implied = {(a, b): _implied(terms[a], terms[b]) for a in terms for b in terms if a != b}

        # Sets whose devices have groups or units of some totals: others have neither, but blocks.
        self.partial = [
            (self.sets.start + c, t.mlps.totals[u], self.blocks.start + u - 1)
            for c, each in enumerate(t.sets)
            if 0 in each.mixers
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


class _Evaluated(NamedTuple):
    """Some cuts: groups and blocks, [N, R]; whether all cache stays, [N]; seconds of computing,
    of links and of the host thread, [2, N] and [2, N, R], and of the request, [N], infinite where a
    cut does not fit; and that of which boxes have bounds, [N, axes]."""

    groups: np.ndarray
    blocks: np.ndarray
    resident: np.ndarray
    compute: Floats
    links: Floats
    starts: Floats
    seconds: Floats
    parts: Floats


def _halves(box: Box, axis: int, edge: float) -> list[Box]:
    """A box in two, below a whole number and from there on."""
    below, above = box[1].copy(), box[0].copy()
    below[axis], above[axis] = edge - 1, edge
    return [(box[0], below), (above, box[1])]


def _of(values: Floats, chosen: np.ndarray) -> Floats:
    """Of the options that devices have, [N, R], 0 for no part."""
    own = np.take_along_axis(values, np.maximum(chosen, 0)[..., None], axis=2)[..., 0]
    return np.where(chosen >= 0, own, 0)


def _implied(one: Floats, other: Floats) -> tuple[Floats, Floats]:
    """Values of one term, and the least of another where the one is at least that."""
    order = np.argsort(one, axis=None)
    least = np.minimum.accumulate(other.ravel()[order][::-1])[::-1]
    return one.ravel()[order], least
