"""Cuts of every layer over a number of devices: KV groups and MLP blocks a device.

Exact over whole KV groups and whole blocks, where layers are alike, have one number of KV groups,
and groups of recurrent states are a multiple of it (in a model without attention they are counted
instead). A step takes at least A + B + H + exchanges, A the longest attention of a device, B the
longest MLP and H the longest part of the head, and at least as long as every link and as the host
thread; a request takes so many steps of two kinds, chunks of its prompt and decode steps.

Whether any cut keeps a limit of a request's seconds is found by branch and bound. A box has bounds
of the chunk's seconds and of A and H of both kinds. In a box the seconds of both steps are bounded,
so for each number of groups that a device may take, the blocks beside them are: by what is left of
each step and of the request, and by the memory beside the groups' weights, rings and as much of
their cache as must stay for the link to keep up. The box has a cut that keeps these bounds exactly
when `sharding.fit_distribute` finds one. If that cut does not keep the limit, the box is cut where
what the cut takes is furthest from the least that the box has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sharding.fit_distribute import distribute
from sharding.fit_memory import TensorMemory
from sharding.fit_tables import Cut, Floats, Stage, Tables

SLACK = 1 + 1e-9  # of comparisons of seconds
CLOSE = 4e-6  # a cut keeps a limit to this part
PRICES = 0.0, 1e3, 1.0, 0.4, 2.5, 0.15, 6.0  # of a group, in its even part of the blocks
WIDE = 64  # boxes that are looked at together
TINY = 1e-30

CHUNK, ATTN, HEAD = 0, 1, 3  # what a box has bounds of; A and H of both kinds of steps
Box = tuple[Floats, Floats]  # least and most


class TensorCuts:
    """The cuts of one set of tables over `n` devices. All cuts are in one of the `boxes`, which
    grow smaller by what is asked; those of tables with the same seconds may be given."""

    def __init__(self, tables: Tables, n: int, boxes: Sequence[Box] | None = None):
        t = self._t = tables
        self._n = n
        shapes = t.model.layers
        self.groups = t.most_groups
        self.blocks = max(s.mlp // max(32, s.mlp_block) for s in shapes)
        self._memory = TensorMemory(t, self.blocks, n)
        self._count = np.array([stage.count for stage in t.stages])
        self._rates = [_Rates(stage, self, t) for stage in t.stages]
        exchanges = 1 + sum(s.exchanges for s in shapes)
        one = (t.mesh.fabric.exchange_seconds(range(n), s.payload, False) for s in t.stages)
        fixed = zip(one, self._rates, strict=True)
        self._fixed = np.array([exchanges * x + r.constant for x, r in fixed])
        # The least seconds by devices with attention, [2, n + 1], and those of blocks, [2].
        counts = range(n + 1)
        self._attention = np.array(
            [[_evenly(r.groups[:, -1], max(1, m)) for m in counts] for r in self._rates]
        )
        blocks = [self.blocks * (r.block + r.head)[:, 0] for r in self._rates]
        self._least_blocks = np.array([_evenly(each, n) for each in blocks])
        heads = [_evenly(self.blocks * r.head[:, 0], n) for r in self._rates]
        everything = np.array([0.0, 0.0, 0.0, *heads]), np.full(5, np.inf)
        self.boxes = [everything] if boxes is None else list(boxes)

    def within(self, limit: float, resident: bool = False) -> Cut | None:
        """A cut whose request takes no more seconds than `limit`, but for a millionth part or so;
        None where there is none. `resident`: all of the cache stays on the devices."""
        if not self.groups or not self.blocks:
            return None
        todo, done = self.boxes, []
        while todo:
            boxes, todo = todo[:WIDE], todo[WIDE:]
            low, high = (np.array(each) for each in zip(*boxes, strict=True))
            low, most, workers = self._bounds(low, high, limit)
            possible, groups, blocks = self._fill(low, high, most, workers, limit, resident)
            done += [box for box, may in zip(boxes, possible, strict=True) if not may]
            boxes = [box for box, may in zip(boxes, possible, strict=True) if may]
            if not boxes:
                continue
            cuts = self._evaluate(groups, blocks)
            best = int(cuts.seconds.argmin())
            if cuts.seconds[best] <= limit * (1 + CLOSE):
                self.boxes = done + boxes + todo
                return self._cut(cuts, best)
            for box, least, parts in zip(boxes, low[possible], cuts.parts, strict=True):
                pieces = self._pieces(box, least, parts)
                todo += pieces
                done += [] if pieces else [box]
        self.boxes = done
        return None

    def _bounds(self, low: Floats, high: Floats, limit: float) -> tuple[Floats, Floats, np.ndarray]:
        """What follows for boxes from a limit of the request's seconds: least values, [N, 5]; most
        seconds of a step of each kind, [N, 2]; most devices with attention, for the host thread to
        keep these, [N]."""
        t, low, most = self._t, low.copy(), np.empty((len(low), 2))
        workers = np.full(len(low), self._n)
        for _ in range(2):  # fewer devices with attention take longer, which may leave fewer
            attention = self._attention[:, workers].T  # [N, 2]
            low[:, ATTN : ATTN + 2] = np.maximum(low[:, ATTN : ATTN + 2], attention)
            least = self._fixed + low[:, ATTN : ATTN + 2] + self._least_blocks
            least[:, 0] = low[:, CHUNK] = np.maximum(low[:, CHUNK], least[:, 0])
            most = (limit - least[:, ::-1] * self._count[::-1]) / self._count
            most[:, 0] = np.minimum(most[:, 0], high[:, CHUNK])
            for s, stage in enumerate(t.stages):
                none, one = (t.dispatch(stage, self._n, m, 2 * self._n) for m in (0, 1))
                left = np.floor((most[:, s] * SLACK - none) / max(one - none, TINY) + 1e-9)
                workers = np.clip(left, 0, workers).astype(int)
        return low, most, workers

    def _fill(
        self,
        low: Floats,
        high: Floats,
        most: Floats,
        workers: np.ndarray,
        limit: float,
        resident: bool,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Which boxes may have a cut that keeps the limit, [N], and of those a cut that keeps their
        bounds, as groups and blocks, [boxes that may, R]."""
        taken = self._taken(low, high, most, limit, resident)
        # Whatever a group is worth in blocks, no way to give them out is worth more than the n
        # devices do that are worth most, each by its best number of groups.
        possible, numbers = workers > 0, np.arange(self.groups + 1)
        for price in PRICES:
            price *= self.blocks / self.groups
            worth = np.sort((taken + price * numbers).max(2), axis=1)[:, -self._n :].sum(1)
            possible &= worth * SLACK >= self.blocks + price * self.groups
        chosen = np.flatnonzero(possible)
        if not len(chosen):
            none = np.zeros((0, taken.shape[1]), int)
            return possible, none, none
        bound = workers[chosen] if workers.min() < min(self._n, self.groups) else None
        found, groups, blocks = distribute(taken[chosen], self._n, self.blocks, bound)
        possible[chosen[~found]] = False
        return possible, groups, blocks

    def _taken(
        self, low: Floats, high: Floats, most: Floats, limit: float, resident: bool
    ) -> Floats:
        """Blocks that a device can take beside each number of groups, [N, R, K + 1]."""
        wide = (slice(None), None, None)
        taken = self._memory.resident[None] if resident else self._memory.blocks(most)
        left, each, late = np.full((len(low), 1, 1), limit), TINY, np.zeros(1, bool)
        for s, rates in enumerate(self._rates):
            longest = np.maximum(rates.groups, low[:, ATTN + s][wide])
            left = left - self._count[s] * (longest + rates.vectors + self._fixed[s])
            each = each + self._count[s] * (rates.block + rates.head)
            room = (most[:, s] - self._fixed[s])[wide] - longest
            head = low[:, HEAD + s][wide]
            for part, per in (
                (room - head, rates.block),
                (room - rates.vectors, rates.block + rates.head),
                (high[:, HEAD + s][wide] - rates.vectors, rates.head),
            ):
                taken = np.minimum(taken, np.floor(part * SLACK / per + 1e-9))
            late = late | (rates.groups > high[:, ATTN + s][wide] * SLACK)
        taken = np.minimum(taken, np.floor(left * SLACK / each + 1e-9))
        none = (np.arange(self.groups + 1) == 0) & (taken < 1)  # the device would take no part
        return np.where(late | none | (taken < 0), -np.inf, np.minimum(taken, self.blocks))

    def _pieces(self, box: Box, least: Floats, parts: Floats) -> list[Box]:
        """The box in pieces, at thirds of the way from a least value to what a cut has of it, that
        which is worth most of the request; none where the cut has no more than the least of all."""
        low, high = box
        worth = np.where(parts > high, 0.0, parts - least) * self._count[[0, 0, 1, 0, 1]]
        axis = int(worth.argmax())
        if worth[axis] <= 0:
            return []
        found = []
        for part in (1 / 3, 2 / 3):
            below = above = least[axis] + part * (parts[axis] - least[axis])
            if axis in (ATTN, ATTN + 1):
                steps = self._rates[axis - ATTN].steps
                at = int(np.searchsorted(steps, below))
                below, above = steps[at - 1] if at else -1.0, steps[at]
            if below >= low[axis]:
                most = high.copy()
                most[axis] = below
                found.append((low, most))
            low = low.copy()
            low[axis] = max(above, low[axis])
        return [*found, (low, high)]

    def _evaluate(self, groups: np.ndarray, blocks: np.ndarray) -> _Evaluated:
        """What cuts take, of groups and blocks [N, R]."""
        t = self._t
        sent, resident = self._memory.sent(groups, blocks)
        links = t.link_seconds(sent)
        compute, starts = np.zeros((2, 2, len(groups)))
        parts = np.zeros((len(groups), 5))
        workers = (groups > 0).sum(1)
        for s, (stage, rates) in enumerate(zip(t.stages, self._rates, strict=True)):
            heads = np.where(blocks > 0, rates.vectors[:, 0] + blocks * rates.head[:, 0], 0.0)
            attention = np.take_along_axis(rates.groups.T, groups, axis=0).max(1)
            parts[:, ATTN + s], parts[:, HEAD + s] = attention, heads.max(1)
            longest = (blocks * rates.block[:, 0]).max(1)
            compute[s] = attention + longest + parts[:, HEAD + s] + self._fixed[s]
            starts[s] = t.dispatch(stage, self._n, workers, 2 * self._n)
        steps = np.maximum(np.maximum(compute, starts), links.max(2))
        parts[:, CHUNK] = steps[0]
        seconds = self._count @ steps
        resident = np.asarray(resident.all(1))
        return _Evaluated(groups, blocks, resident, compute, links, starts, seconds, parts)

    def _cut(self, cuts: _Evaluated, i: int) -> Cut:
        shares = tuple(map(int, cuts.blocks[i])), tuple(map(int, cuts.groups[i]))
        places = (*shares, bool(cuts.resident[i]))
        took = cuts.compute[:, i], cuts.links[:, i], cuts.starts[:, i]
        return self._t.cut(places, *took, "computing and exchanges")


