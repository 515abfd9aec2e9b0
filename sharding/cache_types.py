"""Element types of a KV cache: what a head's row of one position takes, and which rows they fit.

The quantised types are ggml's: blocks of 32 values along the head dim, each with a float16 scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from sharding.errors import PlanError
from sharding.shapes import ModelShape

CacheType = Literal["f32", "f16", "bf16", "q8_0", "q4_0"]

CACHE_BLOCKS: dict[str, tuple[int, int]] = {  # values and bytes of a block
    "f32": (1, 4),
    "f16": (1, 2),
    "bf16": (1, 2),
    "q8_0": (32, 34),
    "q4_0": (32, 18),
}


def row_bytes(cache_type: str, dim: int) -> int:
    """Bytes of one head's K or V of one position, `dim` values."""
    values, size = CACHE_BLOCKS[cache_type]
    return dim // values * size


def is_quantised(cache_type: str) -> bool:
    """Whether values share a scale."""
    return CACHE_BLOCKS[cache_type][0] > 1


def rotates(cache_type: str, dim: int, asked: bool | None) -> bool:
    """Whether rows of `dim` values are rotated before they are stored: those of quantised types
    where `dim` is a power of two, as the rotation's Hadamard matrix must be; not asked is yes."""
    return asked is not False and is_quantised(cache_type) and dim & (dim - 1) == 0


def check_rows(model: ModelShape, cache_type_k: str, cache_type_v: str) -> None:
    """Raise `PlanError` for a layer whose rows are no whole number of blocks."""
    for index, argument, kind, dim in _rows(model, cache_type_k, cache_type_v):
        block = CACHE_BLOCKS[kind][0]
        if dim % block:
            raise PlanError(
                f"{argument} {kind} stores blocks of {block} values and layer {index} has a head"
                f" dim of {dim}; use f16."
            )


def rotation_notes(
    model: ModelShape, cache_type_k: str, cache_type_v: str, asked: bool | None
) -> tuple[str, ...]:
    """A sentence about each kind of row that cannot be rotated although that was asked for."""
    found = {}
    for index, argument, kind, dim in _rows(model, cache_type_k, cache_type_v):
        part = model.layers[index].k_only
        if asked and is_quantised(kind) and (part or not rotates(kind, dim, asked)):
            reason = (
                "its values are a part of it"
                if part
                else f"its head dim of {dim} is no power of two"
            )
            found.setdefault((argument, reason), index)
    return tuple(
        f"what {argument} stores of layer {index} is not rotated: {reason}."
        for (argument, reason), index in found.items()
    )


def _rows(
    model: ModelShape, cache_type_k: str, cache_type_v: str
) -> Iterator[tuple[int, str, str, int]]:
    """Layer, argument, type and head dim of every K and V."""
    for index, layer in enumerate(model.layers):
        if layer.kv_heads:
            yield index, "--cache-type-k/-ctk", cache_type_k, layer.k_dim
        if layer.kv_heads and not layer.k_only:
            yield index, "--cache-type-v/-ctv", cache_type_v, layer.v_dim
