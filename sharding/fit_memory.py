"""What fits on a device: a cache as a budget spends it, and MLP blocks beside it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sharding.fit_tables import Floats, Stage, Tables

MOST_SECONDS = 1e6  # of a step; a link may take any


@dataclass(frozen=True)
class Slices:
    """The cache of some layers on some device as a budget spends it: whole slices, one a layer,
    then part of one in whole groups of pages from its beginning. Bytes; arrays of one shape.

    Attributes:
        count: slices.
        size: of a slice.
        live: of a slice's pages that a step reads.
        group: of a group of pages.
    """

    count: Floats
    size: Floats
    live: Floats
    group: Floats

    @classmethod
    def of(cls, count: Floats, pages: Floats, live: Floats, group: Floats) -> Slices:
        """Of so many layers with these bytes in all."""
        each = np.maximum(count, 1.0)
        return cls(each, np.maximum(pages / each, 1.0), live / each, np.maximum(group, 1.0))

    def at(self, index: np.ndarray) -> Slices:
        """Those at some places."""
        return Slices(*(each[index] for each in (self.count, self.size, self.live, self.group)))

    def streamed(self, kept: Floats) -> Floats:
        """Bytes that a step streams while so many stay."""
        whole = np.minimum(np.floor(kept / self.size + 1e-9), self.count)
        part = np.floor((kept - whole * self.size) / self.group + 1e-9) * self.group
        return (self.count - whole) * self.live - np.where(
            whole < self.count, np.minimum(self.live, np.maximum(part, 0.0)), 0.0
        )

    def kept_for(self, streamed: Floats) -> Floats:
        """The fewest bytes that must stay so that a step streams no more than so many."""
        live = np.maximum(self.live, 1e-9)
        whole = np.maximum(self.count - np.floor(streamed / live + 1e-9) - 1, 0.0)
        rest = np.maximum((self.count - whole) * self.live - streamed, 0.0)
        part = np.ceil(rest / self.group - 1e-9) * self.group
        return whole * self.size + np.minimum(part, self.size)


class TensorMemory:
    """How many MLP blocks fit on each device beside a number of KV groups, when `n` devices take
    part; K groups and `blocks` blocks are to be given out."""

    def __init__(self, tables: Tables, blocks: int, n: int):
        t = self._t = tables
        self._blocks = blocks
        self._part = np.arange(t.most_groups + 1) / max(1, t.most_groups)
        # Replicated tensors: those of layers and those outside, wherever a device takes part.
        both = (t.weights - t.grouped - t.columns).sum() + t.outside
        residuals = (4 + min(3, n)) * t.residual
        grouped = self._part * (t.grouped.sum() + t.ring.sum())
        self._left = t.cap[:, None] - both - residuals - grouped[None]  # [R, K + 1]
        self._block_bytes = (t.columns.sum() + t.vocab) / max(1, blocks)
        self._lines = self._compute_lines()
        self._pages = self._part * t.pages.sum()
        self._group = self._part * t.group.max()
        self._copies = t.copies * self._group
        self.resident = self._take(self._left - self._pages)  # blocks while all of the cache stays
        self._caches = [self._slices(stage) for stage in t.stages]

    def blocks(self, seconds: Floats) -> Floats:
        """Beside each number of groups, while no link takes longer than so many seconds of a step
        of each kind, [N, 2]; negative where nothing fits: [N, R, K + 1]."""
        link = self._t.link[:, None]
        kept, live = 0.0, False
        for each, cache in zip(np.clip(seconds, 0.0, MOST_SECONDS).T, self._caches, strict=True):
            kept = np.maximum(kept, cache.kept_for(each[:, None, None] * link))
            live = live | (cache.live > 0)
        streaming = self._take(self._left - self._copies - kept)
        return np.maximum(self.resident, np.where((link > 0) | ~live, streaming, -1.0))

    def sent(self, groups: np.ndarray, blocks: np.ndarray) -> tuple[Floats, np.ndarray]:
        """Bytes that cross each link in a step of each kind under some cuts [N, R], as much as can
        staying on the devices, [2, N, R]; and where nothing is left to be sent, [N, R]."""
        compute = np.max([blocks * a + b[groups] for a, b in self._lines], axis=0)
        left = np.take_along_axis(self._left.T, groups, axis=0)  # [N, R]: of [K + 1, R]
        room = left - blocks * self._block_bytes - compute
        pages = self._pages[groups]
        kept = np.clip(room - self._copies[groups], 0, pages)
        resident = room >= pages - 1e-6
        sent = [np.where(resident, 0.0, cache.at(groups).streamed(kept)) for cache in self._caches]
        return np.array(sent), resident

    def _compute_lines(self) -> list[tuple[float, Floats]]:
        """Bytes a block and bytes beside a number of groups, [K + 1], of everything that may be the
        widest part of a step's computation together with the largest matrix that is unpacked."""
        t, blocks, none = self._t, max(1, self._blocks), np.zeros_like(self._part)
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
        size, within = self._block_bytes, np.full_like(room, self._blocks)
        for each, beside in self._lines:
            within = np.minimum(within, (room - beside) / (size + each))
        return np.floor(within + 1e-9)

    def _slices(self, stage: Stage) -> Slices:
        """The cache of each number of groups, [K + 1]."""
        count = np.full_like(self._part, (self._t.pages > 0).sum())
        live = self._part * stage.live.sum()
        return Slices.of(count, self._pages, live, self._group * self._t.options.slots)
