"""What fits on a device where every layer is cut: MLP blocks beside groups.

Devices have groups [U, ...] and blocks [U, ...] of every total, and take part in sets of layers
[sets, ...]; see `sharding.fit_units`.
"""

from __future__ import annotations

from copy import copy

import numpy as np

from sharding.fit_cache import Cache
from sharding.fit_options import Options
from sharding.fit_probe import FOLLOWED
from sharding.fit_tables import Floats, Tables
from sharding.fit_units import Ints

MOST_SECONDS = 1e6  # of a step; a link may take any
MIXERS, MLPS = FOLLOWED[:2], FOLLOWED[2:]

# Bytes a group and a block of each total, and others, [lines, U] twice and [lines].
Lines = tuple[Floats, Floats, Floats]


class TensorMemory:
    """Of one set of tables, for devices with each of the options."""

    def __init__(self, tables: Tables, options: Options):
        t = self._t = tables
        weights = {name: own[0] for name, own in t.parts.items()}
        weights["mlp"] = weights["mlp"] + weights["expert"]
        group, block = ([t.each(name, weights[name]) for name in names] for names in (MIXERS, MLPS))
        group += [t.each(name, t.ring[name]) for name in MIXERS]
        self._group, self._block = (np.sum(each, axis=(0, 1)) for each in (group, block))
        self._block += t.vocab * self._first  # bytes a group and a block of each total
        whole = weights["whole"]  # on every device of a layer
        self._sets = np.array([whole[t.set_of == i].sum() for i in range(len(t.sets))])
        self._everywhere = whole[t.set_of < 0].sum() + t.rotary
        self._widest, self._alone = self._lines()
        self._left = self._room(options.groups[:, None], options.takes[:, None], t.cap[:, None])
        self._beside = self._beside_groups(self._widest, options)
        # Of sets that hand on anything: which it is, and which options these lines are of.
        some = [(c, lines) for c, lines in enumerate(self._alone) if len(lines[-1])]
        self._only = [
            (c, options.takes[c], self._beside_groups(lines, options), lines[1])
            for c, lines in some
        ]
        self._cache = self._pages(options.groups)
        self._streams = [bool(self._cache.live(s)) for s in range(len(t.stages))]
        self._residuals, self._resident = 0.0, np.zeros(())

    def over(self, n: int) -> TensorMemory:
        """When so many devices take part."""
        found = copy(self)
        found._residuals = (4 + min(3, n)) * self._t.residual
        found._left = self._left - found._residuals
        if len(self._t.mlps.totals) == 1:
            none = np.zeros((1, 1, len(self._t.cap)), int)
            room = (found._left - found._cache.bytes)[None]
            sets = np.zeros((1, len(self._t.sets)), bool)
            found._resident = found._most(room, none, none, np.array(np.inf), sets)
        return found

    @property
    def _first(self) -> Floats:
        """A table cut by the first total, of each total."""
        grid = self._t.mlps
        return np.eye(len(grid.totals))[0] / max(1, grid.totals[0])

    @staticmethod
    def _beside_groups(lines: Lines, options: Options) -> Floats:
        """Bytes of lines beside blocks, [lines, O]."""
        of_groups, _, more = lines
        return of_groups @ options.groups + more[:, None]

    def blocks(
        self,
        least: Ints,
        largest: Ints,
        seconds: Floats | None,
        within: Floats,
        alone: np.ndarray,
    ) -> Floats:
        """The most of every total beside each option, while no link takes longer than so many
        seconds of a step of each kind, [N, 2]; None: while all of the cache stays. Negative where
        nothing fits. Blocks are rounded with any offsets between two, [U, N, R]; of the first total
        no more count than are `within` [N, R, O]. In sets that are `alone` [N, sets] one device
        takes part: [U, N, R, O]."""
        room = (self._left - self._cache.bytes)[None]
        ends = least, largest, within, alone
        several = len(least) > 1 or any(alone[:, c].any() for c, *_ in self._only)
        if seconds is None:
            return self._most(room, *ends) if several else self._resident
        link, kept = self._t.link[:, None], np.zeros(())
        for s, each in enumerate(np.clip(seconds, 0.0, MOST_SECONDS).T):
            kept = np.maximum(kept, self._cache.kept_for(s, each[:, None, None] * link))
        rooms = self._left - self._t.copies * self._cache.group - kept
        resident = self._most(room, *ends) if several else self._resident
        live = any(self._streams)
        streaming = np.where((link > 0) | (not live), self._most(rooms, *ends), -1.0)
        return np.maximum(resident, streaming)

    def _most(
        self, room: Floats, least: Ints, largest: Ints, within: Floats, alone: np.ndarray
    ) -> Floats:
        left = [room - beside for beside in self._beside]
        units = [self._block + self._widest[1]]  # [lines, U]
        for c, takes, besides, blocks in self._only:
            if alone[:, c].any():
                only = alone[:, c, None, None] & takes
                left += [np.where(only, room - beside, np.inf) for beside in besides]
                units.append(self._block + blocks)
        lefts = np.array(np.broadcast_arrays(*left))
        found = self._t.mlps.most(
            lefts - self._t.outside,  # goes with rows
            np.concatenate(units)[:, :, None, None, None],
            least[..., None],
            largest[..., None],
            within,
        )
        none = lefts.min(0) >= 0
        return np.maximum(found, none - 1.0)

    def sent(
        self, groups: Ints, blocks: Ints, takes: np.ndarray
    ) -> tuple[Floats, np.ndarray, np.ndarray]:
        """Bytes that cross each link in a step of each kind under some cuts, as much as can staying
        on the devices, [2, N, R]; where nothing is left to be sent, and where all fits, [N, R]."""

        def widest(lines: Lines) -> Floats:
            of_groups, of_blocks, more = lines
            found = np.tensordot(of_groups, groups, 1) + np.tensordot(of_blocks, blocks, 1)
            return (found + more[:, None, None]).max(0)

        largest = widest(self._widest)
        for lines, own in zip(self._alone, takes, strict=True):
            alone = own & (own.sum(1, keepdims=True) == 1)
            if len(lines[-1]) and alone.any():
                largest = np.where(alone, np.maximum(largest, widest(lines)), largest)
        left = self._room(groups, takes, self._t.cap) - self._residuals
        room = left - np.tensordot(self._block, blocks, 1) - largest
        room -= self._t.outside * (blocks[0] > 0)
        cache = self._pages(groups)
        staged = room - self._t.copies * cache.group
        resident = room >= cache.bytes - 1e-6
        sent, _ = cache.streamed(np.clip(staged, 0, cache.bytes))
        fits = resident | (staged >= -1e-6)
        return np.where(resident, 0.0, np.array(sent).reshape(-1, *room.shape)), resident, fits

    def _room(self, groups: Ints, takes: np.ndarray, cap: Floats) -> Floats:
        """Beside groups and what devices have whole, but for residuals."""
        used = np.tensordot(self._group, groups, 1) + self._everywhere
        return cap - used - np.tensordot(self._sets, takes, 1)

    def _pages(self, groups: Ints) -> Cache:
        t = self._t
        totals = t.mixers.totals
        parts = [groups[kind.unit] / max(1, totals[kind.unit]) for kind in t.pages]
        return Cache(t.pages, t.of_kind.sum(1), parts)

    def _lines(self) -> tuple[Lines, list[Lines]]:
        """Everything that may be the widest part of a step's computation together with the largest
        matrix that is unpacked; and of each set the same of layers whose MLP is on one device
        alone, which has all of it and hands on queries and carries in its program. None in sets
        that hand on nothing."""
        t, grids = self._t, (self._t.mixers, self._t.mlps)
        mixers, mlps = (len(grid.totals) for grid in grids)

        def rows(groups: Floats | float, blocks: Floats | float, more: Floats | float) -> Floats:
            found = np.zeros((len(t.fixed), mixers + mlps + 1))
            found[:, :mixers], found[:, mixers:-1], found[:, -1] = groups, blocks, more
            return found

        attention = sum(t.each(name, t.compute[name]) for name in MIXERS)
        mlp = sum(t.each(name, t.compute[name]) for name in MLPS)
        logits, table = t.logits * self._first, t.unpacked_vocab * self._first
        widest = [rows(attention, 0, 0), rows(0, mlp, t.fixed), rows(0, logits, 0)]
        matrices = [rows(t.each(name, t.unpacked[name]), 0, 0) for name in MIXERS]
        matrices += [rows(0, t.each(name, t.unpacked[name]), 0) for name in MLPS]
        matrices += [rows(0, 0, t.unpacked["whole"]), rows(0, table, 0)]
        wide, unpacked = (_largest(np.concatenate(each)) for each in (widest, matrices))
        whole = sum(t.compute[name] for name in MLPS) + t.fixed + 2 * t.handed_on
        alone = [rows(0, 0, whole)[(t.set_of == c) & (t.handed_on > 0)] for c in range(len(t.sets))]

        def both(wide: Floats) -> Lines:
            every = [np.empty((0, wide.shape[1])), *(wide + matrix for matrix in unpacked)]
            found = _largest(np.concatenate(every))
            return found[:, :mixers], found[:, mixers:-1], found[:, -1]

        return both(wide), [both(each) for each in alone]


def _largest(rows: Floats) -> Floats:
    """Those that no other is at least as large as in everything."""
    rows = np.unique(rows, axis=0)
    under = (rows[:, None] <= rows[None]).all(2) & ~np.eye(len(rows), dtype=bool)
    return rows[~under.any(1)]
