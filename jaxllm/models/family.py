"""What a family file provides, and the reading of metadata that families share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, log, sqrt
from typing import Any

from jaxllm.errors import ModelError, shown
from jaxllm.gguf.metadata import Metadata
from jaxllm.models.block import Block
from jaxllm.models.config import Draft, LayerConfig, ModelConfig
from jaxllm.models.parts import NormKind, Norms, NormStyle, Pairs, Rope, Yarn, bias_of
from jaxllm.models.routing import Routing, Tensors, read_experts

DRAFTS = "nextn_predict_layers"


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
        raise ModelError(
            f"{meta.architecture}.{key} is {shown(value)}; it must be a positive number"
        )
    return number


def refuse_unread(meta: Metadata, window: bool, causal: bool = True) -> None:
    """ModelError for settings that llama.cpp applies to every architecture and this package does
    not; `window` says that layers with a sliding window must have the sizes of those without,
    `causal` that a position may not see later ones.

    All other keys count only for architectures whose loader in llama.cpp reads them; files carry
    many that theirs does not (attention.scale, logit_scale, clamps, soft caps, windows, ...).
    """
    if causal and meta.get("attention.causal", True) is not True:
        raise ModelError(
            f"{meta.architecture}.attention.causal is {shown(meta.get('attention.causal'))}; only "
            "models with True are supported"
        )
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        own, full = meta.get(f"{key}_swa"), meta.get(key)
        if window and own not in (None, full):
            raise ModelError(
                f"{meta.architecture}.{key}_swa is {shown(own)} and {key} {shown(full)}; layers "
                "with a window must have the sizes of those without"
            )


def check_numbers(meta: Metadata, only: Mapping[str, float]) -> None:
    """Raise `ModelError` for a number of the metadata that means what is not supported."""
    for key, value in only.items():
        if float(meta.get(key, value)) != value:
            raise ModelError(
                f"{meta.full_key(key)} {meta.get(key)} is not supported; use a model where it is "
                f"{value}"
            )


def read_rope(meta: Metadata, k_dim: int, pairs: Pairs, tensors: Tensors) -> Rope:
    """The rope of layers without a window: linear scaling, YaRN, factors stored as tensors."""
    kind = meta.get("rope.scaling.type", "linear")  # llama.cpp's default
    if kind not in ("none", "linear", "yarn", "longrope", ""):
        raise ModelError(
            f"rope.scaling.type {shown(kind)} of {meta.architecture} is not supported; "
            "use a file with none, linear, yarn or longrope"
        )
    old_scale = meta.get("rope.scale_linear", 1.0)
    scale = meta.get("rope.scaling.factor", old_scale) if kind not in ("none", "") else 1.0
    scale = read_positive(meta, "rope.scaling.factor", float(scale) or 1.0)
    key = "rope.scaling.original_context_length"
    context = int(meta.get(key, meta.get("context_length", 0)))
    magnitude, yarn = float(meta.get("rope.scaling.attn_factor", 1.0)), None
    if kind == "yarn":
        yarn = Yarn(
            int(read_positive(meta, key, context)),
            float(meta.get("rope.scaling.yarn_beta_fast", 32.0)),
            float(meta.get("rope.scaling.yarn_beta_slow", 1.0)),
            float(meta.get("rope.scaling.yarn_ext_factor", 1.0)),
        )
        magnitude *= yarn_magnitude(scale, float(meta.get("rope.scaling.yarn_log_multiplier", 0)))
    factors, longer = None, None
    if "rope_freqs.weight" in tensors:
        factors = "rope_freqs.weight"
    elif "rope_factors_short.weight" in tensors:
        factors, longer = "rope_factors_short.weight", (context, "rope_factors_long.weight")
    return Rope(
        theta=read_positive(meta, "rope.freq_base", meta.get("rope.freq_base", 10000.0)),
        dim=int(meta.get("rope.dimension_count", k_dim)),
        pairs=pairs,
        scale=scale,
        yarn=yarn,
        magnitude=magnitude,
        factors=factors,
        longer=longer,
    )


def yarn_magnitude(scale: float, log_multiplier: float) -> float:
    """What YaRN multiplies rotated queries and keys by; with a log multiplier a model says how
    much of it its own score scale holds already."""

    def grown(by: float) -> float:
        return 1.0 if scale <= 1.0 else 0.1 * by * log(scale) + 1.0

    return grown(1.0) / (grown(log_multiplier) if log_multiplier else 1.0)


def read_eps(meta: Metadata, kind: NormKind, needed: bool) -> float:
    """The epsilon of the kind of norm that an architecture has; zero where it may be missing."""
    key = f"attention.layer_norm_{'rms_' if kind == 'rms' else ''}epsilon"
    if key not in meta and not needed:
        return 0.0
    return read_positive(meta, key, meta.require(key, float))


def read_layer(
    meta: Metadata,
    tensors: Tensors,
    pairs: Pairs | None,
    norm: NormKind = "rms",
    window: bool = False,
    weights: bool = True,
    needs_eps: bool = True,
    routing: Routing | None = None,
    partial: bool = False,
    ahead: bool = False,
    **changes: Any,
) -> list[LayerConfig]:
    """The layers as plain decoders have them; `changes` sets a field of every layer.

    Head counts and MLP columns may differ by layer (arrays in the metadata). Experts, biases,
    joined projections and norms of queries and keys are those that the file has. `pairs` is None
    for an architecture without rope. `window` says that the family reads a sliding window,
    `weights` that its norms have weights, `needs_eps` that its files say an epsilon; `routing` is
    that of a family whose layers may be mixtures of experts, `partial` that they may lack attention
    or an MLP, whose numbers are then zero; with `ahead` come also the layers that predict tokens
    ahead, as the last ones.
    """
    refuse_unread(meta, window, changes.get("causal", True))
    embed = meta.require("embedding_length", int)
    blocks = meta.require("block_count", int)
    trunk = blocks - int(meta.get(DRAFTS, 0))
    count = blocks if ahead else trunk
    heads = meta.per_layer("attention.head_count", blocks)[:count]
    kv_heads = meta.per_layer("attention.head_count_kv", blocks, heads)[:count]
    columns = meta.per_layer("feed_forward_length", blocks)[:count]
    if trunk < 1:
        raise ModelError(f"{meta.architecture}.block_count is {trunk}; it must be at least 1")
    layers = []
    for i, (n, k, f) in enumerate(zip(heads, kv_heads, columns, strict=True)):
        if partial and min(n, k) == 0:
            n = k = 0
        if min(n, k, f) < (0 if partial else 1) or (k and n % k):
            raise ModelError(
                f"layer {i} has {n} query heads, {k} KV heads and {f} MLP columns; expected "
                "positive numbers and query heads a multiple of KV heads"
            )
        if k and embed % n and meta.get("attention.key_length") is None:
            raise ModelError(
                f"layer {i}: embedding_length {embed} does not divide by {n} heads and "
                "attention.key_length is missing"
            )
        dim = embed // n if n else 1
        k_dim = int(meta.get("attention.key_length", dim))
        rope = None if pairs is None or k == 0 else read_rope(meta, k_dim, pairs, tensors)
        if k_dim <= 0 or rope and (rope.dim > k_dim or rope.dim <= 0 or rope.dim % 2):
            dim = rope.dim if rope else 0
            raise ModelError(f"rope.dimension_count {dim} does not fit key_length {k_dim}")
        fields: dict[str, Any] = dict(
            kv_heads=k,
            q_per_kv=n // k if k else 1,
            k_dim=k_dim,
            v_dim=int(meta.get("attention.value_length", dim)),
            mlp=f,
            rope=rope,
            scale=1.0 / sqrt(k_dim),
            eps=read_eps(meta, norm, needs_eps),
        )
        fields |= changes
        fields["norm"] = NormStyle(norm, weights)
        stored = _stored(tensors, f"blk.{i}.", fields) | read_experts(meta, tensors, i, routing)
        layers.append(LayerConfig(**(fields | stored | changes)))
    return layers


def read_draft(tensors: Tensors, index: int, layers: Sequence[LayerConfig]) -> Draft | None:
    """The one layer that predicts tokens ahead, from block `index` of a file; None for a file with
    none of them or several."""
    if len(layers) != 1 or f"blk.{index}.nextn.eh_proj.weight" not in tensors:
        return None
    ends = "embed_tokens", "shared_head_norm", "shared_head_head"
    return Draft(layers[0], *(f"blk.{index}.nextn.{name}.weight" in tensors for name in ends))


def in_window(layer: int, period: int, full_first: bool = False) -> bool:
    """Whether a layer has the window: all but the last (or first) of each `period`, and all for
    period 0."""
    return period == 0 or layer % period != (0 if full_first else period - 1)


def _stored(tensors: Tensors, prefix: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The switches of a layer that its tensors tell."""

    def shape(name: str) -> tuple[int, ...]:
        info = tensors.get(prefix + name)
        return () if info is None else tuple(info.shape)

    style: NormStyle = fields["norm"]
    names: Norms = fields.get("norms", Norms())
    norms = [n for n in (names.attn, names.attn_post, names.mlp, names.mlp_post) if n]
    heads, k_dim = fields["kv_heads"] * fields["q_per_kv"], fields["k_dim"]
    found: dict[str, Any] = dict(
        norm=replace(style, biases=tuple(b for b in map(bias_of, norms) if shape(b))),
        qkv_bias=bool(shape("attn_q.bias") or shape("attn_qkv.bias")),
        out_bias=bool(shape("attn_output.bias")),
        mlp_bias=bool(shape("ffn_up.bias")),
        sinks=bool(shape("attn_sinks.weight")),
        out_gate=(shape("attn_gate.weight") or (0,))[0] // max(1, heads),
    )
    if shape("attn_qkv.weight"):
        sections = heads * k_dim, fields["kv_heads"] * k_dim, fields["kv_heads"] * fields["v_dim"]
        found["qkv_joined"] = sections
    if shape("attn_q_norm.weight"):
        kinds = {(k_dim,): "one", (heads, k_dim): "each"}
        over = kinds.get(shape("attn_q_norm.weight"), "all")
        if over == "all" and style.kind == "layer":
            raise ModelError(
                f"{prefix}attn_q_norm.weight is a layer norm over all heads, which is not "
                "supported; use a model without"
            )
        found |= dict(qk_norm=True, norm_heads=over)
    if fields.get("mlp_gated", True):
        found["mlp_joined"] = shape("ffn_up.weight")[:1] == (2 * fields["mlp"],)
    return found


