"""Families that differ from llama in switches alone: one line each."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxllm.gguf.metadata import Metadata
from jaxllm.models.config import ModelConfig
from jaxllm.models.decoder import DecoderBlock
from jaxllm.models.family import Family, NormKind, Tensors, check_numbers, read_layer, read_model
from jaxllm.models.parts import SANDWICH, Norms, Pairs

POST_NORMS = Norms(None, SANDWICH.attn_post, None, SANDWICH.mlp_post)
NOTHING: Mapping[str, Any] = MappingProxyType({})
PLAIN_MLP: Mapping[str, Any] = {"mlp_gated": False}  # down(act(up(x)))
PLAIN_ROPE: dict[str, Any] = {"scale": 1.0, "yarn": None, "magnitude": 1.0}  # without scaling
ONE_NORM = Norms(mlp=Norms().attn)  # read by attention and an MLP beside it


def plain(
    pairs: Pairs | None,
    norm: NormKind = "rms",
    unused: tuple[str, ...] = (),
    only: Mapping[str, float] = NOTHING,
    **layer: Any,
) -> Family:
    """A family of these rope pairs (None: no rope), norms and fields of `LayerConfig`; biases,
    joined projections and norms of heads are those that a file has. `only` are numbers of which a
    file may say no other."""

    def configure(meta: Metadata, tensors: Tensors) -> ModelConfig:
        check_numbers(meta, only)
        layers = read_layer(meta, tensors, pairs, norm, **layer)
        return read_model(meta, tensors, layers, unused=unused)

    return Family(DecoderBlock, configure)


FAMILIES: Mapping[str, Family] = {
    "arcee": plain("neighbours", **PLAIN_MLP, activation="relu2"),
    "chatglm": plain("neighbours"),
    "codeshell": plain("halves", "layer", **PLAIN_MLP, activation="gelu"),
    "deci": plain("neighbours"),
    "ernie4_5": plain("neighbours"),
    "exaone": plain("halves"),
    "gpt2": plain(None, "layer", **PLAIN_MLP, activation="gelu"),
    "hunyuan-dense": plain("halves", rope_first=True),
    "internlm2": plain("neighbours"),
    "jais2": plain("halves", "layer", **PLAIN_MLP, activation="relu2"),
    "maincoder": plain("neighbours", rope_first=True),
    "nanbeige": plain("neighbours", only={"num_loops": 1}),
    "nemotron": plain("halves", "layer", **PLAIN_MLP, activation="relu2"),
    "openelm": plain("halves"),
    "orion": plain("halves", "layer"),
    "phi2": plain("halves", "layer", **PLAIN_MLP, activation="gelu", norms=ONE_NORM, parallel=True),
    "phi3": plain("halves"),
    "plamo": plain("halves", norms=ONE_NORM, parallel=True),
    "pockettts": plain("neighbours", "layer", **PLAIN_MLP, activation="gelu"),
    "qwen2": plain("halves"),
    "qwen3": plain("halves"),
    "seed_oss": plain("halves", norms=Norms(mlp="post_attention_norm.weight")),
    "starcoder": plain(None, "layer", **PLAIN_MLP, activation="gelu"),
    "starcoder2": plain("halves", "layer", **PLAIN_MLP, activation="gelu"),
    "xverse": plain("neighbours"),
}
