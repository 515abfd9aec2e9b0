"""Element types of a KV cache: what a head's row of one position takes, and which rows they fit.

The quantised types are ggml's: blocks of 32 values along the head dim, each with a float16 scale.
"""

from __future__ import annotations

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
    """Whether rows of `dim` values are rotated before they are stored: those of quantised types,
    where there is a Hadamard matrix of that size by Sylvester's construction."""
    wanted = ROTATE_BY_DEFAULT if asked is None else asked
    return wanted and is_quantised(cache_type) and dim & (dim - 1) == 0


ROTATE_BY_DEFAULT = True


def check_rows(model: ModelShape, cache_type_k: str, cache_type_v: str) -> None:
    """Raise `PlanError` for a layer whose rows are no whole number of blocks."""
    for index, layer in enumerate(model.layers):
        if not layer.kv_heads:
            continue
        for argument, kind, dim in (
            ("--cache-type-k/-ctk", cache_type_k, layer.k_dim),
            ("--cache-type-v/-ctv", cache_type_v, layer.v_dim),
        ):
            block = CACHE_BLOCKS[kind][0]
            if dim % block:
                raise PlanError(
                    f"{argument} {kind} stores blocks of {block} values and layer {index} has a"
                    f" head dim of {dim}; use f16."
                )
