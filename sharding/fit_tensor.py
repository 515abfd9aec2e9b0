"""Cuts of every layer over a number of devices: KV groups and MLP blocks a device.

Exact over whole KV groups, as any attention shares round them in layers that differ in these, and
over whole blocks of the layers that have most. A step takes the sum of its terms, which wait for
their slowest device each (`sharding.fit_terms`), and of exchanges, which depend on the devices of a
layer; and at least as long as every link and as the host thread. A request takes so many steps of
two kinds, chunks of its prompt and decode steps.

Whether any cut keeps a limit of a request's seconds is found by branch and bound. A box has bounds
of the chunk's seconds; of all terms of both kinds of steps but the heaviest of MLPs; of the cells
that say which groups one vector of shares gives in unlike layers (`sharding.fit_joint`); of the
thresholds by which fewer blocks are rounded (`sharding.fit_units`), and then of each device's
blocks; of how many devices take part in layers that some may have no part of; and of which host
these are in, and all are in, if they are in one (`sharding.fit_boxes`). In a box the seconds of
both steps are bounded, so for each option of groups that a device may take, the blocks beside them
are: by what is left of each step and of the request, and by the memory beside the groups' weights,
rings and as much of their cache as must stay for the link to keep up. `sharding.fit_distribute`
finds a cut that keeps these bounds, or that there is none. If that cut does not keep the limit, the
box is cut where what the cut takes is furthest from the least that the box has.

Bounds never leave out a cut that keeps the limit, so a box without one is not looked at for smaller
limits. Less prefetch leaves more memory and changes no seconds: what has no cut with less has none
with more, and both have the same boxes. In a box that nothing is left to be cut by, and
when a search has looked at many boxes, the answer is that none was found, without the proof.
"""

from __future__ import annotations

from functools import cached_property
from itertools import product
from typing import NamedTuple

import numpy as np

from sharding.fit_boxes import CHUNK, SLACK, Box, Boxes, Evaluated
from sharding.fit_distribute import Distribution, in_proportion
from sharding.fit_sums import of
from sharding.fit_tables import Cut, Floats
from sharding.fit_terms import TensorParts

CLOSE = 4e-6  # a cut keeps a limit to this part
WIDE = 64  # boxes that are looked at together
FEW = 32  # boxes that hardly take longer together than one does
MOST_PIECES = 8
MOST_BOXES = 4096  # of one question
BOX_STEPS = 8e4  # of a dynamic program, that take as long as what else a box takes


class Answer(NamedTuple):
    """A cut, or none; `proved`: where there is none, that there cannot be one."""

    cut: Cut | None
    proved: bool = True


class Limits(NamedTuple):
    """Of seconds, in boxes: L rooms [L, N, R, O], what a block of each total takes of these, [L, U,
    1, R, 1], and which options devices cannot have, [N, 1 or R, O]."""

    rooms: Floats
    units: Floats
    out: np.ndarray


