"""kimi-k3: Kimi delta attention and gated latent attention over a residual that begins anew."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import jax.numpy as jnp

from jaxllm.errors import ModelError
from jaxllm.gguf.metadata import Metadata
from jaxllm.models.config import Columns, LayerConfig, ModelConfig
from jaxllm.models.decoder import DecoderBlock
from jaxllm.models.family import Family, Tensors, read_layer, read_model
from jaxllm.models.kept import KeptMix
from jaxllm.models.kimi import mixed_layers
from jaxllm.models.layers import Array
from jaxllm.models.routing import Routing


class KeptBlock(DecoderBlock):
    """A DecoderBlock whose halves read mixtures of residuals: see `jaxllm.models.kept`."""

    def __init__(
        self, cfg: LayerConfig, kv_heads: int, columns: Columns, embed: int, dtype: jnp.dtype
    ):
        super().__init__(cfg, kv_heads, columns, embed, dtype)
        self.embed = embed
        self.attn_mix = KeptMix(embed, cfg.eps, "attn_res_score.weight")
        self.mlp_mix = KeptMix(embed, cfg.eps, "ffn_res_score.weight")

    def _read(self, x: Array) -> Array:
        return super()._read(self.attn_mix(x, self.cfg.earlier))

    def join_attention(self, x: Array, total: Array) -> tuple[Array, Array]:
        newest, kept = jnp.split(x, (self.embed,), axis=-1)
        begun = newest
        if self.cfg.begins_anew:
            place = self.cfg.earlier * self.embed
            kept = kept.at[..., place : place + self.embed].set(newest)
            begun = jnp.zeros_like(newest)
        joined, _ = super().join_attention(begun, total)
        x = jnp.concatenate([joined, kept], axis=-1)
        mixed = self.mlp_mix(x, self.cfg.earlier + self.cfg.begins_anew)
        return x, self._mlp_read(mixed, mixed)

    def join_mlp(self, x: Array, total: Array) -> Array:
        newest, kept = jnp.split(x, (self.embed,), axis=-1)
        return jnp.concatenate([super().join_mlp(newest, total), kept], axis=-1)


def configure(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """Nothing is turned to its position; files whose residual never begins anew are refused."""
    every = meta.require("attn_res.block_size", int)
    if every < 1:
        raise ModelError(f"{meta.architecture}.attn_res.block_size is {every}; expected at least 1")
    keys = "activation.situ_beta", "activation.situ_linear_beta"
    situ = tuple(meta.require(key, float) for key in keys)
    if not situ[0] > 0.0:
        raise ModelError(f"{meta.architecture}.activation.situ_beta is {situ[0]}; expected above 0")
    layers = read_layer(
        meta,
        tensors,
        None,
        routing=Routing("sigmoid", scores_key=True, normalised=None),
        partial=True,
        activation="situ",
        situ=situ,
    )
    floor = float(meta.get("kda.gate_lower_bound", -inf))
    layers = mixed_layers(meta, tensors, layers, floor if floor > -inf else None, sign=-1)
    layers = [
        replace(own, earlier=-(-i // every), begins_anew=i % every == 0)
        for i, own in enumerate(layers)
    ]
    return read_model(meta, tensors, layers, kept=-(-len(layers) // every))


FAMILY = Family(KeptBlock, configure)
