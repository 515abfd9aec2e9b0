"""minicpm3: latent attention whose file says the sizes of the heads, and MiniCPM's scales."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

from jaxllm.gguf.metadata import Metadata
from jaxllm.models.config import LayerConfig, ModelConfig
from jaxllm.models.decoder import DecoderBlock
from jaxllm.models.family import Family, Tensors, read_layer, read_model
from jaxllm.models.parts import Latent

# What files do not say: it is the same in all of them.
EMBED_SCALE, DEPTH_SCALE, BASE_WIDTH = 12.0, 1.4, 256


def configure(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """Attention is absorbed: one latent vector is cached in the place of the heads."""
    layers = read_layer(meta, tensors, "halves")
    residual = DEPTH_SCALE / sqrt(len(layers))
    return read_model(
        meta,
        tensors,
        [replace(_latent(meta, layer), residual_scale=residual) for layer in layers],
        embed_scale=EMBED_SCALE,
        logit_scale=BASE_WIDTH / meta.require("embedding_length", int),
    )


def _latent(meta: Metadata, layer: LayerConfig) -> LayerConfig:
    """The layer with one KV head in the place of those that its file says."""
    rank, rope = meta.require("attention.kv_lora_rank", int), layer.rope
    assert rope is not None
    return replace(
        layer,
        kv_heads=1,
        q_per_kv=layer.kv_heads * layer.q_per_kv,
        k_dim=rank + rope.dim,
        v_dim=rank,
        latent=Latent(
            q_rank=meta.require("attention.q_lora_rank", int),
            nope=layer.k_dim - rope.dim,
            v_dim=layer.v_dim,
            joined=True,
        ),
    )


FAMILY = Family(DecoderBlock, configure)