class TensorCuts:
    """The cuts of one set of tables over `n` devices; `leaner` are those of tables with the same
    seconds and no more groups in flight, which every cut fits if it does here. All cuts are in one
    of the `boxes`, which grow smaller by what is asked."""

    def __init__(self, parts: TensorParts, n: int, leaner: TensorCuts | None = None):
        t, self._effort = parts.tables, parts.effort
        self._t = t
        self._n, self._options, self._terms = n, parts.options, parts.terms
        self._memory = parts.memory.over(n)
        self._space = Boxes(parts, n)
        self._count = np.array([stage.count for stage in t.stages])
        self._groups = Distribution(parts.options, t.mixers, n, parts.effort)
        self._leaner = leaner
        self.boxes: list[Box] = self._space.all() if leaner is None else leaner.boxes
        self._none = [0.0, 0.0]  # seconds that no cut keeps, and none whose cache stays
        self._open: dict[tuple[float, bool], int] = {}  # questions without an answer, and looks
        # Of both kinds of steps together: what blocks take.
        each = zip(self._count, self._terms, strict=True)
        self._all_mlps = sum((n * terms.mlps.sum(0) for n, terms in each), np.zeros(()))
        leading = self._options.groups[list(t.mixers.leading)]
        self._without = np.maximum(n - 1 - (leading[:, -1:] - leading).sum(0), 0)

    def within(self, limit: float, resident: bool = False, looks: int = MOST_BOXES) -> Answer:
        """A cut whose request takes no more seconds than `limit`, but for a millionth part or so.
        `resident`: all of the cache stays on the devices; `looks`: after so many boxes none is cut
        into more."""
        if limit <= self._none[resident]:
            return Answer(None)
        asked = self._open.get((limit, resident))
        if asked is not None and asked >= looks:
            return Answer(None, False)
        if self._leaner is None:
            answer = self._search(limit, resident, looks)
        else:
            answer = self._leaner.within(limit, resident, looks)
            if answer.cut is not None:
                cut = self._same(answer.cut, limit, resident)
                answer = self._search(limit, resident, looks) if cut is None else Answer(cut)
        if answer.cut is None and answer.proved:
            self._none[resident] = max(limit, self._none[resident])
        elif answer.cut is None:
            self._open[limit, resident] = looks
        return answer

    def _same(self, cut: Cut, limit: float, resident: bool) -> Cut | None:
        """A cut of the leaner tables, if it keeps a limit here, too."""
        groups, blocks = np.array(cut.groups)[:, None], np.array([cut.shares])
        cuts = self._evaluate(groups, self._t.mlps.counts(blocks))
        return self._keeping(cuts, limit, resident)

    def _search(self, limit: float, resident: bool, looks: int) -> Answer:
        """A cut in one of the boxes."""
        todo = [box for box in self.boxes if box.none < limit]
        done, proved = [box for box in self.boxes if box.none >= limit], True
        every = self._leaner is None and not resident  # cuts there are
        while todo:
            boxes, todo = todo[:WIDE], todo[WIDE:]
            looks -= len(boxes)
            self._effort.left -= BOX_STEPS * len(boxes)
            low, high, _ = (np.array(each) for each in zip(*boxes, strict=True))
            low, high, most = self._space.bounds(low, high, limit)
            possible, groups, blocks = self._fill(low, high, most, limit, resident)
            out = [box for box, may in zip(boxes, possible, strict=True) if not may]
            done += [box._replace(none=limit) for box in out] if every else out
            boxes = [box for box, may in zip(boxes, possible, strict=True) if may]
            if not boxes:
                continue
            first, last = self._t.mixers.cells_of(groups)
            apart, rounded = np.maximum(first - last, 0), self._t.mlps.counts(blocks[0])
            none = (apart[..., None] > 0).any(0)  # no shares give these groups
            right = np.where(none, self._t.mixers.counts(groups[0]), groups)
            # Cells apart, and units that are rounded otherwise, of each threshold.
            off = np.concatenate((apart, abs(rounded - blocks)[1:].sum(2)))
            if off.any():
                both = (
                    np.concatenate(each, axis=1) for each in ((right, groups), (rounded, blocks))
                )
                cuts, taken = Evaluated.halves(self._evaluate(*both))
            else:
                cuts = taken = self._evaluate(right, rounded)
            cut = self._keeping(cuts, limit, resident)
            if cut is not None:
                self.boxes[:] = done + boxes + todo
                return Answer(cut)
            exchanged = self._space.exchanged(boxes, taken)
            many = min(max(2, FEW // (len(boxes) + len(todo))), MOST_PIECES)
            for i, (box, least) in enumerate(zip(boxes, low[possible], strict=True)):
                pieces = []
                if min(looks, self._effort.left) > 0:
                    found = taken, cuts, exchanged, off[:, i]
                    pieces = self._space.pieces(box, least, *found, i, many)
                todo += pieces
                done += [] if pieces else [box]
                proved &= bool(pieces)
        self.boxes[:] = done
        return Answer(None, proved)

    def _fill(
        self, low: Floats, high: Floats, most: Floats, limit: float, resident: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Which boxes may have a cut that keeps the limit, [N], and of those a cut that keeps their
        bounds but perhaps for rounding, as groups and blocks of every total, [U, boxes that may,
        R]."""
        at, grid = self._space.axes, self._t.mlps
        first, *others = grid.totals
        offsets = grid.offsets(low[:, at.blocks]), grid.offsets(high[:, at.blocks])
        ends, devices = self._same_ends, high[:, at.sets].astype(int)
        possible = (devices > 0).all(1) & (low <= high).all(1)
        if others:
            ends = self._ends(*offsets)
            few, many = (each[:, at.own].astype(int) for each in (low, high))
            both = zip((few, many), offsets, strict=True)
            least, largest = (grid.rounded(own, each).sum(2).T for own, each in both)
            possible &= ((least <= grid.totals) & (largest >= grid.totals)).all(1)
            ends = np.maximum(ends[0], few[..., None]), np.minimum(ends[1], many[..., None])
        limits = self._limits(low, high, most, limit), None if resident else most
        taken, *less = self._taken(*limits, ends, offsets, devices)
        kept = np.flatnonzero(possible)
        found, chosen = self._groups.best(taken[kept], devices[kept], np.full(len(kept), first))
        kept = kept[found]
        for own, total in zip(less, others, strict=True):
            own = own[kept]
            few = of(own, chosen).sum(1) < total
            if few.any():
                found, better = self._groups.best(
                    own[few], devices[kept[few]], np.full(few.sum(), total)
                )
                chosen[np.flatnonzero(few)[found]] = better
                keep = ~few
                keep[np.flatnonzero(few)[found]] = True
                kept, chosen = kept[keep], chosen[keep]
        possible = np.zeros_like(possible)
        possible[kept] = True
        least = np.broadcast_to(ends[0], taken.shape)[kept]
        fewer, more = (each[:, kept] for each in offsets)
        return possible, *self._give_out(chosen, least, taken[kept], (fewer, more))

    def _taken(
        self,
        limits: Limits,
        most: Floats | None,
        ends: tuple[np.ndarray, np.ndarray],
        offsets: tuple[np.ndarray, np.ndarray],
        devices: np.ndarray,
    ) -> Floats:
        """The most blocks of every total that a device can take beside each option, [U, N, R, O];
        minus infinity where the device cannot have that. `most` seconds of a step of each kind,
        None where all of the cache stays; `ends` as of `_ends`, for `offsets` between two; at most
        so many `devices` [N, sets] take part in sets."""
        grid, (least, most_blocks) = self._t.mlps, ends
        fewer, more = (each[..., None] for each in offsets)
        within = np.where(limits.out | (most_blocks < least), -1.0, most_blocks)
        taken = grid.most(limits.rooms, limits.units, fewer, more, within)
        taken = np.minimum(taken, self._memory.blocks(*offsets, most, taken[0], devices == 1))
        if len(taken) > 1:
            most_units = grid.rounded(np.maximum(taken[0], 0).astype(int), more)
            taken = np.minimum(taken, np.where(self._options.may_have, most_units, 0))
        return np.where((taken[0] < 0) | (taken[0] < least), -np.inf, taken)

    def _limits(self, low: Floats, high: Floats, most: Floats, limit: float) -> Limits:
        """Those of seconds."""
        at, x = self._space.axes, self._space.exchanges
        wide = (slice(None), None, None)
        out = self._out(low, high)
        wires, set_wires, sets = self._space.wires(low, high)
        left, limits = np.full((len(low), 1, 1), limit), []
        for s, terms in enumerate(self._terms):
            own, least = terms.mixers[:, None], low[:, at.mixers[s]].T[..., None, None]
            longest = np.maximum(own, least).sum(0)
            out = out | (own > high[:, at.mixers[s]].T[..., None, None] * SLACK).any(0)
            fixed = terms.constant + x.least[wires, s] + x.of_sets(set_wires, sets, s)[0].sum(1)
            room = (most[:, s] - fixed)[wide] - longest
            others = low[:, at.mlps[s]].sum(1)[wide]
            vectors = terms.vectors[:, None]
            left = left - self._count[s] * (longest + vectors + fixed[wide])
            for units in terms.mlps.swapaxes(0, 1)[..., None]:  # [M, U, R, 1]
                limits.append((room - others, units[0]))
                limits.append((room - vectors, units.sum(0)))
                for i, one in enumerate(units[1:]):
                    bound = high[:, at.mlps[s]][:, i][wide]
                    if np.isfinite(bound).any():
                        limits.append((bound - (vectors if i == len(units) - 2 else 0.0), one))
        limits += [(left, units[..., None]) for units in self._all_mlps]
        rooms, units = zip(*limits, strict=True)
        rooms = np.array(np.broadcast_arrays(*rooms)) * SLACK
        return Limits(rooms, np.array(units)[:, :, None], out)

    @cached_property
    def _same_ends(self) -> tuple[np.ndarray, np.ndarray]:
        """Those of blocks that all follow one total, in every box."""
        none = np.zeros((1, 1, len(self._t.cap)), int)
        return self._ends(none, none)

    def _ends(self, least: np.ndarray, most: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The fewest and the most blocks with which a device has units of as many totals as an
        option says, [N, R, O], for offsets between two, [U, N, R]."""
        few, many = self._options.bounds(self._t.mlps, least, most)
        # Others need blocks, too, but for those that have groups.
        return few, np.minimum(many, self._t.mlps.totals[0] - self._without)

    def _out(self, low: Floats, high: Floats) -> np.ndarray:
        """Which options a device cannot have, for cells of distances, for a set of layers that
        every device takes part in, or for its host, [N, 1 or R, O]."""
        at, options, x = self._space.axes, self._options, self._space.exchanges
        least, most = (each[:, at.groups, None] for each in (low, high))
        out = ((options.first > most) | (options.last < least)).any(1)
        all_of_them = (low[:, at.sets] == self._n)[..., None] & ~options.takes
        out = (out | all_of_them.any(1))[:, None]
        if x.several == 1:
            return out
        for place, takes in zip(range(at.size)[at.places], options.takes, strict=True):
            away = (high[:, place] < x.several) & (low[:, place] == high[:, place])
            out = out | (away[:, None] & (x.hosts != high[:, place, None]))[..., None] & takes
        away = high[:, at.place, None] < x.several
        return out | (away & (x.hosts != high[:, at.place, None]))[..., None]

    def _give_out(
        self,
        chosen: np.ndarray,
        least: np.ndarray,
        taken: Floats,
        offsets: tuple[np.ndarray, np.ndarray],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Groups and blocks of every total, [U, N, R], of options [N, R] beside which at least and
        at most so many fit, [N, R, O]."""
        grid, first = self._t.mlps, self._t.mlps.totals[0]
        used, (fewer, more) = chosen >= 0, offsets
        groups = np.where(used, self._options.groups[:, chosen], 0)
        most, least = (of(each, chosen).astype(int) for each in (taken, least))
        blocks = in_proportion(least, most, first)
        # With so many units of the next total, if there is one, and blocks rounded to these.
        pairs = product(grid.others[:1], (more, fewer))
        for (total, part, whole), own in pairs:
            units = grid.rounded(most, own)[1]
            units = in_proportion(0 * units, units, np.minimum(units.sum(1), total))
            some = np.maximum(-(-(units * whole - own[1]) // part), least)
            ends = np.minimum(((units + 1) * whole - 1 - own[1]) // part, most)
            some = np.minimum(some, ends)
            fits = (some.sum(1) <= first) & (ends.sum(1) >= first) & (units.sum(1) == total)
            blocks = np.where(fits[:, None], in_proportion(some, ends, first), blocks)
        return groups, grid.rounded(blocks, fewer)

    def _evaluate(self, groups: np.ndarray, blocks: np.ndarray) -> Evaluated:
        """What cuts take, of groups and blocks of every total, [U, N, R]."""
        t, at, units = self._t, self._space.axes, (groups, blocks)
        blocks = blocks[0]
        used = groups.any(0) | (blocks > 0)
        has = [[own > 0 for own in each] for each in units]
        takes = np.array(
            [
                np.any([*(has[0][i] for i in each.mixers), *(has[1][i] for i in each.mlps)], axis=0)
                for each in t.sets
            ],
            bool,
        ).reshape(-1, *blocks.shape)
        sent, resident, fits = self._memory.sent(*units, takes)
        links = t.link_seconds(sent)
        exchange, starts, places = self._space.exchanges.seconds(used, takes)
        parts = np.zeros((len(blocks), at.size))
        compute = np.zeros_like(starts)
        for s, terms in enumerate(self._terms):
            mixers, mlps = terms.waits(*units, takes)
            parts[:, at.mixers[s]], parts[:, at.mlps[s]] = mixers.T, mlps[1:].T
            compute[s] = terms.constant + mixers.sum(0) + mlps.sum(0) + exchange[s]
        steps = np.maximum(np.maximum(compute, starts), links.max(2))
        parts[:, CHUNK] = steps[0]
        parts[:, at.groups] = t.mixers.cells_of(groups)[0].T
        parts[:, at.blocks] = t.mlps.thresholds(blocks)
        if len(t.mlps.totals) > 1:
            parts[:, at.own] = blocks
        parts[:, at.sets], parts[:, at.places] = takes.sum(2).T, places.T
        right = (fits | ~used).all(1) & (used.sum(1) == self._n)
        right &= blocks.sum(1) == t.mlps.totals[0]
        right &= (groups.sum(2).T == t.mixers.totals).all(1)
        seconds = np.where(right, self._count @ steps, np.inf)
        held = np.asarray((resident | ~used).all(1))
        return Evaluated(groups, blocks, held, compute, links, starts, seconds, parts)

    def _keeping(self, cuts: Evaluated, limit: float, resident: bool) -> Cut | None:
        """The fastest, if it fits and keeps a limit."""
        i = int(cuts.seconds.argmin())
        late = not np.isfinite(cuts.seconds[i]) or cuts.seconds[i] > limit * (1 + CLOSE)
        if late or (resident and not cuts.resident[i]):
            return None
        groups = tuple(tuple(map(int, own)) for own in cuts.groups[:, i])
        places = tuple(map(int, cuts.blocks[i])), groups, bool(cuts.resident[i])
        took = cuts.compute[:, i], cuts.links[:, i], cuts.starts[:, i]
        return self._t.cut(places, *took, "computing and exchanges")
