"""gemma4 (text): two kinds of layers with other head dims, shared caches, layer inputs, and maybe
experts beside the dense MLP."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jaxllm.errors import ModelError
from jaxllm.gguf.metadata import Metadata
from jaxllm.models.config import Columns, LayerConfig, ModelConfig
from jaxllm.models.decoder import DecoderBlock
from jaxllm.models.experts import RoutedMLP
from jaxllm.models.family import Family, Tensors, read_layer, read_model, read_positive
from jaxllm.models.inputs import LayerGate
from jaxllm.models.layers import Array, Heads, Norm, param
from jaxllm.models.parts import SANDWICH
from jaxllm.models.routing import Routing


class MixtureNorms(nnx.Module):
    """The norms of a layer with experts beside its dense MLP: what experts and their router read
    are norms of one residual, and either output has a norm before the two are added."""

    def __init__(self, cfg: LayerConfig, embed: int):
        def norm(source: str) -> Norm:
            return Norm(embed, cfg.eps, source, cfg.norm)

        self.embed = embed
        self.read, self.route = norm("pre_ffw_norm_2.weight"), norm("ffn_gate_inp.scale")
        self.dense_post = norm("post_ffw_norm_1.weight")
        self.experts_post = norm("post_ffw_norm_2.weight")

    def routed(self, ffn: RoutedMLP, x: Array) -> Array:
        """The residual x [B, T, D] through the experts: a partial [B, T, D]."""
        route = self.route(x.astype(jnp.float32)) / sqrt(self.embed)
        return ffn.routed(self.read(x), route)

    def finish(self, total: Array) -> Array:
        """The sum over devices of what experts gave and, after it, of what the dense MLP did
        [B, T, 2 D] -> [B, T, D]."""
        experts, dense = jnp.split(total, 2, axis=-1)
        return self.experts_post(experts) + self.dense_post(dense)


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
        self.mixture = None if cfg.experts is None else MixtureNorms(cfg, embed)

    def project(self, x: Array) -> Heads:
        return super().project(x[..., : self.embed])

    def join_attention(self, x: Array, total: Array) -> tuple[Array, Array]:
        joined, read = super().join_attention(x[..., : self.embed], total)
        return jnp.concatenate([joined, x[..., self.embed :]], axis=-1), read

    def _mlp_read(self, joined: Array, x: Array) -> Array:
        return joined if self.mixture is not None else super()._mlp_read(joined, x)

    def end_mlp(self, begun: Any, total: Array | None) -> Array:
        if self.mixture is None:
            return super().end_mlp(begun, total)
        assert isinstance(self.ffn, RoutedMLP) and self.ffn.shared is not None
        dense = self.ffn.shared(super()._mlp_read(begun, begun))
        return jnp.concatenate([self.mixture.routed(self.ffn, begun), dense], axis=-1)

    def join_mlp(self, x: Array, total: Array) -> Array:
        total = total if self.mixture is None else self.mixture.finish(total)
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
        routing=Routing(shared=""),
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
        if layer.experts is not None and not layer.experts.shared:
            raise ModelError(
                f"{prefix}ffn_down.weight is missing; a layer with experts needs the dense MLP "
                "beside them, so use another file"
            )
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
