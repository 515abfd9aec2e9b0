"""gemma2: norms around both halves, soft caps, every other layer with a sliding window."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

from jaxllm.gguf.metadata import Metadata
from jaxllm.models.config import LayerConfig, ModelConfig
from jaxllm.models.decoder import DecoderBlock
from jaxllm.models.family import Family, Tensors, in_window, read_layer, read_model, read_positive
from jaxllm.models.parts import SANDWICH

LAYERS_OF_27B = 46  # its queries are scaled by the width a head, not by the head dim


def configure(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """Every other layer has the window, unless the file has another pattern; its layers may have a
    rope base of their own. The scale key of the file is not read, as in llama.cpp."""
    embed = meta.require("embedding_length", int)

    def positive(key: str, default: float) -> float:
        return read_positive(meta, key, meta.get(key, default))

    window = int(positive("attention.sliding_window", 4096))
    period = int(meta.get("attention.sliding_window_pattern", 2))
    layers = read_layer(
        meta,
        tensors,
        pairs="halves",
        window=True,
        activation="gelu",
        norms=SANDWICH,
        softcap=positive("attn_logit_softcapping", 50.0),
    )

    def adapt(i: int, layer: LayerConfig) -> LayerConfig:
        if len(layers) == LAYERS_OF_27B:
            layer = replace(layer, scale=1.0 / sqrt(embed // (layer.kv_heads * layer.q_per_kv)))
        if not in_window(i, period):
            return layer
        assert layer.rope is not None
        theta = positive("rope.freq_base_swa", layer.rope.theta)
        return replace(layer.with_rope(theta=theta), window=window)

    return read_model(
        meta,
        tensors,
        [adapt(i, layer) for i, layer in enumerate(layers)],
        embed_scale=sqrt(embed),
        logit_softcap=positive("final_logit_softcapping", 30.0),
    )


FAMILY = Family(DecoderBlock, configure)
