"""Indexers: which earlier positions a query attends to, by heads of their own.

In DeepSeek-V3.2 every position has one small key beside its latent vector. A query asks all keys
that it sees with a few heads; a key's score is the weighted sum of their products, those below zero
left out, and the `top_k` best keys are attended to (`jaxllm.cache.sparse`). Every device that has
heads of the layer scores alike.

In MiniMax-M3 there is one small key a position too, and one head that asks for each KV group; a
block of keys is as good as the best of them (`jaxllm.cache.blocks`).
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx

from jaxllm.models import parts
from jaxllm.models.config import LayerConfig
from jaxllm.models.layers import Array, Norm, linear, matrix, param
from jaxllm.models.parts import NormStyle
from jaxllm.models.rope import RopeTable

EPS = 1e-6  # of the norm of keys, which no file says


class Indexer(nnx.Module):
    """Makes the small keys and what is asked of them."""

    def __init__(self, cfg: LayerConfig, embed: int, dtype: jnp.dtype):
        own, latent = cfg.indexer, cfg.latent
        assert isinstance(own, parts.Indexer) and latent is not None
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


class BlockIndexer(nnx.Module):
    """Makes index keys, and the index queries of own KV groups. Both stand after the values until
    they are turned to their positions."""

    def __init__(self, cfg: LayerConfig, kv_heads: int, embed: int, dtype: jnp.dtype):
        own = cfg.indexer
        assert isinstance(own, parts.BlockIndexer)
        self.cfg = own
        axes, name = ("kv_group", "head_rows", "embed"), "indexer.{}.weight".format
        shape = (kv_heads, own.dim, embed)
        self.q = matrix(shape, axes, (name("q_proj"),), dtype, form="k_heads")
        self.k = matrix((own.dim, embed), ("latent", "embed"), (name("k_proj"),), dtype)
        self.q_norm, self.k_norm = (
            Norm(own.dim, cfg.eps, name(f"{side}_norm"), axis="latent") for side in "qk"
        )
        self.rope = RopeTable(own.rope)

    def __call__(self, x: Array, v: Array) -> Array:
        """x [B, T, D] and values [B, T, K, Hv] -> [B, T, K, Hv + 2 Hi]."""
        w = self.q[...]
        asks = linear(x, w.reshape(-1, w.shape[-1])).reshape(*v.shape[:3], self.cfg.dim)
        k = self.k_norm(linear(x, self.k[...]))[:, :, None]
        return jnp.concatenate([v, jnp.broadcast_to(k, asks.shape), self.q_norm(asks)], axis=-1)

    def turn(self, k: Array, v: Array, positions: Array) -> tuple[Array, Array]:
        """Keys [B, T, K, H] and what `__call__` gave, turned: [B, T, K, H + Hi], as the cache has
        them, and [B, T, K, Hv + Hi], what is asked after the values."""
        dim = self.cfg.dim
        v, small, asks = jnp.split(v, [v.shape[-1] - 2 * dim, v.shape[-1] - dim], axis=-1)
        small, asks = self.rope(positions, small, asks)
        return jnp.concatenate([k, small], axis=-1), jnp.concatenate([v, asks], axis=-1)
