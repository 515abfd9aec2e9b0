"""Families that read a number of their own, or whose files have more than one form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from jaxllm.gguf.metadata import Metadata
from jaxllm.models.config import ModelConfig
from jaxllm.models.decoder import DecoderBlock
from jaxllm.models.family import Family, Tensors, read_layer, read_model
from jaxllm.models.parts import Norms
from jaxllm.models.plain import ONE_NORM, PLAIN_MLP


def _apertus(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """The numbers of the activation differ by layer."""
    layers = read_layer(meta, tensors, "halves", **PLAIN_MLP, activation="xielu")
    keys = ("xielu.alpha_n", "xielu.alpha_p", "xielu.beta", "xielu.eps")
    numbers = zip(*(meta.per_layer(key, len(layers)) for key in keys), strict=True)
    pairs = zip(layers, numbers, strict=True)
    layers = [replace(layer, xielu=tuple(map(float, own))) for layer, own in pairs]
    return read_model(meta, tensors, layers)


def _bitnet(meta: Metadata, tensors: Tensors) -> ModelConfig:
    layers = read_layer(meta, tensors, "halves", sub_norms=True)
    return read_model(meta, tensors, layers)


def _cogvlm(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """Text only: the experts for pictures are not loaded. The rope is always that of Llama 1."""
    layers = read_layer(meta, tensors, "halves")
    sections = (meta.require("embedding_length", int),) * 3
    layers = [
        replace(layer.with_rope(theta=1e4, factors=None), qkv_joined=sections) for layer in layers
    ]
    pictures = [f"vis_{n}.weight" for n in ("attn_qkv", "attn_output", "gate", "up", "down")]
    return read_model(meta, tensors, layers, unused=("rope_freqs.weight", *pictures))


def _falcon(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """The larger sizes have a norm for each half."""
    two = "blk.0.attn_norm_2.weight" in tensors
    norms = Norms(attn="attn_norm_2.weight", mlp="attn_norm.weight") if two else ONE_NORM
    layers = read_layer(
        meta, tensors, "halves", "layer", **PLAIN_MLP, activation="gelu", norms=norms, parallel=True
    )
    return read_model(meta, tensors, layers)


def _gptneox(meta: Metadata, tensors: Tensors) -> ModelConfig:
    parallel = meta.require("use_parallel_residual", bool)
    layers = read_layer(
        meta, tensors, "halves", "layer", **PLAIN_MLP, activation="gelu", parallel=parallel
    )
    return read_model(meta, tensors, layers)


def _olmo(meta: Metadata, tensors: Tensors) -> ModelConfig:
    clamp = float(meta.get("attention.clamp_kqv", 0.0)) or None
    return read_model(
        meta,
        tensors,
        read_layer(meta, tensors, "neighbours", "layer", weights=False, qkv_clamp=clamp),
    )


def _pangu_embedded(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """Frequency factors are not read, as in llama.cpp."""
    layers = [layer.with_rope(factors=None) for layer in read_layer(meta, tensors, "halves")]
    return read_model(meta, tensors, layers, unused=("rope_freqs.weight",))


def _qwen(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """The width of the MLP is that of gate and up together; rows of values may be more than the KV
    heads that a file says have."""
    columns = meta.require("feed_forward_length", int) // 2
    layers = read_layer(meta, tensors, "halves", mlp=columns)
    [rows] = {int(tensors[f"blk.{i}.attn_qkv.weight"].shape[0]) for i in range(len(layers))}
    q, k, _ = layers[0].qkv_joined or (0, 0, 0)
    layers = [replace(layer, qkv_joined=(q, k, rows - q - k)) for layer in layers]
    return read_model(meta, tensors, layers)


def _stablelm(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """The size of 12B computes both halves from one norm."""
    parallel = "blk.0.ffn_norm.weight" not in tensors
    norms = ONE_NORM if parallel else Norms()
    layers = read_layer(meta, tensors, "halves", "layer", norms=norms, parallel=parallel)
    return read_model(meta, tensors, layers)


FAMILIES: Mapping[str, Family] = {
    "apertus": Family(DecoderBlock, _apertus),
    "bitnet": Family(DecoderBlock, _bitnet),
    "cogvlm": Family(DecoderBlock, _cogvlm),
    "falcon": Family(DecoderBlock, _falcon),
    "gptneox": Family(DecoderBlock, _gptneox),
    "olmo": Family(DecoderBlock, _olmo),
    "pangu-embedded": Family(DecoderBlock, _pangu_embedded),
    "qwen": Family(DecoderBlock, _qwen),
    "stablelm": Family(DecoderBlock, _stablelm),
}
