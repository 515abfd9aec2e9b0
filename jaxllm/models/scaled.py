"""Families that scale what they embed, add or put out."""

from __future__ import annotations

from collections.abc import Mapping
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
    """Granite's layers; a file may say that there is no rope."""
    residual = float(meta.get("residual_scale", 0.0)) or 1.0
    pairs = "neighbours" if meta.get("rope.scaling.finetuned", True) else None
    return read_layer(meta, tensors, pairs, routing=Routing(), residual_scale=residual, **layer)


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
    "granitemoe": Family(DecoderBlock, _granite),
    "minicpm": Family(DecoderBlock, _minicpm),
}
