"""Rotary position embeddings: which angles a layer turns its queries and keys by."""

from __future__ import annotations

from math import ceil, floor, log, pi

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxllm.models.layers import Array, param
from jaxllm.models.parts import Rope, Yarn


class RopeTable(nnx.Module):
    """Rotation of queries and keys; holds the frequency factors where a model has them."""

    def __init__(self, rope: Rope | None):
        self.rope = rope
        self.factors = (
            param(
                (rope.factor_rows or rope.dim // 2,),
                ("rope",),
                (f"/{rope.factors}",),
                jnp.dtype(jnp.float32),
            )
            if rope is not None and rope.factors is not None
            else None
        )

    def __call__(self, positions: Array, *xs: Array) -> tuple[Array, ...]:
        """Rotate each x [B, T, ..., H] at positions [B, T]; dims past `rope.dim` pass through."""
        if self.rope is None:
            return xs
        cos, sin = self.turns(self.rope, positions)
        return tuple(_rotate(self.rope, x, cos, sin) for x in xs)

    def turns(self, rope: Rope, positions: Array) -> tuple[Array, Array]:
        """Cosines and sines [B, T, dim / 2] of the angles at positions [B, T]."""
        freq = rope.theta ** (-jnp.arange(0, rope.dim, 2, dtype=jnp.float32) / rope.dim)
        if self.factors is not None:
            freq = freq / self.factors[...][: rope.dim // 2]
        at = positions.astype(jnp.float32)
        if rope.yarn is None:
            at = at / rope.scale
        else:
            freq = freq * yarn_scales(rope, rope.yarn)
        angle = at[..., None] * freq
        return jnp.cos(angle) * rope.magnitude, jnp.sin(angle) * rope.magnitude


def yarn_scales(rope: Rope, yarn: Yarn) -> np.ndarray:
    """What YaRN multiplies each frequency by: float32 [dim/2]."""

    def pair_that_turns(times: float) -> float:
        return rope.dim * log(yarn.context / (times * 2 * pi)) / (2 * log(rope.theta))

    low = max(0, floor(pair_that_turns(yarn.fast)))
    high = min(rope.dim - 1, ceil(pair_that_turns(yarn.slow)))
    ramp = (np.arange(rope.dim // 2) - low) / max(0.001, high - low)
    kept = yarn.mix * (1.0 - np.clip(ramp, 0.0, 1.0))
    return ((1.0 - kept) / rope.scale + kept).astype(np.float32)


def _rotate(rope: Rope, x: Array, cos: Array, sin: Array) -> Array:
    y = x[..., : rope.dim].astype(jnp.float32)
    middle = (1,) * (x.ndim - 3)
    cos = cos.reshape(*cos.shape[:2], *middle, -1)
    sin = sin.reshape(*sin.shape[:2], *middle, -1)
    if rope.pairs == "halves":
        a, b = jnp.split(y, 2, axis=-1)
        y = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    else:
        a, b = y[..., 0::2], y[..., 1::2]
        y = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(y.shape)
    y = y.astype(x.dtype)
    return y if rope.dim == x.shape[-1] else jnp.concatenate([y, x[..., rope.dim :]], axis=-1)
