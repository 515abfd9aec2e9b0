"""What a family file provides, and the reading of metadata that families share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf, sqrt
from typing import Any, Literal

from jaxllm.errors import ModelError
from jaxllm.gguf.metadata import Metadata
from jaxllm.gguf.reader import TensorInfo
from jaxllm.models.block import Block
from jaxllm.models.config import LayerConfig, ModelConfig, Rope

Tensors = Mapping[str, TensorInfo]


@dataclass(frozen=True)
class Family:
    """A GGUF architecture: the block of its layers and how its metadata is read."""

    block: type[Block]
    configure: Callable[[Metadata, Tensors], ModelConfig]


def read_positive(meta: Metadata, key: str, value: Any) -> float:
    """A number that a rotation or a norm can be made with."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = 0.0
    if not 0.0 < number < inf:
        raise ModelError(f"{meta.architecture}.{key} is {value!r}; it must be a positive number")
    return number


def refuse_unread(meta: Metadata, window: bool) -> None:
    """ModelError for settings that llama.cpp applies to every architecture and this package does
    not; `window` says that the family has layers with a sliding window.

    All other keys count only for architectures whose loader in llama.cpp reads them; files carry
    many that theirs does not (attention.scale, logit_scale, clamps, soft caps, windows, ...).
    """
    for key, value in (("attention.causal", True), ("rope.scaling.attn_factor", 1.0)):
        if meta.get(key, value) != value:
            raise ModelError(
                f"{meta.architecture}.{key} is {meta.get(key)!r}; only models with {value!r} are "
                "supported"
            )
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        own, full = meta.get(f"{key}_swa"), meta.get(key)
        if window and own not in (None, full):
            raise ModelError(
                f"{meta.architecture}.{key}_swa is {own!r} and {key} {full!r}; layers with a "
                "window must have the sizes of those without"
            )
    groups = int(meta.get("expert_group_count", 0))
    if groups > 1:
        raise ModelError(
            f"{meta.architecture}.expert_group_count is {groups}; experts in groups are not "
            "supported"
        )


def read_rope(
    meta: Metadata, k_dim: int, pairs: Literal["neighbours", "halves"], factors: bool
) -> Rope:
    """The rope of layers without a window. Linear scaling is read; other kinds are refused."""
    kind = meta.get("rope.scaling.type", "linear")  # llama.cpp's default
    if kind not in ("none", "linear", ""):
        raise ModelError(
            f"rope.scaling.type {kind!r} of {meta.architecture} is not supported; "
            "use a file with none or linear scaling"
        )
    old_scale = meta.get("rope.scale_linear", 1.0)
    scale = meta.get("rope.scaling.factor", old_scale) if kind == "linear" else 1.0
    return Rope(
        theta=read_positive(meta, "rope.freq_base", meta.get("rope.freq_base", 10000.0)),
        dim=int(meta.get("rope.dimension_count", k_dim)),
        pairs=pairs,
        scale=float(scale) or 1.0,
        factors=factors,
    )


def read_experts(meta: Metadata, known: bool) -> dict[str, int]:
    """The fields of a layer whose MLP is a mixture of experts; none of a dense one."""
    count, used = int(meta.get("expert_count", 0)), int(meta.get("expert_used_count", 0))
    if not count:
        return {}
    if not known:
        raise ModelError(
            f"{meta.architecture} with {count} experts is not supported; "
            "use a dense model of this architecture"
        )
    if not 0 < used <= count:
        raise ModelError(f"expert_used_count is {used}; it must be between 1 and {count} experts")
    return {"experts": count, "experts_used": used}


def read_layer(
    meta: Metadata,
    tensors: Tensors,
    pairs: Literal["neighbours", "halves"],
    experts: bool = False,
    rope_factors: bool = False,
    window: bool = False,
    **changes: Any,
) -> list[LayerConfig]:
    """The layers as plain decoders have them; `changes` sets a field of every layer.

    Head counts and MLP columns may differ by layer (arrays in the metadata). The switches say what
    the family has: a form with a mixture of experts, frequency factors as a tensor, layers with a
    sliding window (which the family reads).
    """
    refuse_unread(meta, window)
    changes = read_experts(meta, experts) | changes
    embed = meta.require("embedding_length", int)
    count = meta.require("block_count", int)
    heads = meta.per_layer("attention.head_count", count)
    kv_heads = meta.per_layer("attention.head_count_kv", count, heads)
    columns = meta.per_layer("feed_forward_length", count)
    key = "attention.layer_norm_rms_epsilon"
    eps = read_positive(meta, key, meta.require(key, float))
    if count < 1:
        raise ModelError(f"{meta.architecture}.block_count is {count}; it must be at least 1")
    layers = []
    for i, (n, k, f) in enumerate(zip(heads, kv_heads, columns, strict=True)):
        if min(n, k, f) <= 0 or n % k:
            raise ModelError(
                f"layer {i} has {n} query heads, {k} KV heads and {f} MLP columns; expected "
                "positive numbers and query heads a multiple of KV heads"
            )
        if embed % n and meta.get("attention.key_length") is None:
            raise ModelError(
                f"layer {i}: embedding_length {embed} does not divide by {n} heads and "
                "attention.key_length is missing"
            )
        k_dim = int(meta.get("attention.key_length", embed // n))
        rope = read_rope(meta, k_dim, pairs, rope_factors and "rope_freqs.weight" in tensors)
        if k_dim <= 0 or rope.dim > k_dim or rope.dim <= 0 or rope.dim % 2:
            raise ModelError(
                f"rope.dimension_count {rope.dim} does not fit attention.key_length {k_dim}"
            )
        fields: dict[str, Any] = dict(
            kv_heads=k,
            q_per_kv=n // k,
            k_dim=k_dim,
            v_dim=int(meta.get("attention.value_length", embed // n)),
            mlp=f,
            rope=rope,
            scale=1.0 / sqrt(k_dim),
            eps=eps,
            qkv_bias=f"blk.{i}.attn_q.bias" in tensors,
        )
        layers.append(LayerConfig(**(fields | changes)))
    return layers


def in_window(layer: int, period: int) -> bool:
    """Whether a layer has the window: all but the last of each `period`, and all for period 0."""
    return period == 0 or layer % period < period - 1


def read_model(
    meta: Metadata, tensors: Tensors, layers: list[LayerConfig], **changes: Any
) -> ModelConfig:
    """The ends of a model around its layers; `changes` sets further fields."""
    table = tensors.get("token_embd.weight")
    if table is None:
        raise ModelError("token_embd.weight is missing; the file does not hold a whole model")
    fields: dict[str, Any] = dict(
        architecture=meta.architecture,
        embed=meta.require("embedding_length", int),
        vocab=table.shape[0],
        layers=tuple(layers),
        eps=layers[0].eps,
        tied="output.weight" not in tensors,
        head_bias="output.bias" in tensors,
        ctx_train=int(meta.get("context_length", 0)),
        name=str(meta.values.get("general.name", "")),
    )
    return ModelConfig(**(fields | changes))
