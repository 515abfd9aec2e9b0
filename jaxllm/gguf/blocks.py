"""Quantised blocks taken apart: codes in int32 words beside their scales, every bit kept.

A value of each type here is `code * scale + shift` in float32, and that is what gguf.quants gives,
bit for bit: the product has at most 24 significant bits, so only the sum rounds. A *block* is a run
of values that share scale and shift. In types without nested scales these are `d` and `m`; in the
others `d * sub_d` and `m * sub_m`, where a *span* of blocks shares d and m.

Words hold four codes of a byte each, or eight of 4 bits in the order that ggml has in Q4_0, so that
a product needs shifts and no shuffles. With n values a block, byte b of its word k has

    8 bits   the code of value 4 k + b
    4 bits   of value 4 k + b in the low half, of value n / 2 + 4 k + b in the high half

Codes of 5 and 6 bits take a byte: a product reads that faster than words with the rest elsewhere.
Codes that ggml stores with half their range added are signed here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd
from typing import NamedTuple

import numpy as np
from gguf import GGMLQuantizationType

_Type = GGMLQuantizationType


class Part(NamedTuple):
    """One array of a tensor taken apart; an element covers `packs` values of a row."""

    dtype: np.dtype
    packs: int


@dataclass(frozen=True)
class BlockType:
    """What arrays a tensor of a quantised type becomes; see the module's docstring."""

    block: int
    bits: int  # of a code in a word
    span: int
    signed: bool = False
    minimum: bool = False  # there is a shift
    nested: str | None = None  # type of the scales that a span's scale is multiplied by
    repeats: int = 1  # times that d and m are repeated, so that a cut may be inside ggml's span
    kernel: bool = False  # whether its device multiplies a few rows by it in one kernel

    def cut_at(self, *columns: int) -> BlockType | None:
        """This type with spans that end at these columns; None where a block does not."""
        span = gcd(self.span, *columns)
        if span % self.block:
            return None
        return replace(self, span=span, repeats=self.repeats * self.span // span)

    @cached_property
    def parts(self) -> dict[str, Part]:
        """The arrays by name."""
        words, half = np.dtype(np.int32), np.dtype(np.float16)
        if self.bits == 16:
            return {"words": Part(np.dtype(np.uint16), 1)}
        found = {"words": Part(words, 32 // self.bits), "d": Part(half, self.span)}
        if self.minimum:
            found["m"] = Part(half, self.span)
        if self.nested:
            found["sub_d"] = Part(np.dtype(self.nested), self.block)
        if self.nested and self.minimum:
            found["sub_m"] = Part(np.dtype(np.uint8), self.block)
        return found


BLOCK_TYPES = {
    _Type.Q8_0: BlockType(32, 8, 32, signed=True),
    _Type.Q4_0: BlockType(32, 4, 32, signed=True),
    _Type.Q4_1: BlockType(32, 4, 32, minimum=True),
    _Type.Q5_0: BlockType(32, 8, 32, signed=True),
    _Type.Q5_1: BlockType(32, 8, 32, minimum=True),
    _Type.Q4_K: BlockType(32, 4, 256, minimum=True, nested="u1"),
    _Type.Q5_K: BlockType(32, 8, 256, minimum=True, nested="u1"),
    _Type.Q6_K: BlockType(16, 8, 256, signed=True, nested="i1"),
}
PLAIN = BlockType(16, 16, 16)  # bfloat16 as it is, for the kernel of products
_D, _M = ("d", "<f2"), ("m", "<f2")
STORED = {
    _Type.Q8_0: [_D, ("qs", "u1", 32)],
    _Type.Q4_0: [_D, ("qs", "u1", 16)],
    _Type.Q4_1: [_D, _M, ("qs", "u1", 16)],
    _Type.Q5_0: [_D, ("qh", "u1", 4), ("qs", "u1", 16)],
    _Type.Q5_1: [_D, _M, ("qh", "u1", 4), ("qs", "u1", 16)],
    _Type.Q4_K: [_D, _M, ("scales", "u1", 12), ("qs", "u1", 128)],
    _Type.Q5_K: [_D, _M, ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)],
    _Type.Q6_K: [("qs", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), _D],
}


def take_apart(raw: np.ndarray, stored: GGMLQuantizationType) -> dict[str, np.ndarray]:
    """The parts, each [rows, elements], of raw bytes uint8 [rows, bytes] of whole blocks."""
    kind = BLOCK_TYPES[stored]
    blocks = np.ascontiguousarray(raw).view(np.dtype(STORED[stored]))  # [rows, blocks]
    found = {name: blocks[name] for name in ("d", "m") if name in kind.parts}
    found["words"] = np.ascontiguousarray(_codes(blocks, stored)).view("<i4")
    if stored is _Type.Q6_K:
        found["sub_d"] = blocks["scales"]
    elif kind.nested:
        found["sub_d"], found["sub_m"] = _scales(blocks["scales"])
        found["m"] = -found["m"]  # these types subtract
    return {name: part.reshape(len(raw), -1) for name, part in found.items()}


def _codes(blocks: np.ndarray, stored: GGMLQuantizationType) -> np.ndarray:
    """Bytes of words, from those that ggml has in its blocks."""
    low = blocks["qs"]
    if stored in (_Type.Q8_0, _Type.Q4_1):
        return low
    if stored is _Type.Q4_0:
        return low ^ np.uint8(0x88)  # less 8: signed
    if stored is _Type.Q4_K:
        # 32 bytes have two blocks, one in their low and one in their high halves.
        first, second = np.moveaxis(low.reshape(*low.shape[:-1], -1, 2, 16), -2, 0)
        found = np.empty((*first.shape[:-1], 2, 16), np.uint8)
        np.bitwise_or(first & np.uint8(15), second << np.uint8(4), out=found[..., 0, :])
        np.bitwise_or(first >> np.uint8(4), second & np.uint8(240), out=found[..., 1, :])
        return found
    if stored is _Type.Q6_K:
        return (_fields(low, 64, 4) | (_fields(blocks["qh"], 32, 2) << np.uint8(4))) - np.uint8(32)
    high = blocks["qh"]
    if stored is _Type.Q5_K:
        return _fields(low, 32, 4) | (_fields(high, 32, 1) << np.uint8(4))
    bits = np.unpackbits(high, axis=-1, bitorder="little")
    codes = _fields(low, 16, 4) | (bits << np.uint8(4))
    return codes if stored is _Type.Q5_1 else codes - np.uint8(16)


def _fields(bytes_: np.ndarray, run: int, bits: int) -> np.ndarray:
    """Values of so many bits: of a run of bytes first all lowest fields, then the next ones."""
    runs = bytes_.reshape(*bytes_.shape[:-1], -1, 1, run)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return ((runs >> shifts) & np.uint8((1 << bits) - 1)).reshape(*bytes_.shape[:-1], -1)


def _scales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and minima, 6 bits each, of the eight blocks of a span."""
    a, b, c = np.split(packed, 3, axis=-1)
    scales = np.concatenate([a & 63, (c & 15) | ((a >> 2) & 48)], axis=-1)
    return scales, np.concatenate([b & 63, (c >> 4) | ((b >> 2) & 48)], axis=-1)
