"""Families with mixtures of experts whose layers differ: by a window, or by the rope that some of
them lack."""

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
    with_limits,
    with_windows,
)
from jaxllm.models.mixtures import ATTN_POST, DENSE, SIGMOID, SOFTMAX
from jaxllm.models.parts import SANDWICH, Temperature
from jaxllm.models.plain import ONE_NORM, PLAIN_ROPE
from jaxllm.models.routing import Routing

LLAMA4_CHUNK = 8192  # positions, whatever the file says
LLAMA4_EXPERTS_WITHOUT_NORMS = 128  # the size with so many has no norms of queries and keys


def _own_theta(meta: Metadata, layer: LayerConfig, default: float | None = None) -> LayerConfig:
    """A layer whose rope has the base of layers with a window."""
    key = "rope.freq_base_swa"
    if layer.rope is None or key not in meta and default is None:
        return layer
    return layer.with_rope(theta=read_positive(meta, key, meta.get(key, default)))


def _afmoe(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """Attention is gated; every fourth layer has no rope, whichever layers have windows."""
    layers = read_layer(meta, tensors, "halves", norms=SANDWICH, routing=SIGMOID)
    layers = with_windows(layers, read_windows(meta, len(layers), period=4), rope_everywhere=True)
    layers = [replace(layer, rope=None) if i % 4 == 3 else layer for i, layer in enumerate(layers)]
    return read_model(
        meta, tensors, layers, embed_scale=sqrt(meta.require("embedding_length", int))
    )


def _cohere2moe(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """Layers that see all have no rope, but for the dense ones that come first."""
    key = "attention.layer_norm_rms_epsilon"
    routing = replace(SIGMOID, blend=0.5)
    layers = read_layer(
        meta,
        tensors,
        "neighbours",
        "rms" if float(meta.get(key, 0.0)) else "layer",
        norms=ONE_NORM,
        parallel=True,
        routing=routing,
    )
    windows = read_windows(meta, len(layers), period=4, full_first=True)
    lead = int(meta.get("leading_dense_block_count", 0))
    changed = with_windows(layers, windows, rope_everywhere=False)
    layers = [
        replace(new, rope=layer.rope) if i < lead else new
        for i, (new, layer) in enumerate(zip(changed, layers, strict=True))
    ]
    return read_model(meta, tensors, layers, logit_scale=float(meta.require("logit_scale")) or 1.0)


def _exaone(meta: Metadata, tensors: Tensors) -> ModelConfig:
    layers = read_layer(meta, tensors, "halves", routing=SIGMOID)
    windows = read_windows(meta, len(layers), period=4, default=128)
    return read_model(meta, tensors, with_windows(layers, windows, rope_everywhere=False))


def _gpt_oss(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """Attention has sinks; experts have biases and an activation of their own."""
    layers = read_layer(
        meta,
        tensors,
        "halves",
        norms=ATTN_POST,
        activation="clamped_swiglu",
        routing=Routing(scores="chosen", normalised=False),
    )
    layers = with_windows(layers, read_windows(meta, len(layers), period=2), rope_everywhere=True)
    layers = [_own_theta(meta, layer) if layer.window else layer for layer in layers]
    return read_model(meta, tensors, layers)


def _laguna(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """Attention is gated; layers with a window have a rope of their own."""
    layers = read_layer(meta, tensors, "halves", routing=SIGMOID, out_gate_kind="softplus")
    windows = read_windows(meta, len(layers), period=4, full_first=True)
    layers = with_windows(layers, windows, rope_everywhere=True)
    dim = meta.get("rope.dimension_count_swa")
    own = PLAIN_ROPE | ({} if dim is None else dict(dim=int(dim)))
    layers = [
        _own_theta(meta, layer.with_rope(**own)) if layer.window else layer for layer in layers
    ]
    return read_model(meta, tensors, layers)


def _llama4(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """Layers see chunks of positions and rotate, but for every fourth, which sees all."""
    routing = Routing(scores="sigmoid", normalised=False, weigh_input=True)
    layers = read_layer(meta, tensors, "neighbours", routing=routing, rope_first=True)
    bare = int(meta.get("expert_count", 0)) != LLAMA4_EXPERTS_WITHOUT_NORMS
    norms: dict[str, Any] = dict(qk_norm=True, norm_heads="bare") if bare else {}
    if meta.get("attention.sliding_window") == 0:
        return read_model(meta, tensors, [replace(layer, **norms) for layer in layers])
    temperature = Temperature(LLAMA4_CHUNK, 0.1, offset=1)
    whole = dict(rope=None, temperature=temperature)
    chunk = dict(window=LLAMA4_CHUNK, chunked=True)
    period = int(meta.get("attention.sliding_window_pattern", 4))
    layers = [
        replace(
            layer,
            **(whole if i % 4 == 3 else norms),
            **(chunk if i % period != period - 1 else {}),
        )
        for i, layer in enumerate(layers)
    ]
    return read_model(meta, tensors, layers)


def _mellum(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """Layers with a window rotate without scaling."""
    layers = read_layer(meta, tensors, "halves", routing=SOFTMAX)
    layers = with_windows(layers, read_windows(meta, len(layers), period=4), rope_everywhere=True)
    layers = [layer.with_rope(**PLAIN_ROPE) if layer.window else layer for layer in layers]
    return read_model(meta, tensors, layers)


def _mimo2(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """Attention may have sinks, and its output a factor."""
    factor = float(meta.get("attention.value_scale", 0.0)) or 1.0
    layers = read_layer(meta, tensors, "halves", routing=Routing("sigmoid"), out_factor=factor)
    layers = with_windows(layers, read_windows(meta, len(layers), period=0), rope_everywhere=True)
    layers = [_own_theta(meta, layer, 10000.0) if layer.window else layer for layer in layers]
    return read_model(meta, tensors, layers, unused=DENSE)


def _step35(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """Attention is gated; layers that see all turn half of each head. Both halves of an MLP may be
    bounded, in layers that say so."""
    layers = read_layer(meta, tensors, "halves", routing=SIGMOID)
    layers = with_windows(layers, read_windows(meta, len(layers), period=0), rope_everywhere=True)

    def adapt(layer: LayerConfig) -> LayerConfig:
        if layer.window:
            return _own_theta(meta, layer.with_rope(factors=None), 10000.0)
        dim = 0 if layer.rope is None else layer.rope.dim
        return layer.with_rope(dim=dim // 2, factor_rows=dim // 2)

    layers = list(map(adapt, with_limits(meta, layers)))
    return read_model(meta, tensors, layers, unused=DENSE)


FAMILIES: Mapping[str, Family] = {
    "afmoe": Family(DecoderBlock, _afmoe),
    "cohere2moe": Family(DecoderBlock, _cohere2moe),
    "exaone-moe": Family(DecoderBlock, _exaone),
    "gpt-oss": Family(DecoderBlock, _gpt_oss),
    "laguna": Family(DecoderBlock, _laguna),
    "llama4": Family(DecoderBlock, _llama4),
    "mellum": Family(DecoderBlock, _mellum),
    "mimo2": Family(DecoderBlock, _mimo2),
    "step35": Family(DecoderBlock, _step35),
}
