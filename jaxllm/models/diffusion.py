"""Language models of diffusion, which have no causal mask: `LLM.logits` of a prompt, all of which
every position sees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxllm.gguf.metadata import Metadata
from jaxllm.models.config import ModelConfig
from jaxllm.models.decoder import DecoderBlock
from jaxllm.models.family import Family, Tensors, read_layer, read_model
from jaxllm.models.parts import Pairs
from jaxllm.models.routing import Routing


def diffusion(pairs: Pairs, **layer: Any) -> Family:
    """A family of these rope pairs and fields of `LayerConfig`; frequency factors and a bias of the
    output are not read, as in llama.cpp."""

    def configure(meta: Metadata, tensors: Tensors) -> ModelConfig:
        layers = read_layer(meta, tensors, pairs, causal=False, **layer)
        layers = [own.with_rope(factors=None) for own in layers]
        unused = ("rope_freqs.weight", "output.bias")
        return read_model(meta, tensors, layers, head_bias=False, unused=unused)

    return Family(DecoderBlock, configure)


FAMILIES: Mapping[str, Family] = {
    "dream": diffusion("halves"),
    "llada": diffusion("neighbours"),
    "llada-moe": diffusion("halves", routing=Routing(normalised=False)),
    "rnd1": diffusion("halves", routing=Routing()),
}
