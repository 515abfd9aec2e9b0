"""qwen3: Qwen 3 dense, with an RMS norm over each query and key head."""

from __future__ import annotations

from jaxllm.gguf.metadata import Metadata
from jaxllm.models.config import ModelConfig
from jaxllm.models.decoder import PreNormBlock
from jaxllm.models.family import Family, Tensors, read_layer, read_model


def configure(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """Like qwen2 without biases, and with query and key norms."""
    return read_model(meta, tensors, read_layer(meta, tensors, pairs="halves", qk_norm=True))


FAMILY = Family(PreNormBlock, configure)
