"""Random blocks of a quantised type: they take the time of real ones, and their values are near
zero as those of weights are."""

from __future__ import annotations

from functools import cache

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from jaxllm.gguf.blocks import BLOCK_TYPES, STORED

DEVIATION = 0.02  # of the values, as of models before they are trained


def random_blocks(
    kind: GGMLQuantizationType, count: int, random: np.random.Generator, deviation: float
) -> np.ndarray:
    """Bytes of random blocks of a type of `BLOCK_TYPES`, of values around zero with this
    deviation: uint8 [count, bytes of a block]. No two blocks are alike, nor are their scales."""
    return _blocks(kind, count, random, deviation / _deviation(kind))


def _blocks(
    kind: GGMLQuantizationType, count: int, random: np.random.Generator, size: float
) -> np.ndarray:
    """Blocks whose scales are about `size`."""
    stored = np.dtype(STORED[kind])
    raw = random.integers(0, 256, (count, stored.itemsize), np.uint8)
    blocks, scales = raw.view(stored)[:, 0], size * random.uniform(0.5, 1.5, count)
    blocks["d"] = scales
    if BLOCK_TYPES[kind].minimum:  # K-quants subtract it, times a scale as large as that of d
        middle = 7.5 if BLOCK_TYPES[kind].bits == 4 else 15.5
        blocks["m"] = scales * middle * (1 if BLOCK_TYPES[kind].nested else -1)
    return raw


@cache
def _deviation(kind: GGMLQuantizationType) -> float:
    """Of the values of blocks whose scales are about one."""
    return float(dequantize(_blocks(kind, 1024, np.random.default_rng(0), 1.0), kind).std())
