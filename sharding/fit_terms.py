"""Seconds of steps where every layer is cut, in terms that each wait for their slowest device.

A step waits in every layer for the slowest device of its mixer, and of its MLP. So of the layers
of one kind the slowest device is one, and each kind is a term; of kinds past the heaviest few the
last term has the sum, whose slowest device is no slower than they are one by one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sharding.fit_memory import TensorMemory
from sharding.fit_options import Options
from sharding.fit_tables import Floats, Stage, Tables, Work
from sharding.fit_units import Ints

MOST_TERMS = 4  # of mixers, and of MLPs
TINY = 1e-30
ALL_STEPS = 4e9  # of a search's dynamic programs; ten seconds or so


class _Kinds:
    """Kinds of layers of one part of a step, in `terms`, each with indexes of its kinds."""

    def __init__(self, work: Work, totals: tuple[int, ...], stage: Stage):
        self.work, self._stage = work, stage
        self._units = work.units / np.maximum(totals, 1)[:, None]  # [K, U, 2]
        all_units = work.whole + work.units.sum(1)
        rates = stage.read[0], stage.flops[0]
        weights = work.layers * (all_units / rates).max(1)
        order = np.argsort(-weights, kind="stable")
        first, rest = order[: MOST_TERMS - 1], order[MOST_TERMS - 1 :]
        self.terms = [np.array([k]) for k in first] + ([rest] if len(rest) else [])

    @property
    def one_total(self) -> list[bool]:
        """Whether all of a term follows one total."""
        totals = [self._units[term].any((0, 2)) for term in self.terms]
        return [int(each.sum()) <= 1 for each in totals]

    def seconds(self, units: Ints, takes: np.ndarray) -> Floats:
        """Of the layers of each kind, [K, ...], for units [U, ...] in sets of layers [sets, ...];
        the last dimension but for options is that of devices."""
        both = np.tensordot(self._units, units, (1, 0))  # [K, 2, ...]
        both += self.work.whole.reshape(*self.work.whole.shape, *[1] * (units.ndim - 1))
        size, operations = both[:, 0], both[:, 1]
        found = np.maximum(size / self._stage.read, operations / self._stage.flops)
        if len(takes):
            out = (self.work.sets >= 0).reshape(-1, *[1] * (units.ndim - 1))
            found = np.where(out, found * takes[np.maximum(self.work.sets, 0)], found)
        return found * self.work.layers.reshape(-1, *[1] * (units.ndim - 1))

    def per_unit(self) -> Floats:
        """Of each term by its bytes and by its operations, a unit of each total, [terms, 2, U, R];
        the larger of both where a kind has units of one total alone."""
        read, flops = self._stage.read, self._stage.flops
        size, operations = self._units[:, :, 0, None] / read, self._units[:, :, 1, None] / flops
        several = ((self._units > 0).any(2).sum(1) > 1)[:, None, None]
        both = np.maximum(size, operations)
        found = np.stack(
            [np.where(several, each, both) for each in (size, operations)], axis=1
        )  # [K, 2, U, R]
        found *= self.work.layers[:, None, None, None]
        return np.array([found[term].sum(0) for term in self.terms])


class Terms:
    """Of one kind of step, for devices with each of the options.

    Attributes:
        constant: where devices take turns, whose sum is the same for every cut.
        mixers: of each term, [A, R, O].
        mlps: of each term by bytes and by operations, a unit of each total, [M, 2, U, R]; the head
            is the last, with `vectors` [R] for a device with any rows.
    """

    def __init__(self, stage: Stage, tables: Tables, options: Options):
        t, self.stage = tables, stage
        self._mixers = _Kinds(stage.mixers, t.mixers.totals, stage)
        self._mlps = _Kinds(stage.mlps, t.mlps.totals, stage)
        by_device = (
            np.broadcast_to(each[..., None], (*each.shape, len(t.cap)))
            for each in (options.groups, options.takes)
        )
        kinds = self._mixers.seconds(*by_device).swapaxes(1, 2)  # [K, R, O]
        self.mixers = np.array([kinds[term].sum(0) for term in self._mixers.terms])
        self._head = (stage.head - stage.vectors) / t.mlps.totals[0]
        head = np.zeros((1, 2, len(t.mlps.totals), len(t.cap)))
        head[0, :, 0] = self._head
        self.mlps = np.maximum(np.concatenate((self._mlps.per_unit(), head)), TINY)
        self.mlps[:, :, 1:][self.mlps[:, :, 1:] <= TINY] = 0.0
        self.vectors, self.constant = stage.vectors, 0.0
        self._shared = t.mesh.fabric.shared
        if self._shared:
            all_of_it = stage.attn.sum(0) + stage.mlp.sum(0) + stage.head
            self.constant = float(all_of_it.min())
            self.mixers, self.vectors = np.zeros_like(self.mixers), np.zeros_like(self.vectors)
            self.mlps = np.where(self.mlps > 0, TINY, 0.0)
        if (self.mlps[:, 0] == self.mlps[:, 1]).all():
            self.mlps = self.mlps[:, :1]
        self._blocks = np.array(t.mlps.totals, float)

    def least(self, n: int) -> tuple[Floats, Floats]:
        """What terms of mixers and of MLPs take at least over n devices, [A] and [M]."""
        mixers = [
            _evenly(term[:, -1], n) if alike else 0.0
            for term, alike in zip(self.mixers, self._mixers.one_total, strict=True)
        ]
        return np.array(mixers), np.array([self.least_of(term, n) for term in self.mlps])

    def least_of(self, term: Floats, n: int) -> float:
        """What blocks that each take so much, [2, U, R], take at least over n devices."""
        each = term.max(0) * self._blocks[:, None]
        return max(_evenly(own, n) for own in each)

    def waits(self, groups: Ints, blocks: Ints, takes: np.ndarray) -> tuple[Floats, Floats]:
        """What terms of mixers and of MLPs take under cuts [U, N, R], [A, N] and [M, N]."""
        count = groups.shape[1]
        if self._shared:
            return np.zeros((len(self.mixers), count)), np.zeros((len(self.mlps), count))
        used = groups.any(0) | (blocks[0] > 0)
        mixers = (self._mixers.seconds(groups, takes) * used).max(2)
        mlps = self._mlps.seconds(blocks, takes[:0]).max(2)
        rows = blocks[0]
        head = np.where(rows > 0, self.vectors + rows * self._head, 0.0).max(1)
        both = (
            [each[term].sum(0) for term in kinds.terms]
            for each, kinds in ((mixers, self._mixers), (mlps, self._mlps))
        )
        own, others = both
        return np.array(own), np.array([*others, head])


def _evenly(seconds: Floats, n: int) -> float:
    """What the n fastest take together for what takes each of them so many seconds."""
    fastest = np.sort(seconds)[:n]
    return float(1 / (1 / fastest).sum()) if fastest.all() else 0.0


class Effort:
    """How many steps a search may still take before it gives up proofs, and the sums of units that
    it has made, which are the same under all options (`sharding.fit_distribute.Sums`)."""

    left = ALL_STEPS

    def __init__(self) -> None:
        self.sums: dict[Any, Any] = {}


class TensorParts:
    """What cuts of one set of tables have in common over any number of devices."""

    def __init__(self, tables: Tables, effort: Effort):
        self.tables, self.effort = tables, effort
        self.options = Options(tables.mixers, tables.mlps, tables.sets)
        self.memory = TensorMemory(tables, self.options)
        self.terms = [Terms(stage, tables, self.options) for stage in tables.stages]
