"""Biases of attention scores by distance, in buckets (T5, Raffel et al. 2020).

Half of a direction's buckets have one distance each. The others grow by a ratio up to the furthest,
whose bucket has all beyond.
"""

from __future__ import annotations

from math import log

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxllm.models.layers import Array, param
from jaxllm.models.parts import Relative


def bucket(how: Relative, distance: int) -> int:
    """The bucket of a key so many positions before its query, after it if negative."""
    count, first = how.buckets, 0
    if how.both_ways:
        count //= 2
        first = count if distance < 0 else 0
    apart = abs(distance) if how.both_ways else max(0, distance)
    exact = count // 2
    if apart < exact:
        return first + apart
    # Where the logarithms' quotient is a whole number, rounding must not make it less.
    further = log(apart / exact) / log(how.furthest / exact) * (count - exact) + 1e-6
    return first + min(exact + int(further), count - 1)


class RelativeBias(nnx.Module):
    """The biases of a device's own heads."""

    def __init__(self, how: Relative, kv_heads: int, q_per_kv: int):
        self.how = how
        shape, axes = (how.buckets, kv_heads, q_per_kv), ("distance", "kv_group", "head_rows")
        f32 = jnp.dtype(jnp.float32)
        self.table = param(shape, axes, (how.source,), f32, form="columns")

    def __call__(self) -> Array:
        """[K, G, W]: of each distance from -furthest to furthest."""
        most = self.how.furthest
        found = np.asarray([bucket(self.how, n) for n in range(-most, most + 1)])
        return jnp.moveaxis(self.table[...][found], 0, -1)
