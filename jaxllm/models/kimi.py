"""Families that mix Kimi delta attention with latent attention: kimi-linear and bailingmoe3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from jaxllm.errors import ModelError, shown
from jaxllm.gguf.metadata import Metadata
from jaxllm.models.config import LayerConfig, ModelConfig
from jaxllm.models.decoder import DecoderBlock
from jaxllm.models.deepseek2 import latent_layer
from jaxllm.models.family import Family, Tensors, read_layer, read_model, with_limits
from jaxllm.models.recurrent import KimiDelta
from jaxllm.models.routing import Routing


def _kimi_linear(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """Nothing is turned to its position."""
    routing = Routing("sigmoid", scores_key=True)
    layers = read_layer(meta, tensors, None, routing=routing, partial=True)
    return read_model(meta, tensors, mixed_layers(meta, tensors, layers))


def _bailingmoe3(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """Log decays lie between zero and a bound; a gate a head on latent attention."""
    if meta.get("kda.safe_gate", True) is not True:
        raise ModelError(
            f"{meta.architecture}.kda.safe_gate is {shown(meta.get('kda.safe_gate'))}; only models "
            "with True are supported"
        )
    floor = meta.require("kda.gate_lower_bound", float)
    if not floor < 0.0:
        raise ModelError(f"{meta.architecture}.kda.gate_lower_bound is {floor}; expected below 0")
    routing = Routing("sigmoid", scores_key=True, normalised=None)
    layers = read_layer(meta, tensors, "neighbours", routing=routing, partial=True)
    layers = with_limits(meta, mixed_layers(meta, tensors, layers, floor))
    return read_model(meta, tensors, layers)


def mixed_layers(
    meta: Metadata,
    tensors: Tensors,
    layers: list[LayerConfig],
    floor: float | None = None,
    sign: int = 1,
) -> list[LayerConfig]:
    """These layers with latent attention, or delta attention where they have no KV heads."""
    return [
        latent_layer(meta, tensors, i, own)
        if own.kv_heads
        else own.without_attention(replace(_delta(meta, tensors, i), floor=floor, sign=sign))
        for i, own in enumerate(layers)
    ]


def _delta(meta: Metadata, tensors: Tensors, layer: int) -> KimiDelta:
    dim, kernel = meta.require("kda.head_dim", int), meta.require("ssm.conv_kernel", int)
    prefix = f"blk.{layer}."
    bias = tensors.get(f"{prefix}ssm_dt.bias")
    rows = 0 if bias is None else bias.shape[-1]
    if dim < 1 or rows < dim or rows % dim or kernel < 2:
        raise ModelError(
            f"{meta.architecture} has heads of {dim} in {rows} rows of {prefix}ssm_dt.bias and a "
            f"convolution over {kernel}; expected whole heads, and at least 2 tokens"
        )

    def names(kind: str) -> tuple[str, ...]:
        """The tensors of a kind of rows, a narrow one first where there are two."""
        if f"{prefix}ssm_{kind}.weight" in tensors:
            return (f"ssm_{kind}",)
        both = tuple(f"ssm_{kind}_{end}" for end in "ab")
        return both if f"{prefix}{both[1]}.weight" in tensors else both[:1]

    return KimiDelta(rows // dim, dim, kernel, names("f"), names("g"))


FAMILIES: Mapping[str, Family] = {
    "bailingmoe3": Family(DecoderBlock, _bailingmoe3),
    "kimi-linear": Family(DecoderBlock, _kimi_linear),
}
