"""A residual that begins anew every some layers, the ones before it kept beside it (Kimi K3).

The residual is [B, T, D (1 + M)]: the newest in the first D channels, then those that were kept,
oldest first, and zeros for those to come. What a half of a layer reads is a mixture of those that
there are, weighed by a softmax of scores.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.models.layers import Array, normalise, param


class KeptMix(nnx.Module):
    """The mixture, by a score of each residual when normalised."""

    def __init__(self, embed: int, eps: float, source: str):
        self.score = param((embed,), ("embed",), (source,), jnp.dtype(jnp.float32))
        self.eps = eps

    def __call__(self, x: Array, kept: int) -> Array:
        """The newest of x [B, T, D (1 + M)] and the first so many kept -> [B, T, D]."""
        score = self.score[...]
        size = score.shape[0]
        if kept == 0:
            return x[..., :size]
        parts = x[..., : size * (1 + kept)].astype(jnp.float32)
        parts = parts.reshape(*x.shape[:-1], 1 + kept, size)
        scores = jnp.sum(normalise(parts, "rms", self.eps) * score, axis=-1, keepdims=True)
        return jnp.sum(jax.nn.softmax(scores, axis=-2) * parts, axis=-2).astype(x.dtype)
