"""llama.cpp's rounding of tensor splits, for cross-checks against it.

Each cut is trunc(n * cumulative share / total) in float32, floored to a granularity; devices are
taken in an order rotated by one a layer, and the last of that order takes what is left. Source: the
tensor split mode of ggml-org/llama.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from sharding.errors import ShareError


def llama_cpp_cut(
    n: int, granularity: int, shares: Sequence[float], rotation: int
) -> tuple[int, ...]:
    """Cut `n` elements as llama.cpp does.

    Args:
        n: elements along the split dimension.
        granularity: elements that stay together.
        shares: one a device.
        rotation: the device that comes first; earlier layers of the same kind mod devices.

    Returns:
        Elements a device, in device order. Where the order ends in zero shares, the last device
        that has a share takes what is left: a zero share gets nothing.
    """
    if n < 0 or granularity < 1:
        raise ShareError(f"cannot cut {n} elements in pieces of {granularity}.")
    devices = len(shares)
    order = [(i + rotation) % devices for i in range(devices)]
    taking = [i for i in order if shares[i] > 0]
    if not taking:
        raise ShareError(f"shares {tuple(shares)!r} must be non-negative and not all zero.")
    cumulative = np.cumsum(np.asarray([shares[i] for i in order], np.float32), dtype=np.float32)
    at = dict(zip(order, cumulative, strict=True))
    total = cumulative[-1]
    counts = [0] * devices
    start = 0
    for i in taking[:-1]:
        stop = int(np.float32(n) * at[i] / total)
        # float32 may round a product up past n; nothing beyond n exists.
        stop = max(start, min(stop - stop % granularity, n))
        counts[i] = stop - start
        start = stop
    counts[taking[-1]] = n - start
    return tuple(counts)


def attention_granularity(
    q_per_kv: int, k_dim: int, devices: int, o_block: int = 1, gated_q: bool = False
) -> int:
    """KV heads that llama.cpp keeps together.

    Q and O are cut at multiples of lcm(q_per_kv * k_dim, b) elements, K, V and the cache at that
    / q_per_kv. b starts as the block size of the output projection's type and doubles while it is
    below 128 and b * devices < q_per_kv * k_dim. An architecture whose Q carries a gate cuts Q at
    2 * q_per_kv * k_dim of its doubled width, which is one KV head.
    """
    if gated_q:
        return 1
    head = q_per_kv * k_dim
    block = o_block
    while block < 128 and block * devices < head:
        block *= 2
    return math.lcm(head, block) // head


def mlp_granularity(mlp_block: int) -> int:
    """Columns of the MLP that llama.cpp keeps together, for a block size of the down tensor."""
    return math.lcm(mlp_block, 128)


def llama_cpp_heads(
    kv_heads: int,
    q_per_kv: int,
    k_dim: int,
    shares: Sequence[float],
    rotation: int,
    o_block: int = 1,
    gated_q: bool = False,
) -> tuple[int, ...]:
    """KV heads a device for one layer; the cut is made in elements of K, as llama.cpp does."""
    heads = attention_granularity(q_per_kv, k_dim, len(shares), o_block, gated_q)
    cut = llama_cpp_cut(kv_heads * k_dim, heads * k_dim, shares, rotation)
    return tuple(n // k_dim for n in cut)
