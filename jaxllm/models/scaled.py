"""Families that scale what they embed, add or put out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import sqrt
from typing import Any

from jaxllm.gguf.metadata import Metadata
from jaxllm.models.config import LayerConfig, ModelConfig
from jaxllm.models.decoder import DecoderBlock
from jaxllm.models.family import (
    Family,
    Tensors,
    read_layer,
    read_model,
    read_positive,
    read_windows,
    with_windows,
)
from jaxllm.models.plain import ONE_NORM
from jaxllm.models.routing import Routing


def granite_layers(meta: Metadata, tensors: Tensors, **layer: Any) -> list[LayerConfig]:
    """Granite's layers; a file may say that there is no rope, and how scores are scaled."""
    residual = float(meta.get("residual_scale", 0.0)) or 1.0
    scale = float(meta.get("attention.scale", 0.0))
    scaled = {"scale": scale} if scale else {}
    pairs = "neighbours" if meta.get("rope.scaling.finetuned", True) else None
    return read_layer(
        meta, tensors, pairs, routing=Routing(), residual_scale=residual, **scaled, **layer
    )


def granite_model(
    meta: Metadata, tensors: Tensors, layers: list[LayerConfig], **model: Any
) -> ModelConfig:
    """Granite's ends around its layers; logits are divided by their scale."""
    key = "logit_scale"
    scale = 1.0 / read_positive(meta, key, meta.require(key))
    embedding = float(meta.get("embedding_scale", 0.0)) or 1.0
    ends = dict(embed_scale=embedding, logit_scale=scale)
    return read_model(meta, tensors, layers, **ends, **model)


def _granite(meta: Metadata, tensors: Tensors) -> ModelConfig:
    return granite_model(meta, tensors, granite_layers(meta, tensors))


def _granite_swa(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """Every layer has sinks; which have a window, and which a rope, is said of each."""
    meta.require("attention.sliding_window", int)
    meta.require("attention.sliding_window_pattern")
    layers = granite_layers(meta, tensors)
    ropes = meta.per_layer("attention.rope_pattern", len(layers), True)
    windows = read_windows(meta, len(layers), period=0)
    layers = [
        replace(layer, window=window, rope=layer.rope if turns else None)
        for layer, window, turns in zip(layers, windows, ropes, strict=True)
    ]
    return granite_model(meta, tensors, layers)


def _minicpm(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """Files that lack a scale mean that of MiniCPM 2B."""
    embed = meta.require("embedding_length", int)
    count = meta.require("block_count", int)
    residual = float(meta.get("residual_scale", 1.4 / sqrt(count))) or 1.0
    key = "logit_scale"
    return read_model(
        meta,
        tensors,
        read_layer(meta, tensors, "neighbours", routing=Routing(), residual_scale=residual),
        embed_scale=float(meta.get("embedding_scale", 12.0)) or 1.0,
        logit_scale=1.0 / read_positive(meta, key, meta.get(key, 256.0 / embed)),
    )


def _gemma(meta: Metadata, tensors: Tensors) -> ModelConfig:
    embed = meta.require("embedding_length", int)
    layers = read_layer(meta, tensors, "halves", activation="gelu")
    return read_model(meta, tensors, layers, embed_scale=sqrt(embed))


def _command_r(meta: Metadata, tensors: Tensors) -> ModelConfig:
    layers = read_layer(meta, tensors, "neighbours", "layer", norms=ONE_NORM, parallel=True)
    return read_model(meta, tensors, layers, logit_scale=float(meta.require("logit_scale")) or 1.0)


def _cohere2(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """Layers with a window rotate; every fourth sees all and does not."""
    layers = read_layer(meta, tensors, "neighbours", "layer", norms=ONE_NORM, parallel=True)
    windows = read_windows(meta, len(layers), period=4)
    layers = with_windows(layers, windows, rope_everywhere=False)
    return read_model(meta, tensors, layers, logit_scale=float(meta.require("logit_scale")) or 1.0)


FAMILIES: Mapping[str, Family] = {
    "cohere2": Family(DecoderBlock, _cohere2),
    "command-r": Family(DecoderBlock, _command_r),
    "gemma": Family(DecoderBlock, _gemma),
    "granite": Family(DecoderBlock, _granite),
    "granite_swa": Family(DecoderBlock, _granite_swa),
    "granitemoe": Family(DecoderBlock, _granite),
    "minicpm": Family(DecoderBlock, _minicpm),
}
