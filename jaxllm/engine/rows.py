"""One row of a cache: copied to another row, read to host memory and written back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from jaxllm.models.layers import Array

Cached = TypeVar("Cached")  # a ring, a state, or a tree of them


class LayerRow(NamedTuple):
    """A layer's cache of one row in host memory: stored k and v [K, S, row], S positions from
    `first` on."""

    k: np.ndarray
    v: np.ndarray
    first: int

    @property
    def end(self) -> int:
        return self.first + self.k.shape[1]

    def heads(self, start: int, stop: int) -> LayerRow:
        """Some heads alone."""
        return LayerRow(self.k[start:stop], self.v[start:stop], self.first)

    def positions(self, start: int, stop: int) -> LayerRow:
        """Some positions alone, of those that there are."""
        start = max(start, self.first)
        own = slice(start - self.first, max(start, stop) - self.first)
        return LayerRow(self.k[:, own], self.v[:, own], start)

    def ring(self, capacity: int) -> tuple[np.ndarray, np.ndarray]:
        """k and v [K, C, row] with the newest positions p at p mod C, and zeros elsewhere."""
        own = self.positions(self.end - capacity, self.end)
        at = np.arange(own.first, own.end) % capacity

        def place(side: np.ndarray) -> np.ndarray:
            whole = np.zeros((side.shape[0], capacity, side.shape[2]), side.dtype)
            whole[:, at] = side
            return whole

        return place(own.k), place(own.v)


def of_ring(ring: Sequence[np.ndarray], first: int, end: int) -> LayerRow:
    """Positions first .. end of a row of a ring, k and v [K, C, row]."""
    k, v = ring
    at = np.arange(first, end) % k.shape[1]
    return LayerRow(k[:, at], v[:, at], first)


def stack_heads(whole: np.ndarray, ranges: Sequence[tuple[int, int]]) -> np.ndarray:
    """[K, ...] -> [R, ...], each device's range of heads zero-padded to the largest."""
    most = max(stop - start for start, stop in ranges)
    parts = np.zeros((len(ranges), most, *whole.shape[1:]), whole.dtype)
    for part, (start, stop) in zip(parts, ranges, strict=True):
        part[: stop - start] = whole[start:stop]
    return parts


def join_heads(parts: Sequence[np.ndarray], ranges: Sequence[tuple[int, int]]) -> np.ndarray:
    """The heads [K, ...] of the whole model, in order, of parts that may be padded."""
    whole = np.empty((max(stop for _, stop in ranges), *parts[0].shape[1:]), parts[0].dtype)
    for part, (start, stop) in zip(parts, ranges, strict=True):
        whole[start:stop] = part[: stop - start]
    return whole


@partial(jax.jit, static_argnames=("axis",))
def take_row(cache: Cached, row: Array, *, axis: int) -> Cached:
    """A ring, a state or several without their axis of rows: one of them."""

    def one(a: Array) -> Array:
        return jax.lax.dynamic_index_in_dim(a, row, axis, keepdims=False)

    return jax.tree.map(one, cache)


@partial(jax.jit, static_argnames=("axis",), donate_argnames=("cache",))
def put_row(cache: Cached, new: tuple[Any, ...], row: Array, *, axis: int) -> Cached:
    """A ring or a state with one of its rows replaced."""
    update = jax.lax.dynamic_update_index_in_dim
    old, tree = jax.tree.flatten(cache)
    return tree.unflatten([update(a, b, row, axis) for a, b in zip(old, new, strict=True)])


@partial(jax.jit, static_argnames=("axis",), donate_argnames=("cache",))
def take_back(cache: Cached, earlier: Cached, row: Array, at: Array, *, axis: int) -> Cached:
    """States with one of their rows as it was, `earlier` having what it was at several times along
    an axis of its own before that of the rows."""
    new = take_row(take_row(earlier, at, axis=axis), np.int32(0), axis=axis)
    return put_row(cache, tuple(jax.tree.leaves(new)), row, axis=axis)


@partial(jax.jit, static_argnames=("axis",), donate_argnames=("cache",))
def copy_row(cache: Cached, source: Array, target: Array, *, axis: int) -> Cached:
    """Rings and states with the row `target` as `source` is."""
    whole = take_row(cache, source, axis=axis)
    return put_row(cache, tuple(jax.tree.leaves(whole)), target, axis=axis)