def read_model(
    meta: Metadata, tensors: Tensors, layers: list[LayerConfig], **changes: Any
) -> ModelConfig:
    """The ends of a model around its layers; `changes` sets further fields."""
    table = tensors.get("token_embd.weight")
    if table is None:
        raise ModelError("token_embd.weight is missing; the file does not hold a whole model")
    names = "output_norm.bias", "token_embd_norm.bias"
    biases = tuple(name for name in names if name in tensors)
    longer = [layer.rope.longer for layer in layers if layer.rope and layer.rope.longer]
    unused = ("rope_factors_short.weight", "rope_factors_long.weight") if longer else ()
    fields: dict[str, Any] = dict(
        architecture=meta.architecture,
        embed=meta.require("embedding_length", int),
        vocab=table.shape[0],
        layers=tuple(layers),
        eps=layers[0].eps,
        norm=NormStyle(layers[0].norm.kind, layers[0].norm.weight, biases),
        tied="output.weight" not in tensors,
        head_bias="output.bias" in tensors,
        embed_norm=NormStyle(layers[0].norm.kind, biases=biases)
        if "token_embd_norm.weight" in tensors
        else None,
        drafts=int(meta.get(DRAFTS, 0)),
        ctx_train=int(meta.get("context_length", 0)),
        unused=(*unused, *changes.pop("unused", ())),
        name=str(meta.values.get("general.name", "")),
    )
    if "position_embd.weight" in tensors:
        fields["positions"] = int(tensors["position_embd.weight"].shape[0])
    return ModelConfig(**(fields | changes))


