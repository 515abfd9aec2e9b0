"""Families that know positions by linear biases, or by rotations made for pictures too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jaxllm.errors import ModelError
from jaxllm.gguf.metadata import Metadata
from jaxllm.models.config import LayerConfig, ModelConfig
from jaxllm.models.decoder import DecoderBlock
from jaxllm.models.family import Family, Tensors, check_numbers, read_layer, read_model
from jaxllm.models.parts import SANDWICH, Pairs
from jaxllm.models.plain import NOTHING, PLAIN_MLP, plain
from jaxllm.models.routing import Routing, without_experts

ALIBI = 8.0  # the largest exponent of families whose files do not say it
UNBIASED = MappingProxyType(dict(head_bias=False, unused=("output.bias",)))  # as in llama.cpp
BAICHUAN_WITH_ROPE, BAICHUAN_WITH_ALIBI = 32, 40  # layers of the sizes 7B and 13B


def _baichuan(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """The two sizes know positions in their own ways; llama.cpp gives others none."""
    count = meta.require("block_count", int)
    pairs = "neighbours" if count == BAICHUAN_WITH_ROPE else None
    alibi = ALIBI if count == BAICHUAN_WITH_ALIBI else 0.0
    return read_model(meta, tensors, read_layer(meta, tensors, pairs, alibi=alibi))


def _mpt(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """A norm of keys without one of queries is not read, as in llama.cpp."""
    layers = read_layer(
        meta,
        tensors,
        None,
        "layer",
        **PLAIN_MLP,
        activation="gelu",
        mlp_scales="blk.0.ffn.act.scales" in tensors,
        alibi=float(meta.get("attention.max_alibi_bias", 0.0)),
        qkv_clamp=float(meta.get("attention.clamp_kqv", 0.0)) or None,
    )
    return read_model(meta, tensors, layers, unused=(".attn_k_norm.weight",))


def _jais(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """Scores are divided by the head dim itself."""
    alibi = float(meta.get("attention.max_alibi_bias", 0.0))
    embed, heads = meta.require("embedding_length", int), meta.require("attention.head_count", int)
    scale = 1.0 / int(meta.get("attention.key_length", embed // heads))
    layers = read_layer(meta, tensors, None, "layer", alibi=alibi, scale=scale)
    return read_model(meta, tensors, layers)


def _refact(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """The architecture has no mixtures; experts that a file has are not used, as in llama.cpp."""
    layers = read_layer(meta, tensors, None, alibi=ALIBI, routing=Routing())
    bare = [i for i, layer in enumerate(layers) if layer.experts is not None]
    layers, unused = without_experts(layers, bare)
    return read_model(meta, tensors, layers, unused=("rope_freqs.weight", *unused))


def pictured(
    pairs: Pairs,
    interleaved: bool = False,
    without: Pairs | None = None,
    ends: Mapping[str, Any] = NOTHING,
    **layer: Any,
) -> Family:
    """A family whose rotation has sections for the time, height and width of pictures.

    A token of text is at one place in all three, so that it turns as without sections, unless some
    pairs turn by neither. `without` are the pairs of files without sections, if they differ; `ends`
    are fields of `ModelConfig`.
    """

    def configure(meta: Metadata, tensors: Tensors) -> ModelConfig:
        check_numbers(meta, {"rope.scaling.alpha": 0})
        own = pairs if without is None or min(_sections(meta)[:2]) > 0 else without
        layers = read_layer(meta, tensors, own, **layer)
        check_sections(meta, layers, interleaved)
        return read_model(meta, tensors, layers, **ends)

    return Family(DecoderBlock, configure)


def _sections(meta: Metadata) -> list[int]:
    return [*map(int, meta.get("rope.dimension_sections", ())), 0, 0, 0, 0][:4]


def check_sections(meta: Metadata, layers: Sequence[LayerConfig], interleaved: bool) -> None:
    """ModelError for a rotation with sections, some pairs of which do not turn with text."""
    sections = _sections(meta)
    count = max(layer.rope.dim // 2 for layer in layers if layer.rope)
    if min(sections[:2]) > 0 and not _all_turn(sections, count, interleaved):
        raise ModelError(
            f"rope.dimension_sections {sections} of {meta.architecture} leave pairs that do "
            "not turn with text, which is not supported"
        )


def _all_turn(sections: list[int], count: int, interleaved: bool) -> bool:
    """Whether each of `count` pairs turns by time, height or width."""
    places = [i % sum(sections) for i in range(count)]
    if interleaved:
        return all(at < 3 * sections[at % 3] for at in places)
    return all(at < sum(sections[:3]) for at in places)


FAMILIES: Mapping[str, Family] = {
    "baichuan": Family(DecoderBlock, _baichuan),
    "bloom": plain(None, "layer", **PLAIN_MLP, activation="gelu", alibi=ALIBI),
    "glm4": pictured("halves", norms=SANDWICH, without="neighbours"),
    "hunyuan_vl": pictured("halves", rope_first=True),
    "jais": Family(DecoderBlock, _jais),
    "mpt": Family(DecoderBlock, _mpt),
    "paddleocr": pictured("halves"),
    "qwen2vl": pictured("halves", ends=UNBIASED, needs_eps=False),
    "qwen3vl": pictured("halves", interleaved=True),
    "refact": Family(DecoderBlock, _refact),
}
