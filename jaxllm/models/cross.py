"""Keys and values that a decoder's cross attention reads, made of what an encoder gives."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx

from jaxllm.models.config import LayerConfig
from jaxllm.models.layers import Array, linear, matrix


class KeysValues(nnx.Module):
    """The projections of a layer whose queries belong to another."""

    def __init__(self, cfg: LayerConfig, kv_heads: int, embed: int, dtype: jnp.dtype):
        axes, names = ("kv_group", "head_rows", "embed"), cfg.attn_names
        k, v = (kv_heads, cfg.k_dim, embed), (kv_heads, cfg.v_dim, embed)
        self.k = matrix(k, axes, (f"{names.k}.weight",), dtype, form="k_heads")
        self.v = matrix(v, axes, (f"{names.v}.weight",), dtype, form="k_heads")

    def __call__(self, x: Array) -> tuple[Array, Array]:
        """x [B, T, D] -> k [B, T, K, H] and v [B, T, K, Hv]."""

        def project(weight: nnx.Param) -> Array:
            w = weight[...]
            return linear(x, w.reshape(-1, w.shape[-1])).reshape(*x.shape[:-1], *w.shape[:2])

        return project(self.k), project(self.v)