class _Evaluated(NamedTuple):
    """Some cuts: groups and blocks, [N, R]; whether all cache stays, [N]; seconds of computing,
    of links and of the host thread, [2, N] and [2, N, R], and of the request, [N]; and that of
    which boxes have bounds, [N, 5]."""

    groups: np.ndarray
    blocks: np.ndarray
    resident: np.ndarray
    compute: Floats
    links: Floats
    starts: Floats
    seconds: Floats
    parts: Floats


class _Rates:
    """Seconds of every device for one kind of step: with a number of groups, [R, K + 1], and for a
    block, of its MLP and of the head, [R, 1]; `constant` where devices take turns, whose sum is the
    same for every cut."""

    def __init__(self, stage: Stage, cuts: TensorCuts, tables: Tables):
        mlp, head = stage.mlp.sum(0), stage.head - stage.vectors
        self.constant, self.groups, self.vectors = 0.0, stage.groups, stage.vectors[:, None]
        if tables.mesh.fabric.shared:
            self.constant = float((stage.groups[:, -1] + mlp + stage.head).min())
            self.groups, self.vectors = np.zeros_like(self.groups), np.zeros_like(self.vectors)
            mlp, head = np.zeros_like(mlp), np.zeros_like(head)
        # Never 0, as these are divided by.
        self.block, self.head = (np.maximum(x / cuts.blocks, TINY)[:, None] for x in (mlp, head))
        self.steps = np.unique(self.groups)


def _evenly(seconds: Floats, n: int) -> float:
    """What the n fastest take together for what takes each of them so many seconds."""
    fastest = np.sort(seconds)[:n]
    return float(1 / (1 / fastest).sum()) if fastest.all() else 0.0
