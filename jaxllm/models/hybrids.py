"""Families with Mamba or short convolutions, alone, in turns with attention or beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from jaxllm.errors import ModelError
from jaxllm.gguf.metadata import Metadata
from jaxllm.models.config import LayerConfig, ModelConfig
from jaxllm.models.decoder import DecoderBlock
from jaxllm.models.family import (
    Family,
    Tensors,
    check_numbers,
    read_layer,
    read_model,
)
from jaxllm.models.parts import Norms
from jaxllm.models.qwen35 import linear_layers
from jaxllm.models.recurrent import Lightning, Mamba2, Selective, ShortConv
from jaxllm.models.routing import Routing
from jaxllm.models.scaled import granite_layers, granite_model

CHANNELS = 32  # that go to one device together, where the width allows
MINIMAX_TOKENS = 200032  # of the model's 200064 rows, whatever a file says (as in llama.cpp)


def _mamba(meta: Metadata, tensors: Tensors, layer: int) -> Mamba2:
    names = "group_count", "time_step_rank", "inner_size", "state_size", "conv_kernel"
    groups, heads, inner, keys, kernel = (meta.require(f"ssm.{name}", int) for name in names)
    if min(groups, heads, keys) < 1 or kernel < 2 or heads % groups or inner % heads:
        raise ModelError(
            f"{meta.architecture} has {heads} heads in {groups} groups, keys of {keys}, an inner "
            f"size of {inner} and a convolution over {kernel}; expected heads a multiple of "
            "groups, the inner size one of heads, and at least 2 tokens"
        )
    normed = f"blk.{layer}.ssm_norm.weight" in tensors
    return Mamba2(groups, heads // groups, inner // heads, keys, kernel, normed)


def _selective(meta: Metadata, tensors: Tensors, layer: int) -> Selective:
    """Mamba 1; with `heads` of channels where a file has one step a head."""
    names = "inner_size", "state_size", "conv_kernel"
    inner, keys, kernel = (meta.require(f"ssm.{name}", int) for name in names)
    prefix = f"blk.{layer}.ssm_"
    steps = tensors.get(f"{prefix}dt.weight")
    if steps is None or len(steps.shape) != 2:
        raise ModelError(f"{prefix}dt.weight is missing or no matrix; convert the model again")
    count, rank = steps.shape
    if min(inner, keys, rank) < 1 or kernel < 2 or inner % count:
        raise ModelError(
            f"{meta.architecture} has an inner size of {inner}, {count} steps made of {rank} "
            f"values, keys of {keys} and a convolution over {kernel}; expected the inner size a "
            "multiple of steps, and at least 2 tokens"
        )
    heads = count != inner
    width = CHANNELS if inner % CHANNELS == 0 else 1
    width = inner // count if heads else width
    weighted = any(f"{prefix}dt_norm{end}" in tensors for end in ("", ".weight"))
    return Selective(
        groups=inner // width,
        channels=width,
        keys=keys,
        rank=rank,
        kernel=kernel,
        heads=heads,
        conv_bias=f"{prefix}conv1d.bias" in tensors,
        normed=weighted or bool(meta.get("ssm.dt_b_c_rms", False)),
        weighted=weighted,
    )


def _mamba_alone(meta: Metadata, tensors: Tensors) -> ModelConfig:
    make = _selective if meta.architecture == "mamba" else _mamba
    layers = read_layer(meta, tensors, None, norms=Norms(mlp=None), partial=True)
    layers = [
        replace(own.without_attention(make(meta, tensors, i)), mlp=0)
        for i, own in enumerate(layers)
    ]
    return read_model(meta, tensors, layers)


def _jamba(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """Mamba 1 in layers without KV heads; attention without rope."""
    layers = read_layer(meta, tensors, None, routing=Routing(normalised=False), partial=True)
    return read_model(meta, tensors, _in_turns(meta, tensors, layers))


def _plamo2(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """Heads of Mamba in layers without KV heads; norms on what each half adds have bare names."""
    norms = Norms(attn_post="post_attention_norm", mlp_post="post_ffw_norm")
    layers = read_layer(meta, tensors, "halves", norms=norms, partial=True)
    layers = [layer.with_rope(factors=None) for layer in layers]
    return read_model(meta, tensors, _in_turns(meta, tensors, layers))


def _in_turns(meta: Metadata, tensors: Tensors, layers: list[LayerConfig]) -> list[LayerConfig]:
    """These layers, those without KV heads with a selective mixer."""
    return [
        own if own.kv_heads else own.without_attention(_selective(meta, tensors, i))
        for i, own in enumerate(layers)
    ]


def _falcon_h1(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """Attention and Mamba 2 read one norm and are added together."""
    layers = read_layer(meta, tensors, "halves", norms=Norms(mlp="ffn_norm"))
    layers = [
        replace(own, recurrent=_mamba(meta, tensors, i)).with_rope(factors=None)
        for i, own in enumerate(layers)
    ]
    return read_model(meta, tensors, layers, unused=("rope_freqs.weight",))


def _granite(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """As granite, with Mamba 2 in layers without KV heads."""
    layers = [
        own if own.kv_heads else own.without_attention(_mamba(meta, tensors, i))
        for i, own in enumerate(granite_layers(meta, tensors, partial=True))
    ]
    ropeless = not meta.get("rope.scaling.finetuned", True)
    unused = ("rope_freqs.weight",) if ropeless else ()
    return granite_model(meta, tensors, layers, unused=unused)


def _nemotron_h(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """Every layer is one thing: an MLP where it has columns, or experts without gates; else
    attention or Mamba 2."""
    routing = Routing("sigmoid", normalised=None) if meta.architecture.endswith("moe") else None
    layers = read_layer(
        meta, tensors, None, routing=routing, mlp_gated=False, activation="relu2", partial=True
    )
    found = []
    for i, own in enumerate(layers):
        if own.mlp:
            own = replace(own.without_attention(), norms=Norms(None, mlp="attn_norm.weight"))
        else:
            own = replace(own, norms=Norms(mlp=None), mlp_bias=False)
            own = own if own.kv_heads else own.without_attention(_mamba(meta, tensors, i))
        found.append(own)
    return read_model(meta, tensors, found)


def _minimax(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """Lightning attention in all but every eighth layer. Each half adds to some times what it has
    read, which is normalised, not to the residual. Rows after the last token are of no use."""
    scale = meta.require("residual_scale", float)
    layers = read_layer(meta, tensors, "halves", routing=Routing(), read_residual=scale)
    linear = linear_layers(meta, len(layers), interval=8)
    layers = [
        own.without_attention(Lightning(own.kv_heads * own.q_per_kv, own.k_dim))
        if is_linear
        else own
        for own, is_linear in zip(layers, linear, strict=True)
    ]
    return read_model(meta, tensors, layers, drawn=MINIMAX_TOKENS)


def _lfm2(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """Short convolutions in layers without KV heads; the last norm has the embedding's name. In
    dense files a window is that of every layer with attention."""
    routing = Routing("sigmoid")
    if meta.architecture == "lfm2moe":
        check_numbers(meta, {"attention.sliding_window": 0})
    window = int(meta.get("attention.sliding_window", 0)) or None
    layers = read_layer(meta, tensors, "halves", routing=routing, partial=True, window=True)
    embed, kernel = meta.require("embedding_length", int), meta.require("shortconv.l_cache", int)
    if kernel < 2:
        raise ModelError(f"{meta.architecture}.shortconv.l_cache is {kernel}; expected at least 2")
    width = CHANNELS if embed % CHANNELS == 0 else 1
    conv = ShortConv(embed // width, width, kernel)
    layers = [
        replace(own, window=window) if own.kv_heads else own.without_attention(conv)
        for own in layers
    ]
    return read_model(meta, tensors, layers, embed_norm=None, norm_name="token_embd_norm")


FAMILIES: Mapping[str, Family] = {
    "falcon-h1": Family(DecoderBlock, _falcon_h1),
    "granitehybrid": Family(DecoderBlock, _granite),
    "lfm2": Family(DecoderBlock, _lfm2),
    "lfm2moe": Family(DecoderBlock, _lfm2),
    "jamba": Family(DecoderBlock, _jamba),
    "mamba": Family(DecoderBlock, _mamba_alone),
    "mamba2": Family(DecoderBlock, _mamba_alone),
    "minimax-01": Family(DecoderBlock, _minimax),
    "nemotron_h": Family(DecoderBlock, _nemotron_h),
    "nemotron_h_moe": Family(DecoderBlock, _nemotron_h),
    "plamo2": Family(DecoderBlock, _plamo2),
}
