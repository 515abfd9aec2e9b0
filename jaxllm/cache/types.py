"""How keys and values are stored, by the names of `--cache-type-k` and `--cache-type-v`.

Rings, pages and groups hold stored rows: what `CacheType.encode` makes of the H values of a head,
codes and scales together. Values are encoded once, when a ring is written; from then on bytes are
only moved, until attention decodes them. So a cache gives the same bits wherever it lives.

The quantised types have ggml's blocks, byte for byte (ggml-common.h: block_q8_0, block_q4_0), and
round as its reference does (ggml-quants.c: quantize_row_q8_0_ref, quantize_row_q4_0_ref).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array: TypeAlias = jax.Array
BLOCK = 32  # values that share a scale
SCALE_BYTES = 2  # float16


@dataclass(frozen=True)
class CacheType:
    """A float type. `dtype` is that of the stored elements."""

    name: str
    dtype: Any

    def row(self, dim: int) -> int:
        """Stored elements of `dim` values."""
        return dim

    def encode(self, x: Array) -> Array:
        """x [..., H] of any float type -> stored [..., row(H)]."""
        return x.astype(self.dtype)

    def decode(self, stored: Array, dim: int, dtype: Any) -> Array:
        """stored [..., row(H)] -> [..., H] in `dtype`."""
        return stored.astype(dtype)


@dataclass(frozen=True)
class _Blocks(CacheType):
    """A float16 scale and codes for each 32 values, as bytes."""

    code_bytes: int

    def row(self, dim: int) -> int:
        return dim // BLOCK * (SCALE_BYTES + self.code_bytes)

    def encode(self, x: Array) -> Array:
        blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
        scale, codes = self.quantise(blocks)
        scale = lax.bitcast_convert_type(scale[..., 0].astype(jnp.float16), jnp.uint8)
        stored = jnp.concatenate([scale, codes], axis=-1)
        return stored.reshape(*x.shape[:-1], self.row(x.shape[-1]))

    def decode(self, stored: Array, dim: int, dtype: Any) -> Array:
        lead, size = stored.shape[:-1], SCALE_BYTES + self.code_bytes
        blocks = stored.reshape(*lead, dim // BLOCK, size)
        low, high = (blocks[..., i].astype(jnp.uint16) for i in range(SCALE_BYTES))
        # Put together as a number: two bytes that become one element would be copied before.
        scale = lax.bitcast_convert_type(low | high << 8, jnp.float16)
        # Exact in float32: a code has at most 8 bits and a scale 11.
        x = self.codes(blocks[..., SCALE_BYTES:]) * scale.astype(jnp.float32)[..., None]
        return x.reshape(*lead, dim).astype(dtype)

    def quantise(self, blocks: Array) -> tuple[Array, Array]:
        """float32 [..., 32] -> scale float32 [..., 1], codes uint8 [..., code_bytes]."""
        raise NotImplementedError

    def codes(self, stored: Array) -> Array:
        """uint8 [..., code_bytes] -> codes float32 [..., 32]."""
        raise NotImplementedError


class _Q8(_Blocks):
    """Codes are int8, the largest of a block is 127 or -127."""

    def quantise(self, blocks: Array) -> tuple[Array, Array]:
        most = jnp.abs(blocks).max(axis=-1, keepdims=True)
        # Not a constant: XLA would multiply by its reciprocal, which rounds otherwise.
        scale = most / jnp.where(most > 0, jnp.float32(127), jnp.float32(1))
        codes = lax.round(blocks * _inverse(scale), lax.RoundingMethod.AWAY_FROM_ZERO)
        codes = jnp.clip(codes, -127, 127).astype(jnp.int8)
        return scale, lax.bitcast_convert_type(codes, jnp.uint8)

    def codes(self, stored: Array) -> Array:
        return lax.bitcast_convert_type(stored, jnp.int8).astype(jnp.float32)


class _Q4(_Blocks):
    """Codes are 0 to 15 around 8; the value of the largest size, with its sign, is 0.

    The low nibbles of the 16 bytes are values 0 to 15 of a block, the high ones 16 to 31.
    """

    def quantise(self, blocks: Array) -> tuple[Array, Array]:
        at = jnp.argmax(jnp.abs(blocks), axis=-1, keepdims=True)
        scale = jnp.take_along_axis(blocks, at, axis=-1) / -8
        # Within bounds anyway, but for rounding; the clip keeps product and sum two roundings.
        near = jnp.clip(blocks * _inverse(scale), -8, 8)
        codes = jnp.minimum(jnp.floor(near + 8.5), 15).astype(jnp.uint8)
        return scale, codes[..., :16] | codes[..., 16:] << 4

    def codes(self, stored: Array) -> Array:
        nibbles = jnp.concatenate([stored & 15, stored >> 4], axis=-1)
        return nibbles.astype(jnp.float32) - 8


def _inverse(scale: Array) -> Array:
    return jnp.where(scale == 0, jnp.float32(0), 1 / scale)


CACHE_TYPES: dict[str, CacheType] = {
    "f32": CacheType("f32", jnp.float32),
    "f16": CacheType("f16", jnp.float16),
    "bf16": CacheType("bf16", jnp.bfloat16),
    "q8_0": _Q8("q8_0", jnp.uint8, 32),
    "q4_0": _Q4("q4_0", jnp.uint8, 16),
}


@dataclass(frozen=True)
class CacheFormat:
    """How one layer's cache is stored: types of K and V, and which of them are rotated before.

    Rotated keys meet rotated queries, so that scores are what they were; a rotated output is
    turned back. The rotation spreads a large value over its whole row, where a block's scale
    would otherwise follow it (QuaRot, Ashkboos et al. 2024).
    """

    k: CacheType = CACHE_TYPES["f32"]
    v: CacheType = CACHE_TYPES["f32"]
    rotate_k: bool = False
    rotate_v: bool = False


@cache
def hadamard(dim: int) -> np.ndarray:
    """The orthonormal Hadamard matrix [dim, dim] of a power of two, float32; its own inverse."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < dim:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(np.float32(dim))


def rotate(x: Array) -> Array:
    """x [..., H] times the Hadamard matrix, float32; twice is x again."""
    x = x.astype(jnp.float32)
    return jnp.matmul(x, hadamard(x.shape[-1]), precision=lax.Precision.HIGHEST)
