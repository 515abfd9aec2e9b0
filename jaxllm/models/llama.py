"""llama: Llama 1 to 3, Mistral, Mixtral, SmolLM and others converted under this architecture."""

from __future__ import annotations

from jaxllm.gguf.metadata import Metadata
from jaxllm.models.config import ModelConfig
from jaxllm.models.decoder import DecoderBlock
from jaxllm.models.family import Family, Tensors, read_layer, read_model
from jaxllm.models.routing import Routing


def configure(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """GGUF's llama files hold permuted Q and K rows, so rope turns neighbouring pairs."""
    layers = read_layer(meta, tensors, pairs="neighbours", routing=Routing())
    return read_model(meta, tensors, layers)


FAMILY = Family(DecoderBlock, configure)
