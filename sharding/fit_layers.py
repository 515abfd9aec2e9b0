"""Cuts of whole layers over devices in their order.

Exact: the time of a step is the larger of every link's time, the host thread's, and the sum of the
devices' turns, and a turn depends on the device and on the first and last of its layers alone. A
request takes so many steps of two kinds, chunks of its prompt and decode steps. Whether any cut
keeps a limit of the request's seconds is found by halving what a chunk may take: with both ends of
that, the seconds of both steps are bounded, so spans of layers whose links need longer are out, and
the shortest path through the others, device by device, tells whether the turns can be kept, too.
Where shortest paths by several weights of both kinds do not tell, all paths are looked at that are
no worse in both than another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from sharding.fit_cache import Cache
from sharding.fit_probe import FOLLOWED
from sharding.fit_tables import Cut, Floats, Stage, Tables

CLOSE = 4e-6  # a cut keeps a limit to this part
SLACK = 1 + 1e-9  # of comparisons of seconds
TRIES = 6  # weights of both kinds of steps, each halving what may tell most
CHUNK, STEP = np.array([1.0, 0.0]), np.array([0.0, 1.0])  # weights of both kinds of steps
Stops = tuple[int, ...]  # by device, where its layers end


class _Anywhere:
    """Of layers i to j - 1 on any device, [L + 1, L + 1] at (i, j): whether there are any, whether
    they are the last, bytes of all but their cache, and that."""

    def __init__(self, tables: Tables):
        t, layers = tables, len(tables.fixed)
        self.last = np.zeros((layers + 1, layers + 1))
        self.last[:layers, layers] = 1.0
        ends = np.add.outer(np.zeros(layers + 1), np.arange(layers + 1))
        self.some = ends > np.arange(layers + 1)[:, None]
        outside = t.rotary + (t.vocab + t.outside) * self.last
        attention, states, mlp, beside = (t.compute[name] for name in FOLLOWED)
        mlp = mlp + beside + t.fixed + 2 * t.handed_on
        widest = np.maximum(self._most(np.maximum(attention + states, mlp)), t.logits * self.last)
        matrices = self._most(np.maximum.reduce(list(t.unpacked.values())))
        widest += np.maximum(matrices, t.unpacked_vocab * self.last)
        weights = t.weights + sum(t.ring.values())
        self.needed = _sum(weights) + outside + 4 * t.residual + widest
        counts = [_sum(own) for own in t.of_kind]
        self.cache = Cache(t.pages, counts, [np.ones(())] * len(counts))

    def _most(self, values: Floats) -> Floats:
        layers = len(values)
        found = np.zeros((layers + 1, layers + 1))
        for i in range(layers):
            found[i, i + 1 :] = np.maximum.accumulate(values[i:])
        return found


class _Spans:
    """Of layers i to j - 1 on a device, [L + 1, L + 1] at (i, j)."""

    def __init__(self, tables: Tables, device: int, anywhere: _Anywhere):
        t = self._tables = tables
        self._device, self._last = device, anywhere.last
        room, cache = t.cap[device] - anywhere.needed, anywhere.cache
        pages, group = cache.bytes, t.copies * cache.group
        self.resident = anywhere.some & (room >= pages)
        self.fits = anywhere.some & (self.resident | (room >= group))
        kept = np.where(self.resident, pages, np.clip(room - group, 0, pages))
        self._sent, staged = cache.streamed(kept)
        self._staged = t.copies * staged
        self.on_host = np.where(self.fits, pages - kept, np.inf)
        turns, links = zip(*(self._times(s) for s in (0, 1)), strict=True)
        self.turns, self.links = np.array(turns), np.array(links)  # [2, L + 1, L + 1], seconds

    def compute(self, stage: Stage) -> Floats:
        """Seconds of computing."""
        d = self._device
        return _sum(stage.attn[:, d] + stage.mlp[:, d]) + stage.head[d] * self._last

    def _times(self, s: int) -> tuple[Floats, Floats]:
        """Seconds of the turn and of the link in a step of a kind."""
        rate = self._tables.link[self._device]
        compute = self.compute(self._tables.stages[s])
        sent = np.where(self.resident, 0.0, self._sent[s])
        if rate > 0:
            link, room = sent / rate, self._staged / rate
        else:
            link, room = np.where(sent > 0, np.inf, 0.0), np.zeros_like(sent)
        turn = np.maximum(compute, link - np.minimum(room, link))
        return np.where(self.fits, turn, np.inf), np.where(self.fits, link, 0.0)


class LayerCuts:
    """The cuts of one set of tables."""

    def __init__(self, tables: Tables):
        t = self._t = tables
        anywhere = _Anywhere(t)
        self._spans = [_Spans(t, d, anywhere) for d in range(len(t.cap))]
        self._turns, self._links = (  # [R, 2, L + 1, L + 1]
            np.array([getattr(s, name) for s in self._spans]) for name in ("turns", "links")
        )
        self._resident = np.array([s.resident for s in self._spans])
        self._count = np.array([stage.count for stage in t.stages])
        fabric = t.mesh.fabric
        self._hosts = [fabric.host(d) for d in range(len(t.cap))]
        # Seconds of a copy to the next device, in its host and in another, [wires, 2].
        apart = [0] if len(set(self._hosts)) == 1 else [0, int(fabric.devices_per_host or 1)]
        wires = [[fabric.copy_seconds((0, d), s.payload) for s in t.stages] for d in apart]
        self._copy = np.array(wires)
        layers = len(t.model.layers)
        owners = [t.model.cache_owner(i) for i in range(layers)]
        # Where a device's layers may begin: never between two that have one cache.
        self._begins = np.array([all(o >= b for o in owners[b:]) for b in range(layers + 1)])

    def within(self, limit: float, resident: bool = False, most: int | None = None) -> Cut | None:
        """A cut whose request takes no more seconds than `limit`, but for a millionth part or so;
        None where there is none. `resident`: all of the cache stays on the devices; `most`: on so
        many devices at most."""
        todo = []
        for spans, least in self._counts(
            resident, min(most or len(self._spans), len(self._begins) - 1)
        ):
            if np.isfinite(least).all() and self._count @ least <= limit * SLACK:
                todo.append((least[0], np.inf, least[1], spans))
        while todo:
            low, high, other, spans = (
                todo.pop()
            )  # least and most seconds of a chunk, least of a step
            chunk = (limit - self._count[1] * other) / self._count[0]
            step = (limit - self._count[0] * low) / self._count[1]
            stops = self._keeping(np.array([min(high, chunk), step]), limit, resident, spans)
            if stops is None:
                continue
            cut = self._cut(stops)
            if cut.seconds <= limit * (1 + CLOSE):
                return cut
            middle = (low + cut.prefill) / 2
            todo += [(middle, high, other, spans), (low, middle, other, spans)]
        return None

    def _counts(self, resident: bool, most: int) -> Iterator[tuple[range, Floats]]:
        """How many spans there may be, and what a step of each kind takes at least with so many:
        any number where the host thread is never the slowest, else every number by itself, since
        its time follows from that."""
        free, numbers = np.full(2, np.inf), range(1, most + 1)
        starts = [[self._t.dispatch(s, n) for s in self._t.stages] for n in numbers]
        for spans in [numbers, *(range(n, n + 1) for n in reversed(numbers))]:
            found = [self._shortest(kind, free, resident, spans) for kind in (CHUNK, STEP)]
            sums = np.array([np.inf if each is None else each[0] for each in found])
            if spans == numbers and np.all(starts[-1] <= sums):
                yield spans, sums
                return
            if len(spans) == 1:
                yield spans, np.maximum(sums, starts[spans[0] - 1])

    def least_on_host(self) -> Cut | None:
        """The cut with the least of its cache in host memory; None where none fits."""
        cost = np.array([s.on_host for s in self._spans])
        begins = np.where(self._begins, 0.0, np.inf)[None].repeat(len(self._copy), 0)
        found = _path(cost, begins, range(1, len(cost) + 1), self._hosts)
        return None if found is None else self._cut(found[1])

    def alone(self, device: int) -> list[Cut]:
        """All layers on one device, where they fit: as one program, and with a cache of which as
        much stays as can."""
        t, spans, layers = self._t, self._spans[device], len(self._t.model.layers)
        found: list[Cut] = []
        if t.fused <= t.cap[device]:
            steps = np.array([spans.compute(stage)[0, layers] for stage in t.stages])
            starts = np.full(2, 2e-6 * t.mesh.fabric.dispatch_us)  # two programs
            counts = tuple(layers * (d == device) for d in range(len(self._spans)))
            shares = counts, (), True
            found.append(t.cut(shares, steps, np.zeros((2, 1)), starts, "computing"))
        if spans.fits[0, layers]:
            found.append(self._cut((0,) * device + (layers,) * (len(self._spans) - device)))
        return found

    def _keeping(self, most: Floats, limit: float, resident: bool, spans: range) -> Stops | None:
        """A cut whose sums take no more seconds than `limit` in a request and than `most` in a step
        of each kind; the shortest path of some weights is one or tells that there is none, or else
        all are looked at."""
        both, low, high = 0.5, 0.0, 1.0  # how much the decode step weighs
        for weight in (both, low, high, *[None] * TRIES):
            part = (low + high) / 2 if weight is None else weight
            weights = self._count * (1 - part, part)
            bound = min(weights @ most, limit / 2 if part == both else np.inf)
            found = self._shortest(weights, most, resident, spans)
            if found is None or found[0] > bound * SLACK:
                return None
            sums = self._sums(found[1])
            chunk, step = sums <= most * SLACK
            if chunk and step and self._count @ sums <= limit * SLACK:
                return found[1]
            if weight is None or part == both:
                low, high = (part, high) if chunk else (low, part)
        return self._best_of_both(most, limit, resident, spans)

    def _late(self, most: Floats, resident: bool) -> np.ndarray:
        """Which spans, [R, L + 1, L + 1], are out: their links need longer, or not all stays."""
        late = (self._links > most[:, None, None] * SLACK).any(1)
        return np.asarray(late | ~self._resident if resident else late)

    def _before(self, weights: Floats) -> Floats:
        """Seconds of copies before spans that begin at each layer, [wires, L + 1]."""
        first = np.arange(len(self._begins)) == 0
        copies = (self._copy @ weights)[:, None]
        return np.where(self._begins, np.where(first, 0.0, copies), np.inf)

    def _shortest(
        self, weights: Floats, most: Floats, resident: bool, spans: range
    ) -> tuple[float, Stops] | None:
        """The least sum of turns and copies, and the cut that has it."""
        cost = np.zeros_like(self._links[:, 0])
        for s in np.flatnonzero(weights):
            cost = cost + weights[s] * self._turns[:, s]
        cost[self._late(most, resident)] = np.inf
        return _path(cost, self._before(weights), spans, self._hosts)

    def _best_of_both(
        self, most: Floats, limit: float, resident: bool, spans: range
    ) -> Stops | None:
        """The same, of all cuts that are no worse in both kinds of steps than another with as many
        layers."""
        late = self._late(most, resident)[:, None]
        before = np.array([self._before(kind).min(0) for kind in (CHUNK, STEP)])
        more = self._copy - self._copy.min(0)  # of a wire, beside the fastest
        more = np.column_stack((more, more @ self._count))[:, :, None]
        cost = np.where(late, np.inf, self._turns) + before[:, :, None]  # [R, 2, L + 1, L + 1]
        cost = np.concatenate(
            (cost, np.einsum("s,rsij->rij", self._count, cost)[:, None]), axis=1
        )  # and of the request
        bounds = np.array([*most, limit])[:, None] * SLACK
        end = len(self._begins) - 1
        left = np.where(np.arange(end + 1) == end, 0.0, np.full((3, end + 1), np.inf))
        to_go = [left]  # sums from a layer on, by the first device that is left
        for step in cost[:0:-1]:
            left = np.minimum(left, (step + left[:, None]).min(2))
            to_go.append(left)
        # By devices used, layers so far, and the host of the last device.
        fronts: dict[tuple[int, int, int], list[tuple[float, float, Stops]]] = {}
        fronts[0, 0, self._hosts[0]] = [(0, 0, ())]
        for step, left, host in zip(cost, reversed(to_go), self._hosts, strict=True):
            step[:, np.arange(end + 1), np.arange(end + 1)] = 0.0  # the device takes no part
            found: dict[tuple[int, int, int], list[tuple[float, float, Stops]]] = {}
            for (used, at, last), front in fronts.items():
                takes = np.arange(end + 1 - at) > 0
                wire = more[int(last != host)] * takes if at else 0.0
                so_far = np.array([one[:2] for one in front])
                so_far = np.column_stack((so_far, so_far @ self._count))
                sums = so_far[:, :, None] + step[:, at, at:] + wire
                keep = (sums + left[:, at:] <= bounds).all(1)
                for i, j in np.argwhere(keep).tolist():
                    key = used + (j > 0), at + j, host if j else last
                    if key[0] < spans.stop:
                        chunk, decode, _ = sums[i, :, j].tolist()
                        found.setdefault(key, []).append((chunk, decode, (*front[i][2], key[1])))
            fronts = {key: _no_worse(front) for key, front in found.items()}
        ends = [
            one
            for key, front in fronts.items()
            if key[0] in spans and key[1] == end
            for one in front
        ]
        return min(ends, key=lambda one: self._count @ one[:2])[2] if ends else None

    def _sums(self, stops: Stops) -> Floats:
        """Seconds of turns and copies in a step of each kind."""
        spans = _spans_of(stops)
        turns = sum(self._turns[d, :, i, j] for d, (i, j) in spans)
        hosts = [self._hosts[d] for d, _ in spans]
        wires = [int(a != b) for a, b in zip(hosts, hosts[1:], strict=False)]
        return turns + self._copy[wires].sum(0)

    def _cut(self, stops: Stops) -> Cut:
        spans, t = _spans_of(stops), self._t
        counts = [0] * len(self._spans)
        links = np.zeros((2, len(counts)))
        for d, (i, j) in spans:
            counts[d], links[:, d] = j - i, self._links[d, :, i, j]
        resident = all(self._resident[d, i, j] for d, (i, j) in spans)
        starts = np.array([t.dispatch(stage, len(spans)) for stage in t.stages])
        words = "computing" if len(spans) == 1 else "devices compute one after another"
        return t.cut((tuple(counts), (), resident), self._sums(stops), links, starts, words)


def _sum(values: Floats) -> Floats:
    """Of the layers of every span."""
    total = np.concatenate(([0.0], np.cumsum(values)))
    return total[None, :] - total[:, None]


def _spans_of(stops: Stops) -> list[tuple[int, tuple[int, int]]]:
    starts = (0, *stops[:-1])
    return [(d, (i, j)) for d, (i, j) in enumerate(zip(starts, stops, strict=True)) if j > i]


def _no_worse(front: list[tuple[float, float, Stops]]) -> list[tuple[float, float, Stops]]:
    """Those that are worse in neither of two figures than another, or equal to it."""
    kept: list[tuple[float, float, Stops]] = []
    for one in sorted(front):
        if not kept or one[1] < kept[-1][1]:
            kept.append(one)
    return kept


def _path(
    cost: Floats, before: Floats, spans: range, hosts: Sequence[int]
) -> tuple[float, Stops] | None:
    """The least sum of a number of spans that follow each other, and where they end. `cost`
    [R, L + 1, L + 1] is that of a device's span, `before` [wires, L + 1] what one that begins at a
    layer takes first, after a device of its own of the `hosts` and after one of another."""
    up, (wires, ends) = len(spans) < len(cost), before.shape  # whether spans are counted
    total = np.full((wires, spans.stop if up else 1, ends), np.inf)
    total[0, 0, 0] = 0.0
    came: list[np.ndarray] = []  # where the device's span began, by wires; -1: it has none
    moved: dict[int, np.ndarray] = {}  # devices that begin a host, and the wire until there
    for d, own in enumerate(cost):
        if d and hosts[d] != hosts[d - 1]:
            moved[d] = total.argmin(0)
            total = np.array([np.full_like(total[0], np.inf), total.min(0)])
        step = (total[:, : total.shape[1] - up] + before[:, None])[..., None] + own
        step = step.swapaxes(0, 1).reshape(step.shape[1], -1, ends)
        start = np.full(total.shape[1:], -1)
        found = np.full(total.shape[1:], np.inf)
        start[up:], found[up:] = step.argmin(1), step.min(1)
        came.append(np.where(found < total[0], start, -1))
        total = np.array([np.minimum(total[0], found), *total[1:]])
    last = total[:, spans.start :, -1] if up else total[:, :, -1]
    wire, used = np.unravel_index(int(last.argmin()), last.shape)
    used, at = int(used) + (spans.start if up else 0), ends - 1
    best = float(total[wire, used, at])
    if not np.isfinite(best):
        return None
    stops: list[int] = []
    for d in reversed(range(len(cost))):
        stops.append(at)
        if wire == 0 and came[d][used, at] >= 0:
            wire, start = divmod(int(came[d][used, at]), ends)
            used, at = used - up, start
        if d in moved:
            wire = int(moved[d][used, at])
    return best, tuple(reversed(stops))
