"""deepseek2 (DeepSeek V2 and V3 and their kin) and mistral4, whose attention is latent."""

from __future__ import annotations

from dataclasses import replace
from math import log, sqrt

from jaxllm.errors import ModelError
from jaxllm.gguf.metadata import Metadata
from jaxllm.models.config import Latent, LayerConfig, ModelConfig, Temperature
from jaxllm.models.decoder import DecoderBlock
from jaxllm.models.family import Family, Tensors, read_layer, read_model
from jaxllm.models.routing import Routing


def configure(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """Files whose attention is not absorbed are refused."""
    if "blk.0.attn_k_b.weight" not in tensors:
        raise ModelError(
            "blk.0.attn_k_b.weight is missing; convert the model again with a newer tool"
        )
    routing = Routing(scores_key=True, normalised=None)
    layers = read_layer(meta, tensors, "neighbours", routing=routing)
    layers = [latent_layer(meta, tensors, i, layer) for i, layer in enumerate(layers)]
    return read_model(meta, tensors, layers)


def latent_layer(meta: Metadata, tensors: Tensors, index: int, layer: LayerConfig) -> LayerConfig:
    """A layer with the latent attention of the metadata; keys may have a part that all heads share
    and none that turns."""
    k_dim = meta.require("attention.key_length_mla", int)
    rank = meta.require("attention.kv_lora_rank", int)
    rope = layer.rope
    shared = meta.require("rope.dimension_count", int) if rope is None else rope.dim
    if layer.kv_heads != 1 or layer.k_dim != rank + shared or layer.v_dim != rank:
        raise ModelError(
            f"{meta.architecture} has {layer.kv_heads} KV heads of {layer.k_dim} and {layer.v_dim} "
            f"values; latent attention needs one of {rank + shared} and {rank}"
        )
    direct = f"blk.{index}.attn_q.weight" in tensors
    latent = Latent(
        q_rank=0 if direct else meta.require("attention.q_lora_rank", int),
        nope=k_dim - shared,
        v_dim=meta.require("attention.value_length_mla", int),
    )
    magnitude = float(meta.get("rope.scaling.attn_factor", 1.0))
    grown = magnitude
    if (
        rope is not None and rope.yarn is not None
    ):  # its magnitude is a part of the score scale, not of the rotation
        grown *= 1.0 + float(meta.get("rope.scaling.yarn_log_multiplier", 0.0)) * log(rope.scale)
    layer = replace(layer, latent=latent, scale=grown * grown / sqrt(k_dim))
    scale = float(meta.get("attention.temperature_scale", 0.0))
    if scale:
        every = meta.require("attention.temperature_length", int)
        layer = replace(layer, temperature=Temperature(every, scale))
    return layer.with_rope(magnitude=magnitude)


FAMILY = Family(DecoderBlock, configure)
