"""An indexer: which earlier positions a query attends to, by heads of its own (DeepSeek-V3.2).

Every position has one small key beside its latent vector. A query asks all keys that it sees with a
few heads; a key's score is the weighted sum of their products, those below zero left out, and the
`top_k` best keys are attended to (`jaxllm.cache.sparse`). Every device that has heads of the layer
scores alike.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx

from jaxllm.models.config import LayerConfig, NormStyle
from jaxllm.models.layers import Array, Norm, linear, matrix, param
from jaxllm.models.rope import RopeTable

EPS = 1e-6  # of the norm of keys, which no file says


class Indexer(nnx.Module):
    """Makes the small keys and what is asked of them."""

    def __init__(self, cfg: LayerConfig, embed: int, dtype: jnp.dtype):
        own, latent = cfg.indexer, cfg.latent
        assert own is not None and latent is not None
        self.cfg, shape = own, (own.heads * own.dim, latent.q_rank)
        self.q = matrix(shape, ("latent", "latent"), ("indexer.attn_q_b.weight",), dtype)
        axes = ("latent", "embed")
        self.k = matrix((own.dim, embed), axes, ("indexer.attn_k.weight",), dtype)
        biases = ("indexer.k_norm.bias",) if own.bias else ()
        style = NormStyle("layer", biases=biases)
        self.norm = Norm(own.dim, EPS, "indexer.k_norm.weight", style, axis="latent")
        shape = (own.heads, embed) if own.heads > 1 else (embed,)  # GGUF drops a dim of one
        source, f32 = ("indexer.proj.weight",), jnp.dtype(jnp.float32)
        self.weights = param(shape, axes[-len(shape) :], source, f32)
        self.rope = RopeTable(own.rope)

    def __call__(self, x: Array, narrow: Array) -> tuple[Array, Array]:
        """x [B, T, D] and the normed low-rank query -> keys [B, T, Hi], not turned yet, and what is
        asked of them [B, T, I (Hi + 1)]: the query of each head, then the weight of each."""
        weights = linear(x.astype(jnp.float32), self.weights[...].reshape(self.cfg.heads, -1))
        asks = jnp.concatenate([linear(narrow, self.q[...]), weights.astype(x.dtype)], axis=-1)
        return self.norm(linear(x, self.k[...])), asks

    def turn(self, k: Array, asks: Array, positions: Array) -> tuple[Array, Array]:
        """Keys [B, T, K, Hi] and what is asked of them [B, T, K, I (Hi + 1)], turned."""
        q, weights = jnp.split(asks, [self.cfg.heads * self.cfg.dim], axis=-1)
        heads = q.reshape(*q.shape[:-1], self.cfg.heads, self.cfg.dim)
        k, heads = self.rope(positions, k, heads)
        return k, jnp.concatenate([heads.reshape(q.shape), weights], axis=-1)
