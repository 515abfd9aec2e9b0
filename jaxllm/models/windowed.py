"""Families whose layers differ: by a window, or by a rope that some of them lack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

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
from jaxllm.models.parts import SANDWICH, NormStyle
from jaxllm.models.plain import PLAIN_ROPE, POST_NORMS

LAYERS_OF_EXAONE4_WITH_WINDOWS = 64  # the smaller size has none, whatever its file says


def _smollm3(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """Every fourth layer has no rope."""
    layers = read_layer(meta, tensors, "neighbours")
    ropes = [None if i % 4 == 3 else layer.rope for i, layer in enumerate(layers)]
    changed = [replace(layer, rope=rope) for layer, rope in zip(layers, ropes, strict=True)]
    return read_model(meta, tensors, changed)


def _olmo2(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """OLMo 2 and 3. The latter's layers with a window rotate without scaling."""
    layers = read_layer(meta, tensors, "halves", norms=POST_NORMS)
    windows = read_windows(meta, len(layers), period=4)

    def adapt(layer: LayerConfig, window: int | None) -> LayerConfig:
        if window is None:
            return layer
        return replace(layer.with_rope(**PLAIN_ROPE), window=window)

    return read_model(meta, tensors, list(map(adapt, layers, windows)))


def _exaone4(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """Where layers have windows, only those rotate."""
    layers = read_layer(meta, tensors, "halves", norms=POST_NORMS)
    if len(layers) == LAYERS_OF_EXAONE4_WITH_WINDOWS:
        windows = read_windows(meta, len(layers), period=4, default=4096)
        layers = with_windows(layers, windows, rope_everywhere=False)
    return read_model(meta, tensors, layers)


def _plamo3(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """Layers with a window may rotate with a base of their own."""
    norms = replace(SANDWICH, attn_post="post_attention_norm", mlp_post="post_ffw_norm")
    layers = read_layer(meta, tensors, "halves", norms=norms)
    windows = read_windows(meta, len(layers), period=8)
    key = "rope.freq_base_swa"
    theta = read_positive(meta, key, meta.get(key, 10000.0))
    layers = [
        replace(layer.with_rope(theta=theta), window=window) if window else layer
        for layer, window in zip(layers, windows, strict=True)
    ]
    return read_model(meta, tensors, layers)


def _muse_glimmer(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """Layers with a window rotate. Norms on what is added have an epsilon that no file says."""
    meta.require("attention.sliding_window", int)
    meta.require("attention.sliding_window_pattern")
    layers = read_layer(meta, tensors, "neighbours", norms=SANDWICH, post_eps=1e-8)
    windows = read_windows(meta, len(layers), period=0)
    key = "rope.freq_base_swa"
    theta = read_positive(meta, key, meta.get(key, meta.get("rope.freq_base", 10000.0)))

    def adapt(layer: LayerConfig, window: int | None) -> LayerConfig:
        if window is None:
            return replace(layer, rope=None)
        return replace(layer.with_rope(theta=theta, scale=1.0), window=window)

    return read_model(
        meta,
        tensors,
        list(map(adapt, layers, windows)),
        embed_norm=NormStyle(weight=False),
        logit_scale=float(meta.require("logit_scale")),
        logit_softcap=float(meta.get("final_logit_softcapping", 0.0)) or None,
    )


FAMILIES: Mapping[str, Family] = {
    "exaone4": Family(DecoderBlock, _exaone4),
    "muse-glimmer": Family(DecoderBlock, _muse_glimmer),
    "olmo2": Family(DecoderBlock, _olmo2),
    "plamo3": Family(DecoderBlock, _plamo3),
    "smollm3": Family(DecoderBlock, _smollm3),
}
