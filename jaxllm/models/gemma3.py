"""gemma3 (text): query and key norms, windows on all but every sixth layer, two rope bases."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

from jaxllm.gguf.metadata import Metadata
from jaxllm.models.config import LayerConfig, ModelConfig
from jaxllm.models.decoder import DecoderBlock
from jaxllm.models.family import Family, Tensors, in_window, read_layer, read_model, read_positive
from jaxllm.models.parts import SANDWICH

LAYERS_OF_27B = 62  # its queries are scaled by the width a head, not by the head dim


def configure(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """Window layers rotate with their own base (10000) and without linear scaling."""
    embed = meta.require("embedding_length", int)
    window = int(meta.get("attention.sliding_window", 0)) or None
    period = int(meta.get("attention.sliding_window_pattern", 6))
    key = "rope.freq_base_swa"
    local_theta = read_positive(meta, key, meta.get(key, 10000.0))
    layers = read_layer(
        meta,
        tensors,
        pairs="halves",
        window=window is not None,
        activation="gelu",
        qk_norm=True,
        norms=SANDWICH,
    )

    def adapt(i: int, layer: LayerConfig) -> LayerConfig:
        if len(layers) == LAYERS_OF_27B:
            layer = replace(layer, scale=1.0 / sqrt(embed // (layer.kv_heads * layer.q_per_kv)))
        if window is None or not in_window(i, period):
            return layer
        return replace(layer.with_rope(theta=local_theta, scale=1.0), window=window)

    cap = float(meta.get("final_logit_softcapping", 0.0))
    return read_model(
        meta,
        tensors,
        [adapt(i, layer) for i, layer in enumerate(layers)],
        embed_scale=sqrt(embed),
        logit_softcap=cap or None,
    )


FAMILY = Family(DecoderBlock, configure)
