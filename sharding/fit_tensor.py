"""The best cut of every layer over a number of devices: KV groups and MLP blocks a device.

Exact over whole KV groups and whole blocks, where layers have one number of KV groups and groups of
recurrent states are a multiple of it (in a model without attention they are counted instead). A
decode step takes at least A + B + exchanges, A the longest attention of a device and B the longest
MLP, and at least as long as every link. Given a time T and A, the groups that a device may take are
bounded by A; for each number of groups, the blocks that it may take are bounded by T - A -
exchanges, and by the memory that is left beside the groups' weights, rings and as much of their
cache as must stay for the link to keep T. So T can be kept with A exactly when the most blocks that
n devices can take, over all ways to give each a number of groups that sum to the model's, are the
model's at least: a dynamic program over devices, groups and devices used. A takes no values but a
device's time for a whole number of groups. A bisection over T finds the least; an A that is seen
not to keep a T that another keeps is not looked at again, for a smaller T is no easier.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sharding.fit_tables import Floats, Slices, Stage, Tables

ROUNDS = 40  # of a bisection, each halving what is not yet known
SLACK = 1 + 1e-9  # of comparisons of seconds
CLOSE = 5e-4  # seconds are found to this part
NEAR = 1.05  # a guess is taken to be as good as this
PRICES = 0.0, 1e3, 1.0, 0.4, 2.5, 0.15, 6.0  # of a group, in its even part of the blocks
FEW = 8  # values of A that are looked at before all others
MOST_SECONDS = 1e6  # of a step; a link may take any
Counts = tuple[int, ...]  # a device


@dataclass(frozen=True)
class TensorCut:
    """KV groups and MLP blocks a device, and whether all of the cache stays on the devices; seconds
    of the decode step, the least of all cuts over as many devices, and of a chunk of the prompt;
    the device whose link the decode step waits for, None where it does not."""

    groups: tuple[int, ...]
    blocks: tuple[int, ...]
    resident: bool
    decode: float
    prefill: float
    link: int | None = None


class TensorCuts:
    """The search of one set of tables; `best(n)` for `n` devices."""

    def __init__(self, tables: Tables):
        self._t = t = tables
        shapes = t.model.layers
        self.groups = max(s.kv_heads for s in shapes) or max(s.states for s in shapes)
        self.blocks = max(s.mlp // max(32, s.mlp_block) for s in shapes)
        self._block_bytes = (t.columns.sum() + t.vocab) / max(1, self.blocks)
        # Replicated tensors: those of layers and those outside, wherever a device takes part.
        self._both = (t.weights - t.grouped - t.columns).sum() + t.outside
        self._exchanges = 1 + sum(s.exchanges for s in shapes)
        self._decode = _Linear(self, t.decode)

    def best(self, n: int, near: float | None = None) -> TensorCut | None:
        """The cut with the shortest decode step over exactly `n` devices; None where none fits.
        `near` is a guess of its seconds, which spares most of the search where it is good."""
        if not self.groups or not self.blocks:
            return None
        decode = self._decode
        rows = _Memory(self, n)
        bounds = decode.bounds
        high = decode.longest + self._exchange(n, self._t.decode)
        low, found = 0.0, None
        if near is not None:
            found = self._feasible(rows, n, bounds, near * (1 + CLOSE))
            if found is None:
                low, wide = near * (1 + CLOSE), near * NEAR
                found = self._feasible(rows, n, bounds, wide)
                high = wide if found is not None else high
            else:
                high = near * (1 + CLOSE)
                better = self._feasible(rows, n, found.bounds, near * (1 - CLOSE))
                low = near * (1 - CLOSE) if better is None else 0.0
        if found is None and high > low:
            found = self._feasible(rows, n, bounds, high)
        if found is None:  # links take longer than any computing
            found = self._feasible(rows, n, bounds, np.inf)
            if found is None:
                return None
            high = self._seconds(found, rows, n, self._t.decode)[0]
        for _ in range(ROUNDS):
            if high - low <= 2 * CLOSE * high:
                break
            middle = (low + high) / 2
            better = self._feasible(rows, n, found.bounds, middle)
            if better is None:
                low = middle
            else:
                high, found = middle, better
        decoded, link = self._seconds(found, rows, n, self._t.decode)
        filled, _ = self._seconds(found, rows, n, self._t.prefill)
        resident = all(
            rows.resident[d, a] >= b - 1e-6
            for d, (a, b) in enumerate(zip(found.groups, found.blocks, strict=True))
            if a
        )
        return TensorCut(found.groups, found.blocks, resident, decoded, filled, link)

    def _exchange(self, n: int, stage: Stage) -> float:
        fabric = self._t.mesh.fabric
        return self._exchanges * fabric.exchange_seconds(range(n), stage.payload, False)

    def _feasible(self, rows: _Memory, n: int, bounds: Floats, limit: float) -> _Found | None:
        """A cut that keeps `limit` seconds, with the bounds A under which there may be one."""
        decode = self._decode
        left = limit - self._exchange(n, self._t.decode) - decode.constant
        bounds = bounds[bounds + decode.least_mlp <= left * SLACK]
        if not len(bounds):
            return None
        most = rows.blocks(limit)  # [R, K + 1]
        per = np.maximum(decode.block, 1e-30)  # 0 where computing does not depend on the cut
        mlp = np.floor((left - bounds)[:, None] * SLACK / per)  # [A, R]
        taken = np.minimum(mlp[:, :, None], most[None])  # [A, R, K + 1]
        groups = np.arange(self.groups + 1)
        late = groups * decode.group[:, None] > bounds[:, None, None] * SLACK
        taken = np.where(late | (taken < 0), -np.inf, np.minimum(taken, self.blocks))
        # Whatever a group is worth in blocks, no way to give them out is worth more than the n
        # devices do that are worth most, each by its best number of groups.
        margin = np.full(len(bounds), np.inf)
        for price in PRICES:
            price *= self.blocks / self.groups
            worth = np.sort((taken + price * groups).max(2), axis=1)[:, -n:].sum(1)
            margin = np.minimum(margin, worth * SLACK / (self.blocks + price * self.groups))
            possible = margin >= 1
            if not possible.any():
                return None
            taken, bounds, margin = taken[possible], bounds[possible], margin[possible]
        order = np.argsort(-margin)  # one A that will do is enough, and these are likely to
        for some in (order[:FEW], order[FEW:]):
            shares = _distribute(taken[some], n, self.blocks) if len(some) else None
            if shares is not None:
                return _Found(*shares, bounds)
        return None

    def _seconds(
        self, found: _Found, rows: _Memory, n: int, stage: Stage
    ) -> tuple[float, int | None]:
        """Of a step under a cut, and the device whose link it waits for."""
        t, linear = self._t, _Linear(self, stage)
        groups, blocks = np.array(found.groups), np.array(found.blocks)
        compute = (groups * linear.group).max() + (blocks * linear.block).max()
        compute += linear.constant + self._exchange(n, stage)
        kept, cache = rows.kept(groups, blocks), rows.slices(stage)
        own = Slices(*(each[groups] for each in (cache.count, cache.size, cache.live, cache.group)))
        resident = kept >= t.pages.sum() * groups / self.groups
        sent = np.where(resident, 0.0, own.streamed(kept))
        links = np.divide(sent, t.link, out=np.full_like(sent, np.inf), where=t.link > 0)
        links[sent <= 0] = 0.0
        slowest = int(links.argmax())
        waits = links[slowest] > compute
        return float(max(compute, links[slowest])), slowest if waits else None


class _Linear:
    """Seconds a group and a block of each device, [R]; `constant` where devices take turns, whose
    sum is the same for every cut."""

    def __init__(self, cuts: TensorCuts, stage: Stage):
        tables = cuts._t
        attn, mlp = stage.attn.sum(0), stage.mlp.sum(0) + stage.head
        if tables.mesh.fabric.shared:
            self.constant = float((attn + mlp).min())
            attn, mlp = np.zeros_like(attn), np.zeros_like(mlp)
        else:
            self.constant = 0.0
        self.group, self.block = attn / max(1, cuts.groups), mlp / max(1, cuts.blocks)
        with np.errstate(divide="ignore"):
            self.least_mlp = cuts.blocks / np.sum(1 / self.block) if self.block.all() else 0.0
        self.longest = self.constant + float(attn.max() + mlp.max())
        self.bounds = np.unique(np.outer(np.arange(cuts.groups + 1), self.group))


class _Memory:
    """How many blocks fit on each device beside a number of groups, when `n` devices take part."""

    def __init__(self, cuts: TensorCuts, n: int):
        t = self._t = cuts._t
        self._cuts = cuts
        part = np.arange(cuts.groups + 1) / cuts.groups
        self._part = part
        residuals = (4 + min(3, n)) * t.residual
        grouped = part * (t.grouped.sum() + t.ring.sum())
        left = t.cap[:, None] - cuts._both - residuals - grouped[None]  # [R, K + 1]
        self._left = left
        self._lines = self._compute_lines()
        self._pages = part * t.pages.sum()
        self._group = part * t.group.max()
        self._copies = t.copies * self._group
        self.resident = self._take(left - self._pages)

    def _compute_lines(self) -> list[tuple[float, Floats]]:
        """Bytes a block and bytes beside a number of groups, [K + 1], of everything that may be the
        widest part of a step's computation together with the largest matrix that is unpacked."""
        t, blocks, none = self._t, self._cuts.blocks, np.zeros_like(self._part)
        widest = [
            (0.0, self._part * t.attention.max()),
            (t.dense.max() / blocks, none + t.fixed.max()),
            (t.logits / blocks, none),
        ]
        most = {kind: each.max() for kind, each in t.unpacked.items()}
        matrices = [
            (0.0, np.maximum(self._part * most["grouped"], most["whole"])),
            (max(most["columns"], t.unpacked_vocab) / blocks, none),
        ]
        return [(a + c, b + d) for a, b in widest for c, d in matrices]

    def _take(self, room: Floats) -> Floats:
        """Blocks that fit into so many bytes, with a step's computation."""
        size, within = self._cuts._block_bytes, np.full_like(room, self._cuts.blocks)
        for each, beside in self._lines:
            within = np.minimum(within, (room - beside) / (size + each))
        return np.floor(within + 1e-9)

    def blocks(self, limit: float) -> Floats:
        """[R, K + 1], negative where nothing fits; links must not take longer than `limit`."""
        t = self._t
        cache = self.slices(t.decode)
        budget = np.where(t.link > 0, min(limit, MOST_SECONDS) * t.link, 0.0)[:, None]
        room = self._left - self._copies - cache.kept_for(budget)
        streaming = np.where((t.link > 0)[:, None] | (cache.live == 0), self._take(room), -1.0)
        return np.maximum(self.resident, streaming)

    def slices(self, stage: Stage) -> Slices:
        """The cache of each number of groups, [K + 1]."""
        t = self._t
        count = np.full_like(self._part, (t.pages > 0).sum())
        live = self._part * stage.live.sum()
        return Slices.of(count, self._pages, live, self._group * t.options.slots)

    def kept(self, groups: np.ndarray, blocks: np.ndarray) -> Floats:
        """Bytes of cache that can stay on each device under a cut."""
        each = np.arange(len(groups))
        compute = np.max([blocks * a + b[groups] for a, b in self._lines], axis=0)
        room = self._left[each, groups] - blocks * self._cuts._block_bytes - compute
        pages = self._pages[groups]
        kept = np.clip(room - self._copies[groups], 0, pages)
        return np.where(room >= pages, pages, kept)


