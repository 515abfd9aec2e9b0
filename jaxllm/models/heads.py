"""What a layer does to its queries, keys and attention output head by head: norms, gates and
slopes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxllm.models.config import LayerConfig
from jaxllm.models.layers import Array, linear, matrix, normalise, param


class HeadNorms(nnx.Module):
    """The norms of queries and keys of a device's own heads; `LayerConfig.norm_heads` says over
    what they go. One over the whole projection is given the sums of squares over all devices."""

    def __init__(self, cfg: LayerConfig, kv_heads: int):
        self.cfg, self.eps = cfg, cfg.eps
        axes = ("kv_group", "head_rows", "head_dim")

        def weight(side: str, heads: int) -> nnx.Param | None:
            if cfg.norm_heads == "bare":
                return None
            source, f32 = (f"attn_{side}_norm.weight",), jnp.dtype(jnp.float32)
            if cfg.norm_heads == "one":
                return param((cfg.k_dim,), axes[2:], source, f32)
            if cfg.norm_heads == "each":
                shape = (kv_heads, heads, cfg.k_dim)
                return param(shape, axes, source, f32, form=f"{side}_heads")
            shape = (kv_heads, heads * cfg.k_dim)
            return param(shape, axes[:2], source, f32, form=f"{side}_heads")

        self.q = weight("q", cfg.q_per_kv)
        self.k = weight("k", 1) if cfg.owns_cache else None

    def squares(self, q: Array, k: Array) -> Array:
        """Sums of squares [B, T, 2] of q [B, T, K, G, H] and k [B, T, K, H], over own heads."""
        parts = [x.astype(jnp.float32).reshape(*x.shape[:2], -1) for x in (q, k)]
        return jnp.stack([jnp.sum(x * x, axis=-1) for x in parts], axis=-1)

    def __call__(
        self, q: Array, k: Array | None, squares: Array | None
    ) -> tuple[Array, Array | None]:
        """Normalised q [B, T, K, G, H] and, where the layer has keys, k [B, T, K, H]."""
        if k is None:
            return self._weigh(q, self.q, None), None
        if self.cfg.norm_heads != "all":
            return self._weigh(q, self.q, None), self._weigh(k, self.k, None)
        assert squares is not None
        heads = self.cfg.kv_heads * self.cfg.k_dim
        counts = np.asarray([heads * self.cfg.q_per_kv, heads], np.float32)
        scales = lax.rsqrt(squares / counts + self.eps)
        return self._weigh(q, self.q, scales[..., 0]), self._weigh(k, self.k, scales[..., 1])

    def _weigh(self, x: Array, weight: nnx.Param | None, scale: Array | None) -> Array:
        y = x.astype(jnp.float32)
        if scale is None:
            y = normalise(y, self.cfg.norm.kind, self.eps)
        else:
            y = y * scale.reshape(*scale.shape, *(1,) * (x.ndim - 2))
        if weight is None:
            return y.astype(x.dtype)
        w = weight[...]
        return (y * (w if w.ndim == 1 else w.reshape(x.shape[2:]))).astype(x.dtype)


class HeadsGate(nnx.Module):
    """A gate on the attention output of a device's own heads, made of what attention reads."""

    def __init__(self, cfg: LayerConfig, kv_heads: int, embed: int, dtype: jnp.dtype):
        self.kind, rows = cfg.out_gate_kind, cfg.q_per_kv * cfg.out_gate
        axes = ("kv_group", "head_rows", "embed")
        name, form = ("attn_q", "q_gates") if cfg.gated_q else ("attn_gate", "q_heads")
        self.weight = matrix((kv_heads, rows, embed), axes, (f"{name}.weight",), dtype, form=form)

    def __call__(self, o: Array, x: Array) -> Array:
        """o [B, T, K, G, Hv] times the gate of x [B, T, D]."""
        w = self.weight[...]
        y = linear(x, w.reshape(-1, w.shape[-1])).reshape(*o.shape[:4], -1).astype(jnp.float32)
        gate = jax.nn.sigmoid(y) if self.kind == "sigmoid" else jax.nn.softplus(y)
        return (o * gate).astype(o.dtype)


def alibi_slopes(heads: int, largest: float) -> np.ndarray:
    """The slope of each query head's linear bias: float32 [heads] (Press et al. 2022)."""
    power = 1 << (heads.bit_length() - 1)
    first = 2.0 ** (-largest / power * np.arange(1, power + 1))
    between = 2.0 ** (-largest / 2 / power * np.arange(1, 2 * (heads - power), 2))
    return np.concatenate([first, between]).astype(np.float32)
