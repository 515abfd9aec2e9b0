"""Giving out units to devices: a dynamic program over devices and the sums of what they have.

Each device takes one of O options, or no part. Every option adds to D sums and is worth something,
to each device its own, or minus infinity where the device cannot take it. Many such questions, one
a box, are answered together.
"""

from __future__ import annotations

import numpy as np

from sharding.fit_tables import Floats


class Sums:
    """All sums up to `most` [D], and which of them an option leads from; `adds` [O, D] is what it
    adds, one device to the first sum."""

    def __init__(self, adds: np.ndarray, most: np.ndarray):
        self._sizes = tuple(int(n) + 1 for n in most)
        self.states = np.indices(self._sizes).reshape(len(self._sizes), -1).T  # [S, D]
        left = self.states[:, None] - adds
        index = np.ravel_multi_index(tuple(np.maximum(left, 0).transpose(2, 0, 1)), self._sizes)
        self._before = np.where((left >= 0).all(2), index, len(self.states))  # S: none, [S, O]

    def best(self, worth: Floats, ends: np.ndarray, least: Floats) -> tuple[np.ndarray, np.ndarray]:
        """In which boxes sums that may be `ends` [N, S] are worth `least` [N] at least, [N], and
        the options that are worth most, -1 for no part, [boxes in which they are, R]; `worth` is
        [N, R, O]."""
        count, devices, _ = worth.shape
        n, size = self._sizes[0] - 1, len(self.states) // self._sizes[0]
        total = np.full((count, len(self.states) + 1), -np.inf)
        total[:, 0] = 0.0
        steps = [total]
        for d in range(devices):
            # Used before: not more than there are, and so many that n can be reached.
            first, last = max(0, n - devices + d), min(d, n - 1) + 1
            rows = slice((first + 1) * size, (last + 1) * size)
            able = np.flatnonzero((worth[:, d] > -np.inf).any(0))
            total = total.copy()  # the device takes no part
            if len(able):
                led = total.take(self._before[rows][:, able], axis=1)
                led += worth[:, d][:, able][:, None]
                np.maximum(total[:, rows], led.max(-1), out=total[:, rows])
            steps.append(total)
        last_total = np.where(ends, total[:, :-1], -np.inf)
        found = last_total.max(1) >= least
        rows = np.flatnonzero(found)
        at, chosen = last_total[rows].argmax(1), np.full((len(rows), devices), -1)
        for d in reversed(range(devices)):
            now, before = steps[d + 1][rows, at], steps[d]
            led = before[rows[:, None], self._before[at]] + worth[rows, d]
            takes = before[rows, at] != now
            option = (led == now[:, None]).argmax(1)
            chosen[:, d] = np.where(takes, option, -1)
            at = np.where(takes, self._before[at, option], at)
        return found, chosen


def in_proportion(least: np.ndarray, most: np.ndarray, total: np.ndarray | int) -> np.ndarray:
    """So many units, [N] or the same everywhere, between bounds [N, R], in proportion to what each
    device can take, each as far from its bound; where all of `least` are more, not all of them."""
    total = np.broadcast_to(np.asarray(total), len(least))[:, None]
    counts = np.clip(total - (least.cumsum(1) - least), 0, least)
    rest, room = total - counts.sum(1, keepdims=True), most - counts
    counts = counts + room * rest // np.maximum(room.sum(1, keepdims=True), 1)
    order = np.argsort(counts - most, axis=1, kind="stable")
    room = np.take_along_axis(most - counts, order, axis=1)
    rest = (total - counts.sum(1, keepdims=True)) - (room.cumsum(1) - room)  # in this order
    more = np.zeros_like(counts)
    np.put_along_axis(more, order, np.clip(rest, 0, room), axis=1)
    return counts + more
