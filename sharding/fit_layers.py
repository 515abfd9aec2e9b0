"""The best cut of whole layers over devices in their order.

Exact, by dynamic programming: the time of a step is the larger of every link's time and the sum of
the devices' turns, and a turn depends on the device and on the first and last of its layers alone.
So for a time T, of all cuts whose links need no longer than T, the one of the least sum is found by
adding one device at a time; a bisection finds the least T that some cut keeps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sharding.fit_tables import Floats, Slices, Stage, Tables

ROUNDS = 40  # of a bisection, each halving what is not yet known


@dataclass(frozen=True)
class LayerCut:
    """Layers a device, and whether all of the cache stays on the devices; seconds of the decode
    step and of a prompt's chunk; the device whose link the decode step waits for, None where it
    does not."""

    counts: tuple[int, ...]
    resident: bool
    decode: float
    prefill: float
    link: int | None = None


Stops = tuple[int, ...]  # by device, where its layers end
Times = list[tuple[Floats, Floats]]


class _Spans:
    """Of layers i to j - 1 on a device, [L + 1, L + 1] at (i, j)."""

    def __init__(self, tables: Tables, device: int):
        t = self._tables = tables
        self._device = device
        layers = len(t.ring)
        self._last = np.zeros((layers + 1, layers + 1))
        self._last[:layers, layers] = 1.0
        ends = np.add.outer(np.zeros(layers + 1), np.arange(layers + 1))
        self.some = ends > np.arange(layers + 1)[:, None]
        self._memory()

    def _sum(self, values: Floats) -> Floats:
        total = np.concatenate(([0.0], np.cumsum(values)))
        return total[None, :] - total[:, None]

    def _most(self, values: Floats) -> Floats:
        layers = len(values)
        found = np.zeros((layers + 1, layers + 1))
        for i in range(layers):
            found[i, i + 1 :] = np.maximum.accumulate(values[i:])
        return found

    def _memory(self) -> None:
        t = self._tables
        outside = (t.vocab + t.outside) * self._last
        mlp = t.dense + t.fixed + 2 * t.handed_on
        widest = np.maximum(self._most(np.maximum(t.attention, mlp)), t.logits * self._last)
        matrices = self._most(np.maximum.reduce(list(t.unpacked.values())))
        widest += np.maximum(matrices, t.unpacked_vocab * self._last)
        needed = self._sum(t.weights + t.ring) + outside + 4 * t.residual + widest
        room = t.cap[self._device] - needed
        self.whole_fits = room[0, -1] + t.ring.sum() >= t.whole_ring.sum()
        pages, group = self._sum(t.pages), self._most(t.group)
        self._copies = t.copies * group
        self.resident = room >= pages
        self.fits = self.some & (self.resident | (room >= self._copies))
        self._kept = np.where(self.resident, pages, np.clip(room - self._copies, 0, pages))
        self._count, self._pages = self._sum((t.pages > 0).astype(float)), pages
        self._group = group * t.options.slots
        self.on_host = np.where(self.fits, pages - self._kept, np.inf)

    def compute(self, stage: Stage) -> Floats:
        """Seconds of computing."""
        d = self._device
        return self._sum(stage.attn[:, d] + stage.mlp[:, d]) + stage.head[d] * self._last

    def times(self, stage: Stage) -> tuple[Floats, Floats]:
        """Seconds of the turn and of the link."""
        d, t = self._device, self._tables
        compute = self.compute(stage)
        cache = Slices.of(self._count, self._pages, self._sum(stage.live), self._group)
        sent = np.where(self.resident, 0.0, cache.streamed(self._kept))
        if t.link[d] > 0:
            link, room = sent / t.link[d], self._copies / t.link[d]
        else:
            link, room = np.where(sent > 0, np.inf, 0.0), np.zeros_like(sent)
        turn = np.maximum(compute, link - np.minimum(room, link))
        return np.where(self.fits, turn, np.inf), np.where(self.fits, link, 0.0)


class LayerCuts:
    """The searches of one set of tables."""

    def __init__(self, tables: Tables):
        self._tables = tables
        self._spans = [_Spans(tables, d) for d in range(len(tables.cap))]
        self._decode = [s.times(tables.decode) for s in self._spans]
        self._prefill = [s.times(tables.prefill) for s in self._spans]

    def best(self) -> LayerCut | None:
        """The cut with the shortest decode step; None where none fits."""
        tables, times = self._tables, self._decode
        least = _best(tables, times, np.inf)
        if least is None:
            return None
        low, high = least[0], max(least[0], _links(times, least[1]))
        best = least[1]
        for _ in range(ROUNDS if high > low else 0):
            middle = (low + high) / 2
            found = _best(tables, times, middle)
            if found is not None and found[0] <= middle:
                high, best = middle, found[1]
            else:
                low = middle
            if high - low < 1e-6 * high:
                break
        return self._cut(best)

    def least_on_host(self) -> LayerCut | None:
        """The cut with the least of its cache in host memory; None where none fits."""
        nothing = np.zeros_like(self._spans[0].on_host)
        least = _best(self._tables, [(s.on_host, nothing) for s in self._spans], np.inf)
        return None if least is None else self._cut(least[1])

    def alone(self, device: int) -> LayerCut | None:
        """All layers on one device; None where they do not fit."""
        layers, spans = len(self._tables.model.layers), self._spans[device]
        if spans.whole_fits:
            counts = tuple(layers * (d == device) for d in range(len(self._spans)))
            t = self._tables
            return LayerCut(counts, True, *(spans.compute(s)[0, -1] for s in (t.decode, t.prefill)))
        if not spans.fits[0, layers]:
            return None
        return self._cut((0,) * device + (layers,) * (len(self._spans) - device))

    def _cut(self, stops: Stops) -> LayerCut:
        spans = _spans_of(stops)
        counts = [0] * len(self._spans)
        for d, (i, j) in spans:
            counts[d] = j - i
        slowest = max(spans, key=lambda s: self._decode[s[0]][1][s[1]])[0]
        step = _step(self._tables, self._decode, stops)
        return LayerCut(
            tuple(counts),
            all(self._spans[d].resident[span] for d, span in spans),
            step,
            _step(self._tables, self._prefill, stops),
            slowest if _links(self._decode, stops) >= step else None,
        )


def _spans_of(stops: Stops) -> list[tuple[int, tuple[int, int]]]:
    starts = (0, *stops[:-1])
    return [(d, (i, j)) for d, (i, j) in enumerate(zip(starts, stops, strict=True)) if j > i]


def _links(times: Times, stops: Stops) -> float:
    return max(times[d][1][span] for d, span in _spans_of(stops))


def _step(tables: Tables, times: Times, stops: Stops) -> float:
    spans = _spans_of(stops)
    copies = _hand_over(tables) * (len(spans) - 1)
    total = sum(times[d][0][span] for d, span in spans) + copies
    return float(max(total, _links(times, stops)))


def _hand_over(tables: Tables) -> float:
    """Seconds of the copy from one device to the next; the least there is, inside a host."""
    return tables.mesh.fabric.copy_seconds((0,), tables.decode.payload)


def _best(tables: Tables, times: Times, limit: float) -> tuple[float, Stops] | None:
    """The least sum of turns over cuts whose links need no longer than `limit`."""
    model = tables.model
    layers = len(model.layers)
    owners = [model.cache_owner(i) for i in range(layers)]
    allowed = np.array([all(o >= b for o in owners[b:]) for b in range(layers + 1)])
    copy = _hand_over(tables) * (np.arange(layers + 1) > 0)
    total = np.where(np.arange(layers + 1) == 0, 0.0, np.inf)
    came: list[np.ndarray] = []
    for turn, link in times:
        step = np.where(link <= limit * (1 + 1e-12), turn, np.inf) + (total + copy)[:, None]
        step[:, ~allowed] = np.inf
        start = np.argmin(step, axis=0)
        found = step[start, np.arange(layers + 1)]
        stay = total <= found
        came.append(np.where(stay, np.arange(layers + 1), start))
        total = np.minimum(total, found)
    if not np.isfinite(total[layers]):
        return None
    stops, at = [], layers
    for start in reversed(came):
        stops.append(at)
        at = int(start[at])
    return float(total[layers]), tuple(reversed(stops))