def read_windows(
    meta: Metadata, count: int, period: int, default: int = 0, full_first: bool = False
) -> list[int | None]:
    """The window of each layer: every `period`-th layer sees all, or those that the key
    attention.sliding_window_pattern says (a period, or whether each layer has a window).

    A period of 0 gives all layers a window; `full_first` says that the layer that sees all comes
    first in a period.
    """
    window = int(meta.get("attention.sliding_window", default)) or None
    pattern = meta.get("attention.sliding_window_pattern", period)
    if isinstance(pattern, int) and not isinstance(pattern, bool):
        windowed = [in_window(i, pattern, full_first) for i in range(count)]
    else:
        windowed = list(meta.per_layer("attention.sliding_window_pattern", count))
    return [window if has else None for has in windowed]


def with_windows(
    layers: Sequence[LayerConfig], windows: Sequence[int | None], rope_everywhere: bool
) -> list[LayerConfig]:
    """The layers with these windows; those without one may have no rope."""
    return [
        replace(layer, window=window, rope=layer.rope if window or rope_everywhere else None)
        for layer, window in zip(layers, windows, strict=True)
    ]


def with_limits(meta: Metadata, layers: Sequence[LayerConfig]) -> list[LayerConfig]:
    """The layers with the bounds that a file sets to both halves of their MLPs."""
    stored = len(layers) + int(meta.get(DRAFTS, 0))
    keys = "swiglu_clamp_exp", "swiglu_clamp_shexp"
    limits, beside = (meta.per_layer(key, stored, 0.0)[: len(layers)] for key in keys)

    def bound(layer: LayerConfig, limit: float, shared: float) -> LayerConfig:
        if layer.experts is None:
            return replace(layer, mlp_limit=shared)
        experts = replace(layer.experts, shared_limit=shared)
        return replace(layer, mlp_limit=limit, experts=experts)

    return list(map(bound, layers, limits, beside))
