"""The two block shapes of the plain decoder families."""

from __future__ import annotations

import jax.numpy as jnp

from jaxllm.models.block import Block
from jaxllm.models.config import LayerConfig
from jaxllm.models.experts import RoutedMLP
from jaxllm.models.layers import QKV, Array, GatedMLP, HeadsOut, RMSNorm, RopeTable


class PreNormBlock(Block):
    """x + attn(norm(x)), then x + mlp(norm(x)): llama and its kin."""

    def __init__(self, cfg: LayerConfig, kv_heads: int, columns: int, embed: int, dtype: jnp.dtype):
        self.attn_norm = RMSNorm(embed, cfg.eps, "attn_norm.weight")
        self.qkv = QKV(cfg, kv_heads, embed, dtype)
        names = ("attn_q_norm.weight", "attn_k_norm.weight")
        self.q_norm, self.k_norm = (
            RMSNorm(cfg.k_dim, cfg.eps, name, axis="head_dim") if cfg.qk_norm else None
            for name in names
        )
        self.rope = RopeTable(cfg.rope)
        self.out = HeadsOut(cfg, kv_heads, embed, dtype)
        self.mlp_norm = RMSNorm(embed, cfg.eps, "ffn_norm.weight")
        gated = RoutedMLP if cfg.experts else GatedMLP
        self.gated = gated(cfg, columns, embed, dtype)

    def before_attention(self, x: Array, positions: Array) -> tuple[Array, Array, Array]:
        q, k, v = self.qkv(self.attn_norm(x))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rope(positions, q, k)
        return q, k, v

    def after_attention(self, o: Array) -> Array:
        return self.out(o)

    def mlp(self, x: Array) -> Array:
        return self.gated(self.mlp_norm(x))


class SandwichBlock(PreNormBlock):
    """PreNormBlock with a norm on each full sum before it joins the residual: gemma 2 and 3."""

    def __init__(self, cfg: LayerConfig, kv_heads: int, columns: int, embed: int, dtype: jnp.dtype):
        super().__init__(cfg, kv_heads, columns, embed, dtype)
        self.post_attn_norm = RMSNorm(embed, cfg.eps, "post_attention_norm.weight")
        self.post_mlp_norm = RMSNorm(embed, cfg.eps, "post_ffw_norm.weight")

    def join_attention(self, x: Array, total: Array) -> Array:
        return x + self.post_attn_norm(total)

    def join_mlp(self, x: Array, total: Array) -> Array:
        return x + self.post_mlp_norm(total)
