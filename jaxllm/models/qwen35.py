"""Families that mix gated delta nets with gated attention: qwen35, qwen35moe and qwen3next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from jaxllm.errors import ModelError
from jaxllm.gguf.metadata import Metadata
from jaxllm.models.config import LayerConfig, ModelConfig
from jaxllm.models.decoder import DecoderBlock
from jaxllm.models.family import (
    DRAFTS,
    Family,
    Tensors,
    read_draft,
    read_layer,
    read_model,
)
from jaxllm.models.parts import Norms
from jaxllm.models.positions import check_sections
from jaxllm.models.recurrent import DeltaNet
from jaxllm.models.routing import Routing

NORMS = Norms(mlp="post_attention_norm.weight")
INTERVAL = 4  # of layers with attention, where the file does not say it


def _configure(meta: Metadata, tensors: Tensors, pictures: bool) -> ModelConfig:
    layers = read_layer(meta, tensors, "halves", norms=NORMS, routing=Routing(), ahead=True)
    if pictures:
        meta.require("rope.dimension_sections")
        check_sections(meta, layers, interleaved=True)
    net = _delta_net(meta, tensors, tiled=pictures)
    trunk = len(layers) - int(meta.get(DRAFTS, 0))
    linear = linear_layers(meta, trunk, INTERVAL) + [False] * (len(layers) - trunk)
    mixed = [
        own.without_attention(net) if linear[i] else _gated(own, i) for i, own in enumerate(layers)
    ]
    draft = read_draft(tensors, trunk, mixed[trunk:])
    # Where both ways to store what a delta net reads are there, llama.cpp takes the newer.
    return read_model(meta, tensors, mixed[:trunk], draft=draft, unused=(".ssm_in.weight",))


def linear_layers(meta: Metadata, count: int, interval: int) -> list[bool]:
    """Whether each layer is linear: as the file says, or all but the last of each interval."""
    key = "attention.recurrent_layers"
    if key in meta:
        stored = count + int(meta.get(DRAFTS, 0))
        return [bool(own) for own in meta.per_layer(key, stored)][:count]
    interval = int(meta.get("full_attention_interval", interval))
    if interval < 1:
        raise ModelError(
            f"{meta.architecture}.full_attention_interval is {interval}; it must be at least 1"
        )
    return [(i + 1) % interval != 0 for i in range(count)]


def _delta_net(meta: Metadata, tensors: Tensors, tiled: bool) -> DeltaNet:
    names = "group_count", "time_step_rank", "state_size", "conv_kernel", "inner_size"
    keys, values, dim, kernel, inner = (meta.require(f"ssm.{name}", int) for name in names)
    if min(keys, values, dim) < 1 or kernel < 2 or values % keys or inner != values * dim:
        raise ModelError(
            f"{meta.architecture} has {keys} key heads, {values} value heads of {dim}, an inner "
            f"size of {inner} and a convolution over {kernel}; expected value heads a multiple of "
            "key heads, the inner size all of their values, and at least 2 tokens"
        )
    joined = any(name.endswith("ssm_ba.weight") for name in tensors)
    return DeltaNet(keys, values // keys, dim, kernel, tiled, joined)


def _gated(layer: LayerConfig, index: int) -> LayerConfig:
    if layer.k_dim != layer.v_dim:
        raise ModelError(
            f"layer {index} has keys of {layer.k_dim} and values of {layer.v_dim}; a gate beside "
            "the query needs both alike"
        )
    return replace(layer, gated_q=True, out_gate=layer.v_dim)


FAMILIES: Mapping[str, Family] = {
    "qwen35": Family(DecoderBlock, partial(_configure, pictures=True)),
    "qwen35moe": Family(DecoderBlock, partial(_configure, pictures=True)),
    "qwen3next": Family(DecoderBlock, partial(_configure, pictures=False)),
}
