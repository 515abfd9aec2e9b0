"""The ends of several residual streams (AltUp, Baykal et al. 2023, as in Gemma 3n)."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx

from jaxllm.models.config import ModelConfig
from jaxllm.models.layers import Array, linear, matrix


class Streams(nnx.Module):
    """The first stream is the embedding; the others are projected from it and scaled to its length.
    At the end they are projected back, scaled to the length of the first, and all are averaged."""

    def __init__(self, cfg: ModelConfig, dtype: jnp.dtype):
        self.count, embed = cfg.streams, cfg.embed
        shape, axes = (cfg.streams - 1, embed, embed), ("stream", "embed", "embed")
        source = "/altup_proj.weight", "/altup_unembd_proj.weight"
        self.proj, self.unproj = (
            matrix(shape, axes, (name,), dtype, form="experts_columns") for name in source
        )

    def spread(self, x: Array) -> Array:
        """x [..., D] -> [..., streams * D]."""
        w = self.proj[...]
        others = [_resized(linear(x, w[i]), x) for i in range(self.count - 1)]
        return jnp.concatenate([x, *others], axis=-1)

    def join(self, x: Array) -> Array:
        """x [..., streams * D] -> [..., D]."""
        w, (first, *others) = self.unproj[...], jnp.split(x, self.count, axis=-1)
        back = [_resized(linear(other, w[i]), first) for i, other in enumerate(others)]
        return sum(back, first) / jnp.asarray(self.count, x.dtype)


def _resized(y: Array, like: Array) -> Array:
    """y [..., D] with the length of `like`."""

    def length(x: Array) -> Array:
        return jnp.linalg.norm(x.astype(jnp.float32), axis=-1, keepdims=True)

    return (y * (length(like) / length(y))).astype(y.dtype)
