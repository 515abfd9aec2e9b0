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

from jaxllm.models.config import LayerConfig
from jaxllm.models.layers import Array, HeadsOut, Norm, linear, matrix, param, precision_of

GROUP = ("kv_group", "head_rows")


class LatentQKV(nnx.Module):
    """Queries in the space of the latent vector, and the vector itself as the key."""

    def __init__(self, cfg: LayerConfig, kv_heads: int, embed: int, dtype: jnp.dtype):
        latent = cfg.latent
        assert latent is not None
        self.cfg, width, rope = cfg, latent.q_rank, cfg.k_dim - cfg.v_dim
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
        self.latent = matrix((cfg.k_dim, embed), axes, ("attn_kv_a_mqa.weight",), dtype)
        self.norm = Norm(cfg.v_dim, cfg.eps, "attn_kv_a_norm.weight", axis="latent")
        self.keys = param(
            (kv_heads, cfg.q_per_kv, cfg.v_dim, latent.nope),
            (*GROUP, "latent", "head_dim"),
            ("attn_k_b.weight",),
            dtype,
            form="q_heads",
        )

    def __call__(self, x: Array) -> tuple[Array, Array, Array]:
        """x [B, T, D] -> q [B, T, K, G, H], k [B, T, K, H], no v [B, T, K, 0]."""
        cfg, w = self.cfg, self.q[...]
        assert cfg.latent is not None
        narrow = x
        if self.q_down is not None and self.q_norm is not None:
            narrow = self.q_norm(linear(x, self.q_down[...]))
        q = linear(narrow, w.reshape(-1, w.shape[-1]))
        q = q.reshape(*x.shape[:2], len(w), cfg.q_per_kv, -1)
        q, q_r = jnp.split(q, [cfg.latent.nope], axis=-1)
        q = jnp.einsum("btkgh,kgch->btkgc", q, self.keys[...], precision=precision_of(q))
        c, r = jnp.split(linear(x, self.latent[...]), [cfg.v_dim], axis=-1)
        k = jnp.concatenate([r, self.norm(c)], axis=-1)[:, :, None]
        k = jnp.broadcast_to(k, (*x.shape[:2], len(w), cfg.k_dim))
        return jnp.concatenate([q_r, q], axis=-1), k, k[..., :0]


class LatentOut(nnx.Module):
    """From weighted latent vectors to the partial of this device's own heads."""

    def __init__(self, cfg: LayerConfig, kv_heads: int, embed: int, dtype: jnp.dtype):
        latent = cfg.latent
        assert latent is not None
        self.values = param(
            (kv_heads, cfg.q_per_kv, latent.v_dim, cfg.v_dim),
            (*GROUP, "head_dim", "latent"),
            ("attn_v_b.weight",),
            dtype,
            form="q_heads",
        )
        self.out = HeadsOut(replace(cfg, v_dim=latent.v_dim), kv_heads, embed, dtype)

    def heads(self, o: Array) -> Array:
        """Weighted latent vectors [B, T, K, G, C] -> values of heads [B, T, K, G, Hv]."""
        return jnp.einsum("btkgc,kghc->btkgh", o, self.values[...], precision=precision_of(o))

    def __call__(self, o: Array) -> Array:
        """o [B, T, K, G, Hv] -> [B, T, D], to be summed over devices."""
        return self.out(o)

    def finish(self, total: Array, dtype: jnp.dtype) -> Array:
        """What is added to the residual [B, T, D], of the sum over devices."""
        return self.out.finish(total, dtype)
