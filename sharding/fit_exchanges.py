"""Exchanges and programs of a step where every layer is cut, by the devices of each layer."""

from __future__ import annotations

import numpy as np

from sharding.fit_tables import Floats, Tables

ONE, SEVERAL, EITHER = 0, 1, 2  # whether devices are in one host, in several, or that is not known


class Exchanges:
    """For cuts over `n` devices; sets are `Tables.sets`. Where devices are is a number: that of
    their host, or `several`.

    Attributes:
        hosts, several: of each device, [R], and how many there are.
        places: where the devices of a cut may be.
        least: seconds of exchanges in a step of each kind that all used devices take part in, by
            whether they are in several hosts, [2, 2].
        set_least: the same of a set with p devices or more, [3, 2, sets, n + 1].
        starts, set_starts: of the host thread, [2] and [2, sets, n + 1].
    """

    def __init__(self, tables: Tables, n: int):
        t, fabric = tables, tables.mesh.fabric
        counts = np.arange(len(t.cap) + 1)
        names = [fabric.host(d) for d in range(len(t.cap))]
        self.hosts = np.array([sorted(set(names)).index(name) for name in names])
        self.several = int(self.hosts.max()) + 1
        sizes = np.bincount(self.hosts)
        self.places = [int(host) for host in np.flatnonzero(sizes >= n)]
        self.places += [self.several] if self.several > 1 else []
        exchanges, self._layers = t.everywhere
        self._everywhere = exchanges + 1  # that of embeddings
        self._count = np.array([each.exchanges for each in t.sets])
        apart = 0, int(fabric.devices_per_host or 0)  # a device of the same host, of another
        self._seconds = np.array(  # [2 wires, 2, R + 1]
            [
                [
                    [fabric.exchange_seconds([0] * (p - 1) + [d], s.payload, False) for p in counts]
                    for s in t.stages
                ]
                for d in apart
            ]
        )
        own = self._seconds[..., : n + 1]
        own = np.concatenate((own, own.min(0, keepdims=True)))
        own = np.minimum.accumulate(own[..., ::-1], axis=-1)[..., ::-1]
        self.least = self._everywhere * self._seconds[..., n]
        self.set_least = self._count[:, None] * own[:, :, None]
        self._each = fabric.dispatch_us * 1e-6
        self._programs = counts * np.where(counts > 1, 2, 1)
        self._set_layers = np.array([s.layers for s in t.sets])
        self._folds = np.array([s.folds for s in t.sets]).reshape(-1, 2).T  # [2, sets]
        self.starts = np.full(2, self._each * (n + self._layers * self._programs[n]))
        programs = self._set_layers[:, None] * self._programs + self._folds[..., None] * counts
        self.set_starts: Floats = np.asarray(self._each * programs[..., : n + 1], np.float64)

    def known(self, low: Floats, high: Floats) -> np.ndarray:
        """Of bounds of places: whether in one host, in several, or either."""
        return np.where(low < high, EITHER, np.where(low < self.several, ONE, SEVERAL))

    def of_sets(self, wires: np.ndarray, counts: np.ndarray, s: int) -> tuple[Floats, Floats]:
        """Least seconds of exchanges, and of the host thread, of each set with so many devices in
        such places, [N, sets], in a step of a kind."""
        each = np.arange(counts.shape[1])
        return self.set_least[wires, s, each, counts], self.set_starts[s, each, counts]

    def seconds(self, used: np.ndarray, takes: np.ndarray) -> tuple[Floats, Floats, np.ndarray]:
        """Of exchanges and of the host thread in a step of each kind, [2, N], for devices that take
        part in any layer, [N, R], and in sets, [sets, N, R]; and where these are, [sets, N]."""
        both = np.concatenate((used[None], takes))
        counts = both.sum(2)
        first = np.where(both, self.hosts, self.several).min(2)
        places = np.where(first < np.where(both, self.hosts, -1).max(2), self.several, first)
        wires = (places == self.several) & (counts > 0)
        each = self._seconds[wires.astype(int), :, counts]  # [1 + sets, N, 2]
        programs = self._programs[counts]
        starts = counts[0] + self._layers * programs[0] + self._set_layers @ programs[1:]
        found = self._everywhere * each[0].T + np.einsum("c,cns->sn", self._count, each[1:])
        return found, self._each * (starts + self._folds @ counts[1:]), places[1:]
