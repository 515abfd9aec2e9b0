"""Attention of one token a row over its rings as a step of a kernel, on devices that have it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jaxllm.cache.attention import Ring
from jaxllm.cache.flash import flashes_context
from jaxllm.models.config import LayerConfig
from jaxllm.models.layers import Array, Heads
from jaxllm.models.products import Rings
from jaxllm.models.ptx.attention_sums import QUERIES

WIDTHS = (64, 128)  # of heads that a warp has registers for


def attends_token(cfg: LayerConfig, count: int, dtype: Any, capacity: int) -> bool:
    """Whether there is such a step for `count` tokens of each row in this type, over rings of this
    capacity that they are written to."""
    return (
        count == 1
        and flashes_context(cfg, count, dtype, capacity)
        and jnp.dtype(dtype) == jnp.dtype(jnp.bfloat16)
        and {cfg.k_dim, cfg.v_dim} <= {*WIDTHS}
        and cfg.q_per_kv <= QUERIES
        and cfg.owns_cache
        and not (cfg.softcap or cfg.sinks)
    )


def packed(heads: Heads) -> Array:
    """Queries, a key and a value [N, 1, K, ...] of one token a row, side by side: [N, K, ...]."""
    return jnp.concatenate([a.reshape(len(a), a.shape[2], -1) for a in heads if a is not None], -1)


def token_rings(cfg: LayerConfig, ring: Ring, row: Array, positions: Array) -> Rings:
    """What tokens at positions [N, 1] of a ring's rows from `row` on attend to; negative positions
    are of rows that take no part."""
    places = jnp.concatenate([positions[:, 0], row[None]])
    return Rings(ring.k, ring.v, places, cfg.q_per_kv, cfg.scale, cfg.window)
