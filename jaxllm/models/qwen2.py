"""qwen2: Qwen 2 and 2.5, with biases on Q, K and V."""

from __future__ import annotations

from jaxllm.gguf.metadata import Metadata
from jaxllm.models.config import ModelConfig
from jaxllm.models.decoder import PreNormBlock
from jaxllm.models.family import Family, Tensors, read_layer, read_model


def configure(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """The biases are taken where the file has them."""
    return read_model(meta, tensors, read_layer(meta, tensors, pairs="halves"))


FAMILY = Family(PreNormBlock, configure)
