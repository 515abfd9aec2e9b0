"""The attention kernel against softmax in float64, on a GPU that has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.bench.shapes import model_config
from jaxllm.cache.attention import Ring, finish, start_carry
from jaxllm.cache.flash import attend_flash, flashes, has_kernel
from jaxllm.cache.types import CACHE_TYPES, CacheFormat
from jaxllm.models.config import LayerConfig

pytestmark = pytest.mark.skipif(
    not has_kernel(jax.devices()[0]), reason="no GPU that the attention kernel is for"
)
BF16 = jnp.bfloat16
ROUNDING = 1e-5  # NMSE: weights and results are bfloat16


def _layer(
    kv_heads: int, per_head: int, dim: int, window: int | None, cap: float | None
) -> LayerConfig:
    base = model_config("small").layers[0]
    own = CACHE_TYPES["bf16"]
    sizes: dict[str, Any] = {"kv_heads": kv_heads, "q_per_kv": per_head, "k_dim": dim, "v_dim": dim}
    how: dict[str, Any] = {"window": window, "softcap": cap, "scale": dim**-0.5}
    return replace(base, **sizes, **how, cache=CacheFormat(own, own))


def _normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.PRNGKey(seed), shape).astype(BF16)


def _positions(starts: Sequence[int], tokens: int) -> jax.Array:
    return jnp.asarray(starts, jnp.int32)[:, None] + jnp.arange(tokens, dtype=jnp.int32)


def _expected(
    cfg: LayerConfig,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    q_pos: np.ndarray,
    k_pos: np.ndarray,
) -> np.ndarray:
    """q [K, G, T, H], k and v [K, P, H], positions [T] and [P]: [T, K, G, Hv], float64."""
    scores = np.einsum("kgth,kph->kgtp", q, k) * cfg.scale
    if cfg.softcap is not None:
        scores = cfg.softcap * np.tanh(scores / cfg.softcap)
    distance = q_pos[:, None] - k_pos[None]
    seen = (distance >= 0) & (distance < (cfg.window or np.inf)) & (k_pos >= 0)[None]
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("kgtp,kph->tkgh", weights, v)


def _close(found: np.ndarray, want: np.ndarray, limit: float = ROUNDING) -> None:
    assert np.square(found - want).sum() / np.square(want).sum() < limit


def _wide(x: jax.Array) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


RINGS = [  # kv heads, per head, dim, ring, tokens, starts, window, cap
    (8, 4, 128, 1024, 256, (0,), None, None),
    (8, 4, 128, 1024, 512, (512,), None, None),
    (2, 4, 64, 1024, 128, (128,), None, None),
    (2, 2, 256, 1024, 256, (256,), None, 30.0),
    (4, 2, 128, 1024, 256, (2304,), 300, None),
    (8, 4, 128, 1024, 1, (700,), None, None),
    (8, 4, 128, 2048, 1, (63, -1, 2047), None, None),
    (4, 8, 64, 1024, 1, (5000, 900), 512, None),
    (2, 16, 128, 2048, 1, (2047, 64), None, None),
    (4, 2, 256, 1024, 1, (777,), None, 50.0),
]


@pytest.mark.parametrize("case", RINGS, ids=str)
def test_rings(case: tuple) -> None:
    """One chunk of a row, or one token of several; a row without request is left out."""
    kv_heads, per_head, dim, capacity, tokens, starts, window, cap = case
    cfg = _layer(kv_heads, per_head, dim, window, cap)
    assert flashes(cfg, tokens, BF16, capacity)
    rows, spare = len(starts), 1
    ring = Ring(*(_normal(i, rows + spare, kv_heads, capacity, dim) for i in (1, 2)))
    q = _normal(3, rows, kv_heads, per_head, tokens, dim)
    positions = _positions(starts, tokens)

    @jax.jit
    def run(q: jax.Array, ring: Ring, row: jax.Array) -> jax.Array:
        return finish(attend_flash(cfg, start_carry(q, dim), q, ring, row, positions), BF16)

    found = _wide(run(q, ring, jnp.int32(spare)))
    for n, start in enumerate(starts):
        if start < 0:
            continue
        newest, slots = start + tokens - 1, np.arange(capacity)
        k_pos = newest - (newest - slots) % capacity
        k, v = (_wide(side[spare + n]) for side in ring)
        _close(found[n], _expected(cfg, _wide(q[n]), k, v, np.asarray(positions[n]), k_pos))
