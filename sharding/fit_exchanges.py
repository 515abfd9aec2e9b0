"""Exchanges and programs of a step where every layer is cut, by the devices that take part in it."""

from __future__ import annotations

import numpy as np

from sharding.fit_tables import Floats, Tables


class Exchanges:
    """For cuts over `n` devices. Cuts are in families: all devices in one host, one family a host
    with as many, and then those over several hosts; sets are `Tables.sets`.

    Attributes:
        devices: which may take part in a family's cuts, [F, R].
        least: seconds of exchanges in a step of each kind where all used devices take part, and at
            least of a set with p devices or more, [F, 2] and [F, 2, sets, n + 1].
        starts, set_starts: the same of the host thread, [2] and [2, sets, n + 1].
    """

    def __init__(self, tables: Tables, n: int):
        t, fabric, counts = tables, tables.mesh.fabric, np.arange(n + 1)
        self._hosts = np.array([fabric.host(d) for d in range(len(t.cap))])
        hosts = np.unique(self._hosts)
        apart = fabric.devices_per_host or 0  # a device of another host than the first
        exchanges, layers = t.everywhere
        self._count = np.array([each.exchanges for each in t.sets])
        self._everywhere = exchanges + 1  # that of embeddings
        # By steps, whether over several hosts, and devices, [2, 2, R + 1].
        sizes = range(len(t.cap) + 1)
        self._seconds = np.array(
            [
                [
                    [fabric.exchange_seconds([0] * (p - 1) + [d], s.payload, False) for p in sizes]
                    for d in (0, int(apart))
                ]
                for s in t.stages
            ]
        )
        families = [self._hosts == host for host in hosts if (self._hosts == host).sum() >= n]
        within = [False] * len(families)
        if len(hosts) > 1:
            families, within = [*families, self._hosts >= 0], [*within, True]
        self.devices = np.array(families)
        own = self._seconds[:, :, : n + 1]
        any_ = [own[:, 0], np.where(counts < n, own.min(1), own[:, 1])]
        best = [np.minimum.accumulate(any_[w][:, ::-1], axis=1)[:, ::-1] for w in within]
        found = np.array(best)  # [F, 2, n + 1]
        self.least = self._everywhere * np.array([any_[w][:, n] for w in within])
        self.set_least = self._count[:, None] * found[:, :, None]
        each = fabric.dispatch_us * 1e-6
        self._programs = counts * np.where(counts > 1, 2, 1)
        self._layers, self._set_layers = layers, np.array([s.layers for s in t.sets])
        self._folds = np.array([s.folds for s in t.sets]).reshape(-1, 2).T  # [2, sets]
        self._each = each
        self.starts = np.full(2, each * (n + layers * self._programs[n]))
        programs = self._set_layers[:, None] * self._programs + self._folds[..., None] * counts
        self.set_starts = each * programs

    def seconds(self, used: np.ndarray, takes: np.ndarray) -> tuple[Floats, Floats]:
        """Of exchanges and of the host thread in a step of each kind, [2, N], for devices that take
        part in any layer, [N, R], and in sets, [sets, N, R]."""
        both = np.concatenate((used[None], takes))
        counts = both.sum(2)
        first = np.where(both, self._hosts, len(self._hosts)).min(2)
        several = first < np.where(both, self._hosts, -1).max(2)
        each = self._seconds[:, several.astype(int), counts]  # [2, 1 + sets, N]
        programs = counts * np.where(counts > 1, 2, 1)
        starts = counts[0] + self._layers * programs[0] + self._set_layers @ programs[1:]
        found = self._everywhere * each[:, 0] + np.einsum("c,scn->sn", self._count, each[:, 1:])
        return found, self._each * (starts + self._folds @ counts[1:])
