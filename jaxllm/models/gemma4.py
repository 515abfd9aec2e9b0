"""gemma4 (text, dense): two kinds of layers with other head dims, shared caches, layer inputs."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import jax.numpy as jnp

from jaxllm.errors import ModelError
from jaxllm.gguf.metadata import Metadata
from jaxllm.models.config import SANDWICH, Columns, LayerConfig, ModelConfig
from jaxllm.models.decoder import DecoderBlock
from jaxllm.models.family import Family, Tensors, read_layer, read_model, read_positive
from jaxllm.models.inputs import LayerGate
from jaxllm.models.layers import Array, Heads, param


class Gemma4Block(DecoderBlock):
    """A DecoderBlock over the first D channels of the residual. The inputs of all layers follow: a
    layer reads the first of them and moves them to the end, so that all layers are alike."""

    def __init__(
        self, cfg: LayerConfig, kv_heads: int, columns: Columns, embed: int, dtype: jnp.dtype
    ):
        super().__init__(cfg, kv_heads, columns, embed, dtype)
        self.embed, inputs = embed, cfg.inputs
        self.inputs = LayerGate(cfg, inputs, embed, dtype) if inputs else None
        f32, name = jnp.dtype(jnp.float32), ("layer_output_scale.weight",)
        self.scale = param((1,), ("embed",), name, f32) if cfg.out_scale else None

    def project(self, x: Array) -> Heads:
        return super().project(x[..., : self.embed])

    def join_attention(self, x: Array, total: Array) -> tuple[Array, Array]:
        joined, read = super().join_attention(x[..., : self.embed], total)
        return jnp.concatenate([joined, x[..., self.embed :]], axis=-1), read

    def join_mlp(self, x: Array, total: Array) -> Array:
        joined = super().join_mlp(x[..., : self.embed], total)
        kept = x[..., self.embed :]
        if self.inputs is not None:
            joined = joined + self.inputs(joined, kept[..., : self.cfg.inputs])
            kept = jnp.roll(kept, -self.cfg.inputs, axis=-1)
        if self.scale is not None:
            joined = joined * self.scale[...].astype(x.dtype)
        return jnp.concatenate([joined, kept], axis=-1)


def configure(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """Layers with a window have a head dim and a rope base of their own, and no frequency factors.
    The last layers may read the caches of earlier ones; their own keys and values are not used."""
    embed, window = meta.require("embedding_length", int), _window(meta)
    inputs = int(meta.get("embedding_length_per_layer_input", 0))
    layers = read_layer(
        meta,
        tensors,
        "halves",
        activation="gelu",
        norms=SANDWICH,
        scale=1.0,
        norm_heads="one",
        v_norm=True,
        inputs=inputs,
    )
    windowed = meta.per_layer("attention.sliding_window_pattern", len(layers))
    shared = int(meta.get("attention.shared_kv_layers", 0))
    if not 0 <= shared < len(layers):
        raise ModelError(f"attention.shared_kv_layers is {shared} of {len(layers)} layers")
    key = "rope.freq_base_swa"
    theta = read_positive(meta, key, meta.get(key, 10000.0))
    dim = meta.require("attention.key_length_swa", int)
    turned = int(meta.get("rope.dimension_count_swa", dim))

    def adapt(i: int, layer: LayerConfig) -> LayerConfig:
        prefix = f"blk.{i}."
        layer = replace(
            layer,
            owns_cache=i < len(layers) - shared,
            v_from_k=f"{prefix}attn_v.weight" not in tensors,
            out_scale=f"{prefix}layer_output_scale.weight" in tensors,
        )
        if not windowed[i]:
            return layer
        local = layer.with_rope(theta=theta, dim=turned, scale=1.0, factors=None)
        return replace(local, window=window, k_dim=dim, v_dim=dim)

    unused = [
        f"blk.{i}.attn_{part}.weight"
        for i in range(len(layers) - shared, len(layers))
        for part in ("k", "v", "k_norm")
    ]
    return read_model(
        meta,
        tensors,
        [adapt(i, layer) for i, layer in enumerate(layers)],
        embed_scale=sqrt(embed),
        layer_inputs=inputs,
        logit_softcap=float(meta.get("final_logit_softcapping", 0.0)) or None,
        unused=tuple(unused),
    )


def _window(meta: Metadata) -> int:
    window = meta.require("attention.sliding_window", int)
    if window < 1:
        raise ModelError(f"attention.sliding_window is {window}; it must be at least 1")
    return window


FAMILY = Family(Gemma4Block, configure)
