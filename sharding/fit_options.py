"""What devices may have of a model whose every layer is cut: groups, and units of MLPs or none."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np

from sharding.fit_joint import Groups
from sharding.fit_units import Grid, Ints, LayerSet


class Options:
    """What a device may have beside its blocks, O in all: groups of every total of mixers, [U, O],
    for which it needs cells of distances from `first` to `last`, [pairs, O]; and of which totals of
    MLPs it has any units: one of the `patterns` [P, U] that are `allowed` [P, O]; any of these has
    some of the totals that it `may_have` [U, 1, 1, O]. `takes` [sets, O] says in which sets of
    layers it takes part."""

    def __init__(self, mixers: Groups, mlps: Grid, sets: Sequence[LayerSet]):
        none = (False,) * len(mlps.totals)
        self.patterns = [
            none,
            *((True, *some) for some in product((False, True), repeat=len(none) - 1)),
        ]
        every = np.indices([n + 1 for n in mixers.totals]).reshape(len(mixers.totals), -1)
        first, last = mixers.cells(every)
        inside = (first <= mixers.last[:, None]) & (last >= mixers.first[:, None])
        rows: dict[tuple[tuple[int, ...], tuple[bool, ...]], list[int]] = {}
        for own in every[:, inside.all(0)].T.tolist():
            some = {i for i, n in enumerate(own) if n}
            for i, pattern in enumerate(self.patterns):
                units = {j for j, has in enumerate(pattern) if has}
                takes = tuple(bool(s.mixers & some or s.mlps & units) for s in sets)
                if some or units:
                    rows.setdefault((tuple(own), takes), []).append(i)
        groups, taking = zip(*rows, strict=True)
        self.groups = np.array(groups).T
        self.first, self.last = mixers.cells(self.groups)
        self.allowed = np.array(
            [[i in own for own in rows.values()] for i in range(len(self.patterns))]
        )
        has = np.array(self.patterns).T[:, :, None] & self.allowed  # [U, P, O]
        self.may_have = np.any(has, axis=1)[:, None, None]
        self.takes = np.array(taking, bool).reshape(len(rows), -1).T

    def bounds(self, grid: Grid, least: Ints, most: Ints) -> tuple[Ints, Ints]:
        """The fewest and the most primary blocks of each option under offsets between two,
        [U, ...]: [..., O]."""
        first, (parts, wholes) = grid.totals[0], grid.ratios(least.ndim - 1)
        some, none = ((wholes - 1 - own) // parts for own in (most, least))  # at most, of no unit
        fewest = np.full((*least.shape[1:], len(self.allowed.T)), first + 1)
        largest = np.full_like(fewest, -1)
        for pattern, allowed in zip(self.patterns, self.allowed, strict=True):
            low = np.max(
                [s + 1 if has else 0 * s for s, has in zip(some, pattern, strict=True)], axis=0
            )
            high = np.min(
                [0 * n + first if has else n for n, has in zip(none, pattern, strict=True)], axis=0
            )
            fewest = np.where(allowed, np.minimum(fewest, low[..., None]), fewest)
            largest = np.where(allowed, np.maximum(largest, high[..., None]), largest)
        return fewest, largest
