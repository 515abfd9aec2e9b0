"""gemma2: norms around both halves, soft caps, every other layer with a sliding window."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

from jaxllm.gguf.metadata import Metadata
from jaxllm.models.config import SANDWICH, ModelConfig
from jaxllm.models.decoder import DecoderBlock
from jaxllm.models.family import Family, Tensors, read_layer, read_model

LAYERS_OF_27B = 46  # its queries are scaled by the width a head, not by the head dim


def configure(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """Even layers have the window. The scale key of the file is not read, as in llama.cpp."""
    embed = meta.require("embedding_length", int)
    window = int(meta.get("attention.sliding_window", 4096))
    layers = read_layer(
        meta,
        tensors,
        pairs="halves",
        activation="gelu",
        norms=SANDWICH,
        softcap=float(meta.get("attn_logit_softcapping", 50.0)),
    )
    layers = [
        replace(
            layer,
            window=window if i % 2 == 0 else None,
            scale=1.0
            / sqrt(
                embed / (layer.kv_heads * layer.q_per_kv)
                if len(layers) == LAYERS_OF_27B
                else layer.k_dim
            ),
        )
        for i, layer in enumerate(layers)
    ]
    return read_model(
        meta,
        tensors,
        layers,
        embed_scale=sqrt(embed),
        logit_softcap=float(meta.get("final_logit_softcapping", 30.0)),
    )


FAMILY = Family(DecoderBlock, configure)
