"""Families with mixtures of experts whose layers are alike: one line each, or a number of their
own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import sqrt

from jaxllm.errors import ModelError
from jaxllm.gguf.metadata import Metadata
from jaxllm.models.config import ModelConfig
from jaxllm.models.decoder import DecoderBlock
from jaxllm.models.family import Family, Tensors, read_layer, read_model, read_positive
from jaxllm.models.parts import BlockIndexer, Norms, Temperature
from jaxllm.models.plain import plain
from jaxllm.models.positions import pictured
from jaxllm.models.routing import Routing, without_experts

SOFTMAX = Routing()
RAW = Routing(normalised=False)
SIGMOID = Routing(scores="sigmoid", scores_key=True, normalised=None)  # unless the file differs
ATTN_POST = Norms(mlp="post_attention_norm.weight")  # which is the norm of what the MLP reads
DENSE = ("ffn_gate.weight", "ffn_up.weight", "ffn_down.weight")  # unread beside experts


def _dbrx(meta: Metadata, tensors: Tensors) -> ModelConfig:
    clamp = float(meta.get("attention.clamp_kqv", 0.0)) or None
    norms = Norms(mlp="attn_output_norm.weight")
    layers = read_layer(
        meta, tensors, "halves", "layer", norms=norms, routing=SOFTMAX, qkv_clamp=clamp
    )
    return read_model(meta, tensors, layers)


def _ernie(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """Numbers say which layers are mixtures; experts of others are not used, as in llama.cpp."""
    layers = read_layer(meta, tensors, "neighbours", routing=SOFTMAX)
    lead = int(meta.get("leading_dense_block_count", 0))
    step = int(meta.get("interleave_moe_layer_step", 1)) or 1
    bare = []
    for i, layer in enumerate(layers):
        mixture = i >= lead and (i + 1) % step == 0
        if mixture and layer.experts is None:
            raise ModelError(
                f"layer {i} has no experts, other than its place after {lead} dense layers and in "
                f"steps of {step} says; convert the model again"
            )
        if not mixture and layer.experts is not None:
            bare.append(i)
    layers, unused = without_experts(layers, bare)
    return read_model(meta, tensors, layers, unused=unused)


def _grok(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """Numbers that old files lack are those of Grok 1."""
    last = ("layer_output_norm.weight", "post_ffw_norm.weight")
    norms = Norms(
        attn_post="attn_output_norm.weight",
        mlp_post=next((n for n in last if f"blk.0.{n}" in tensors), last[0]),
    )
    layers = read_layer(
        meta,
        tensors,
        "halves",
        norms=norms,
        activation="gelu",
        routing=Routing(shared="", blend=sqrt(0.5)),
        softcap=float(meta.get("attn_logit_softcapping", 30.0)) or None,
        scale=float(meta.get("attention.output_scale", 0.08838834764831845)),
    )
    return read_model(
        meta,
        tensors,
        layers,
        embed_scale=float(meta.get("embedding_scale", 78.38367176906169)),
        logit_scale=float(meta.get("logit_scale", 0.5773502691896257)),
        logit_softcap=float(meta.get("final_logit_softcapping", 0.0)) or None,
    )


def _minimax_m3(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """In layers with an indexer attention is to the best blocks of keys, each KV group's own."""
    names = "head_count", "key_length", "block_size", "top_k", "local_blocks"
    heads, dim, size, top, local = (meta.require(f"attention.indexer.{n}", int) for n in names)
    meta.require("expert_gating_func", int)
    layers = read_layer(meta, tensors, "halves", routing=SIGMOID, activation="clamped_swiglu")
    for i, layer in enumerate(layers):
        if f"blk.{i}.indexer.q_proj.weight" not in tensors:
            continue
        turned = 0 if layer.rope is None else layer.rope.dim
        if heads != layer.kv_heads or min(size, top, local) < 1 or dim < turned or size & size - 1:
            raise ModelError(
                f"the indexer has {heads} heads of {dim} for {layer.kv_heads} KV heads of which "
                f"{turned} values turn, and chooses {top} blocks of {size} keys, {local} of them "
                "the newest; expected a head for each KV head, at least as wide as what turns, and "
                "blocks of a power of two"
            )
        layers[i] = replace(layer, indexer=BlockIndexer(dim, size, top, local, layer.rope))
    return read_model(meta, tensors, layers)


def _mistral3(meta: Metadata, tensors: Tensors) -> ModelConfig:
    layers = read_layer(meta, tensors, "neighbours", routing=SOFTMAX)
    scale, key = (
        float(meta.get("attention.temperature_scale", 0.0)),
        "rope.scaling.original_context_length",
    )
    if scale:
        every = int(read_positive(meta, key, meta.require(key)))
        layers = [replace(layer, temperature=Temperature(every, scale)) for layer in layers]
    return read_model(meta, tensors, layers)


FAMILIES: Mapping[str, Family] = {
    "bailingmoe": plain("neighbours", routing=Routing(normalised=None)),
    "bailingmoe2": plain("halves", routing=SIGMOID),
    "dbrx": Family(DecoderBlock, _dbrx),
    "deepseek": plain("neighbours", routing=RAW),
    "dots1": plain("halves", routing=SIGMOID),
    "ernie4_5-moe": Family(DecoderBlock, _ernie),
    "glm4moe": pictured("halves", norms=ATTN_POST, routing=SIGMOID),
    "grok": Family(DecoderBlock, _grok),
    "hunyuan-moe": plain("halves", rope_first=True, routing=SOFTMAX),
    "hy_v3": plain("halves", unused=DENSE, routing=SIGMOID),
    "minimax-m2": plain("halves", routing=Routing("sigmoid", scores_key=True)),
    "minimax-m3": Family(DecoderBlock, _minimax_m3),
    "mistral3": Family(DecoderBlock, _mistral3),
    "olmoe": plain("halves", routing=RAW),
    "phimoe": plain("halves", routing=SOFTMAX),
    "qwen2moe": plain("halves", routing=RAW),
    "qwen3moe": plain("halves", routing=SOFTMAX),
    "qwen3vlmoe": pictured("halves", interleaved=True, routing=SOFTMAX),
}