@dataclass(frozen=True)
class _Found:
    groups: Counts
    blocks: Counts
    bounds: Floats


def _distribute(
    taken: Floats, n: int, blocks: int
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Groups and blocks for exactly n devices, where their sum can be the model's; `taken` [A, R,
    K + 1] is how many blocks a device can take beside each number of groups."""
    count, devices, size = taken.shape
    total = np.full((count, n + 1, size), -np.inf)
    total[:, 0, 0] = 0.0
    steps, able = [total], np.any(taken >= 0, axis=0)
    for d in range(devices):
        here = total.copy()  # the device takes no part
        first, last = max(0, n - devices + d), min(d, n - 1) + 1  # used before, if n can be reached
        into = here[:, first + 1 : last + 1]
        for a in np.flatnonzero(able[d]):
            other = total[:, first:last, : size - a] + taken[:, d, a, None, None]
            np.maximum(into[:, :, a:], other, out=into[:, :, a:])
        total = here
        steps.append(total)
    keeps = total[:, n, size - 1] >= blocks
    if not keeps.any():
        return None
    row = int(np.argmax(keeps))
    groups, most, k, used = [0] * devices, [0.0] * devices, size - 1, n
    for d in reversed(range(devices)):
        now, before = steps[d + 1][row, used, k], steps[d][row]
        if before[used, k] == now:
            continue
        a = next(a for a in range(k + 1) if before[used - 1, k - a] + taken[row, d, a] == now)
        groups[d], most[d] = a, taken[row, d, a]
        k, used = k - a, used - 1
    return tuple(groups), _fill(most, blocks)


def _fill(most: list[float], blocks: int) -> tuple[int, ...]:
    """The blocks in proportion to what each device can take: each as far from its bound."""
    total = sum(most)
    counts = [int(m * blocks / total) for m in most]
    for d in sorted(range(len(most)), key=lambda d: counts[d] - most[d]):
        extra = min(blocks - sum(counts), int(most[d]) - counts[d])
        counts[d] += max(0, extra)
    return tuple(counts)
