"""Attention over one latent vector a position (DeepSeek-V2, section 2.1), in its absorbed form.

Keys and values of all heads are linear in a latent vector c, and all heads share a part r that is
turned to the position. A head's score is q_r . r + (K^T q) . c, its output V times the weighted
sum of c. So one KV head [r, c] is cached, whose end is the value, and heads differ in queries and
in what follows attention.
"""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
from flax import nnx

from jaxllm.models import parts
from jaxllm.models.config import LayerConfig
from jaxllm.models.indexer import Indexer
from jaxllm.models.layers import Array, HeadsOut, Norm, linear, matrix, param, precision_of

GROUP = ("kv_group", "head_rows")


class LatentQKV(nnx.Module):
    """Queries in the space of the latent vector, and the vector itself as the key."""

    def __init__(self, cfg: LayerConfig, kv_heads: int, embed: int, dtype: jnp.dtype):
        latent = cfg.latent
        assert latent is not None
        self.cfg, width = cfg, latent.q_rank
        chooses = isinstance(cfg.indexer, parts.Indexer)
        self.indexer = Indexer(cfg, embed, dtype) if chooses else None
        beside = 0 if self.indexer is None else self.indexer.cfg.dim
        rope = cfg.k_dim - cfg.v_dim - beside
        axes = ("latent", "embed")
        source, norm = ("attn_q_a.weight",), "attn_q_a_norm.weight"
        self.q_down = matrix((width, embed), axes, source, dtype) if width else None
        self.q_norm = Norm(width, cfg.eps, norm, axis="latent") if width else None
        self.q = matrix(
            (kv_heads, cfg.q_per_kv * (latent.nope + rope), width or embed),
            (*GROUP, "latent" if width else "embed"),
            ("attn_q_b.weight" if width else "attn_q.weight",),
            dtype,
            form="q_heads",
        )
        self.latent = matrix((rope + cfg.v_dim, embed), axes, ("attn_kv_a_mqa.weight",), dtype)
        self.norm = Norm(cfg.v_dim, cfg.eps, "attn_kv_a_norm.weight", axis="latent")
        if latent.joined:  # of each head what makes its key, then its value
            shape = (kv_heads, cfg.q_per_kv * (latent.nope + latent.v_dim), cfg.v_dim)
            axes, source = (*GROUP, "latent"), ("attn_kv_b.weight",)
        else:
            shape = (kv_heads, cfg.q_per_kv, cfg.v_dim, latent.nope)
            axes, source = (*GROUP, "latent", "head_dim"), ("attn_k_b.weight",)
        self.keys = param(shape, axes, source, dtype, form="q_heads")

    def __call__(self, x: Array) -> tuple[Array, Array, Array]:
        """x [B, T, D] -> q [B, T, K, G, H], k [B, T, K, H], no v [B, T, K, 0], or in its place what
        is asked of an indexer's keys; those stand in k after what is turned."""
        cfg, w = self.cfg, self.q[...]
        assert cfg.latent is not None
        narrow = x
        if self.q_down is not None and self.q_norm is not None:
            narrow = self.q_norm(linear(x, self.q_down[...]))
        q = linear(narrow, w.reshape(-1, w.shape[-1]))
        q = q.reshape(*x.shape[:2], len(w), cfg.q_per_kv, -1)
        q, q_r = jnp.split(q, [cfg.latent.nope], axis=-1)
        keys, sizes = self.keys[...], "kgch"
        if cfg.latent.joined:
            keys, sizes = by_head(cfg, keys)[:, :, : cfg.latent.nope], "kghc"
        q = jnp.einsum(f"btkgh,{sizes}->btkgc", q, keys, precision=precision_of(q))
        c, r = jnp.split(linear(x, self.latent[...]), [cfg.v_dim], axis=-1)
        row, asks = [r, self.norm(c)], c[..., :0]
        if self.indexer is not None:
            small, asks = self.indexer(x, narrow)
            row.insert(1, small)
            q = jnp.pad(q, (*[(0, 0)] * 4, (small.shape[-1], 0)))
        k, asks = (
            jnp.broadcast_to(y[:, :, None], (*x.shape[:2], len(w), y.shape[-1]))
            for y in (jnp.concatenate(row, axis=-1), asks)
        )
        return jnp.concatenate([q_r, q], axis=-1), k, asks

    def turn(self, k: Array, asks: Array, positions: Array) -> tuple[Array, Array]:
        """Keys [B, T, K, H] and what is asked, an indexer's parts of both turned to positions."""
        if self.indexer is None:
            return k, asks
        dim, last = self.indexer.cfg.dim, self.cfg.k_dim - self.cfg.v_dim
        r, small, c = jnp.split(k, [last - dim, last], axis=-1)
        small, asks = self.indexer.turn(small, asks, positions)
        return jnp.concatenate([r, small, c], axis=-1), asks


def by_head(cfg: LayerConfig, joined: Array) -> Array:
    """The rows [K, G (nope + Hv), C] of the joined tensor by head: [K, G, nope + Hv, C]."""
    return joined.reshape(len(joined), cfg.q_per_kv, -1, joined.shape[-1])


class LatentOut(nnx.Module):
    """From weighted latent vectors to the partial of this device's own heads; `keys` is the
    parameter of what stands before attention, which has the values too where they are joined."""

    def __init__(
        self, cfg: LayerConfig, kv_heads: int, embed: int, dtype: jnp.dtype, keys: nnx.Param
    ):
        latent = cfg.latent
        assert latent is not None
        self.cfg = cfg
        self.values = (
            keys
            if latent.joined
            else param(
                (kv_heads, cfg.q_per_kv, latent.v_dim, cfg.v_dim),
                (*GROUP, "head_dim", "latent"),
                ("attn_v_b.weight",),
                dtype,
                form="q_heads",
            )
        )
        self.out = HeadsOut(replace(cfg, v_dim=latent.v_dim), kv_heads, embed, dtype)

    def heads(self, o: Array) -> Array:
        """Weighted latent vectors [B, T, K, G, C] -> values of heads [B, T, K, G, Hv]."""
        latent, values = self.cfg.latent, self.values[...]
        assert latent is not None
        if latent.joined:
            values = by_head(self.cfg, values)[:, :, latent.nope :]
        return jnp.einsum("btkgc,kghc->btkgh", o, values, precision=precision_of(o))

    def __call__(self, o: Array) -> Array:
        """o [B, T, K, G, Hv] -> [B, T, D], to be summed over devices."""
        return self.out(o)

    def finish(self, total: Array, dtype: jnp.dtype) -> Array:
        """What is added to the residual [B, T, D], of the sum over devices."""
        return self.out.finish(total, dtype)
