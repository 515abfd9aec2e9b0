"""Families whose attention is latent: deepseek2 (DeepSeek V2 and V3 and their kin), mistral4, and
with an indexer deepseek32 and glm-dsa."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import log, sqrt

from jaxllm.errors import ModelError
from jaxllm.gguf.metadata import Metadata
from jaxllm.models.config import LayerConfig, ModelConfig
from jaxllm.models.decoder import DecoderBlock
from jaxllm.models.family import Family, Tensors, read_layer, read_model
from jaxllm.models.parts import Follower, Indexer, Latent, Pairs, Temperature
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
    grown = magnitude  # a part of the score scale, not of the rotation
    if rope is not None and rope.yarn is not None:
        grown *= 1.0 + float(meta.get("rope.scaling.yarn_log_multiplier", 0.0)) * log(rope.scale)
    layer = replace(layer, latent=latent, scale=grown * grown / sqrt(k_dim))
    scale = float(meta.get("attention.temperature_scale", 0.0))
    if scale:
        every = meta.require("attention.temperature_length", int)
        layer = replace(layer, temperature=Temperature(every, scale))
    return layer.with_rope(magnitude=magnitude)


def _sparse(meta: Metadata, tensors: Tensors, pairs: Pairs) -> ModelConfig:
    """As `configure`, with an indexer of these rope pairs in every layer but those that attend to
    what an earlier one has chosen."""
    heads, dim, top_k = (
        meta.require(f"attention.indexer.{key}", int)
        for key in ("head_count", "key_length", "top_k")
    )
    routing = Routing("sigmoid", scores_key=True, normalised=None)
    layers = []
    plain = read_layer(meta, tensors, "neighbours", routing=routing)
    chooses = _choosers(meta, len(plain))
    for i, own in enumerate(plain):
        layer = latent_layer(meta, tensors, i, own)
        assert layer.rope is not None
        if not chooses[i]:
            layers.append(replace(layer, indexer=Follower(top_k)))
            continue
        if heads < 1 or top_k < 1 or dim < layer.rope.dim:
            raise ModelError(
                f"the indexer has {heads} heads of {dim} and chooses {top_k} keys; it needs one of "
                f"{layer.rope.dim} at least"
            )
        bias = "blk.0.indexer.k_norm.bias" in tensors
        rope, followed = replace(layer.rope, pairs=pairs), not all(chooses[i + 1 : i + 2])
        indexer = Indexer(heads, dim, top_k, rope, bias, followed)
        layers.append(replace(layer, indexer=indexer, k_dim=layer.k_dim + dim))
    return read_model(meta, tensors, layers)


def _choosers(meta: Metadata, count: int) -> list[bool]:
    """Which layers have an indexer of their own. Where files of glm-dsa do not say it, their
    context tells: all, or the first two and then every fourth from the third on (GLM 5.2)."""
    few = meta.architecture == "glm-dsa" and int(meta.get("context_length", 0)) >= 1 << 20
    usual = [not few or i < 2 or i % 4 == 2 for i in range(count)]
    chooses = list(map(bool, meta.per_layer("attention.indexer.types", count, usual)))
    if not chooses[0]:
        raise ModelError(
            f"the first layer of {meta.architecture} has no indexer and none before it; convert "
            "the model again"
        )
    return chooses


FAMILIES: Mapping[str, Family] = {
    "deepseek2": Family(DecoderBlock, configure),
    "deepseek32": Family(DecoderBlock, partial(_sparse, pairs="halves")),
    "glm-dsa": Family(DecoderBlock, partial(_sparse, pairs="neighbours")),
    "mistral4": Family(DecoderBlock, configure),
}
