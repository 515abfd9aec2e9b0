"""Giving out KV groups and MLP blocks: a dynamic program over devices, groups and devices used.

Of each device it is known how many blocks it can take beside each number of groups. All can be
given out exactly when the most blocks that n devices can take, over all ways to give each a number
of groups that sum to the model's, are the model's at least. Many such questions, one a box, are
answered together.
"""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from sharding.fit_tables import Floats


def distribute(
    taken: Floats, n: int, blocks: int, workers: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """In which boxes exactly n devices can take all, [N], and their groups and blocks, [boxes that
    can, R]; `taken` [N, R, K + 1] is how many blocks a device can take beside each number of
    groups, `workers` [N] how many devices may have any groups."""
    count, devices, size = taken.shape
    up = np.arange(size) > 0 if workers is not None else np.zeros(size, bool)  # counted among them
    most = 0 if workers is None else int(min(n, size - 1, workers.max()))
    total = np.full((count, n + 1, most + 1, size), -np.inf)
    total[:, 0, 0, 0] = 0.0
    steps = [total]
    for d in range(devices):
        first, last = max(0, n - devices + d), min(d, n - 1) + 1  # used before, if n can be reached
        before = np.full((count, last - first, most + 1, 2 * size - 1), -np.inf)
        before[..., size - 1 :] = total[:, first:last]
        led = sliding_window_view(before, size, axis=-1)[..., ::-1]  # [..., k, a]: of k - a groups
        own = taken[:, d, None, None, None]
        total = total.copy()  # the device takes no part
        into = total[:, first + 1 : last + 1]
        able = (taken[:, d] >= 0).any(0)
        for some, m in ((~up & able, 0), (up & able, 1)):
            if some.any():
                other = (led[:, :, : most + 1 - m, :, some] + own[..., some]).max(-1)
                np.maximum(into[:, :, m:], other, out=into[:, :, m:])
        steps.append(total)
    ends = total[:, n, :, size - 1]  # [N, most + 1]
    if workers is not None:
        ends = np.where(np.arange(most + 1) <= workers[:, None], ends, -np.inf)
    found = ends.max(1) >= blocks
    rows = np.flatnonzero(found)
    groups, own = np.zeros((2, len(rows), devices), int)
    m, k, used = ends[rows].argmax(1), np.full(len(rows), size - 1), np.full(len(rows), n)
    each, a = np.arange(len(rows)), np.arange(size)
    for d in reversed(range(devices)):
        now, before = steps[d + 1][rows, used, m, k], steps[d]
        left_m, left_k = m[:, None] - up, k[:, None] - a
        led = before[rows[:, None], used[:, None] - 1, left_m, left_k] + taken[rows, d]
        led = (led == now[:, None]) & (left_k >= 0) & (left_m >= 0)
        takes = before[rows, used, m, k] != now  # else the device takes no part
        chosen = np.where(takes, led.argmax(1), 0)
        groups[:, d], own[:, d] = chosen, np.where(takes, taken[rows, d, chosen], 0)
        used, m, k = used - takes, m - up[chosen], left_k[each, chosen]
    return found, groups, _in_proportion(np.where(groups, 0, own > 0), own, blocks)


def _in_proportion(least: np.ndarray, most: np.ndarray, blocks: int) -> np.ndarray:
    """The blocks in proportion to what each device can take, [N, R], each as far from its bound;
    `least` of them to everyone while there are any."""
    counts = least * (least.cumsum(1) <= blocks)
    rest, room = blocks - counts.sum(1, keepdims=True), most - counts
    counts = counts + room * rest // np.maximum(room.sum(1, keepdims=True), 1)
    order = np.argsort(counts - most, axis=1, kind="stable")
    room = np.take_along_axis(most - counts, order, axis=1)
    rest = (blocks - counts.sum(1))[:, None] - (room.cumsum(1) - room)  # for each, in this order
    more = np.zeros_like(counts)
    np.put_along_axis(more, order, np.clip(rest, 0, room), axis=1)
    return counts + more
