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
from jaxllm.cache.attention import Carry, Ring, finish, join_page, page_table, start_carry
from jaxllm.cache.flash import (
    attend_flash,
    attend_pages_flash,
    flashes,
    no_parts,
    with_parts,
)
from jaxllm.cache.types import CACHE_TYPES, CacheFormat
from jaxllm.models.config import LayerConfig
from jaxllm.runtime import has_kernels

pytestmark = pytest.mark.skipif(
    not has_kernels(jax.devices()[0]), reason="no GPU that the attention kernel is for"
)
BF16 = jnp.bfloat16
ROUNDING = 1e-5  # NMSE: weights and results are bfloat16


def _layer(
    kv_heads: int, per_head: int, dim: int, window: int | None, cap: float | None, kind: str
) -> LayerConfig:
    base = model_config("small").layers[0]
    own = CACHE_TYPES[kind]
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
    cfg = _layer(kv_heads, per_head, dim, window, cap, "bf16")
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


@pytest.mark.parametrize("kind", ["bf16", "q8_0"])
def test_a_tail_begins_at_its_floor(kind: str) -> None:
    """Of rows that are not the first."""
    cfg = _layer(8, 4, 128, None, None, kind)
    floors, starts, capacity, row = (2048, 512), (2300, 515), 1024, 1
    k, v = (_normal(i, 3, 8, capacity, 128) for i in (1, 2))
    ring = Ring(cfg.cache.k.encode(k), cfg.cache.v.encode(v))
    ks, vs = (cfg.cache.k.decode(side, 128, BF16) for side in ring)
    q, positions = _normal(3, 2, 8, 4, 1, 128), _positions(starts, 1)
    carry, floor = start_carry(q, 128), jnp.asarray(floors, jnp.int32)
    run = jax.jit(lambda q, ring, n: attend_flash(cfg, carry, q, ring, n, positions, floor))
    found = _wide(finish(run(q, ring, jnp.int32(row)), BF16))
    for n, (first, start) in enumerate(zip(floors, starts, strict=True)):
        k_pos = np.arange(first, start + 1)
        k, v = (_wide(side[row + n])[:, k_pos % capacity] for side in (ks, vs))
        _close(found[n], _expected(cfg, _wide(q[n]), k, v, np.asarray(positions[n]), k_pos))


PAGES = [  # tokens, starts, first positions, rows, whether each page has one of them, first, type
    (1, (1030,), (0, 256, 512, 768), (0,), False, 0, "bf16"),
    (1, (300, 600), (0, 0, 256, 0), (3, 2, 3, 9), True, 2, "bf16"),
    (1, (1030, 800, 1100), (0, 256, 512, 768), (2, 4), False, 2, "bf16"),
    (256, (1024,), (0, 256, 512, 768), (0,), False, 0, "bf16"),
    (256, (768,), (0, 256, 256, 512), (1, 0, 1, 1), True, 1, "bf16"),
    (1, (1030,), (0, 256, 512, 768), (0,), False, 0, "q8_0"),
    (128, (1024,), (0, 256, 512, 768), (0,), False, 0, "q4_0"),
]


@pytest.mark.parametrize("case", PAGES, ids=str)
def test_pages(case: tuple) -> None:
    """Each row sees its own pages, and what its carry had seen before."""
    tokens, starts, firsts, rows, one_each, row, kind = case
    cfg, page = _layer(4, 4, 128, None, None, kind), 256
    k, v = (_normal(i, len(firsts), 4, page, 128) for i in (1, 2))
    stored = cfg.cache.k.encode(k), cfg.cache.v.encode(v)
    k, v = (cfg.cache.k.decode(side, 128, BF16) for side in stored)
    before_k, before_v = (_normal(i, len(starts), 4, 8, 128) for i in (3, 4))
    q = _normal(5, len(starts), 4, 4, tokens, 128)
    positions = _positions(starts, tokens)
    table = jnp.asarray(page_table(firsts, rows, len(starts), one_each))
    floor = jnp.zeros(len(starts), jnp.int32)

    @jax.jit
    def run(q: jax.Array, pages: tuple[jax.Array, ...], row: jax.Array) -> jax.Array:
        scores = jnp.einsum(
            "nkgth,nkph->nkgtp", q.astype(jnp.float32), before_k.astype(jnp.float32)
        )
        weights = jnp.exp(scores * cfg.scale)
        acc = jnp.einsum("nkgtp,nkph->nkgth", weights, before_v.astype(jnp.float32))
        carry = Carry(jnp.zeros(q.shape[:-1]), weights.sum(axis=-1), acc)
        places = table, row, positions, floor
        done = attend_pages_flash(cfg, no_parts(cfg, q, page), q, pages, *places)
        return finish(with_parts(carry, done, q), jnp.dtype(jnp.float32))

    found = _wide(run(q, join_page(*stored), jnp.int32(row)))
    for n in range(len(starts)):
        owners = [(rows[i],) if one_each else rows for i in range(len(firsts))]
        mine = [i for i, owner in enumerate(owners) if row + n in owner]
        own_k, own_v = (
            np.concatenate([_wide(old[n]), *(_wide(side[i]) for i in mine)], axis=1)
            for old, side in ((before_k, k), (before_v, v))
        )
        k_pos = np.concatenate([np.zeros(8), *(firsts[i] + np.arange(page) for i in mine)])
        _close(found[n], _expected(cfg, _wide(q[n]), own_k, own_v, np.asarray(positions[n]), k_pos))


def test_how_pages_are_grouped_changes_no_bit() -> None:
    """Groups of one, of two and of all pages, another row's pages between them, give the same."""
    cfg = _layer(4, 4, 128, None, None, "bf16")
    fold: Any = jax.jit(attend_pages_flash, static_argnums=0)
    pages = join_page(*(_normal(i, 6, 4, 256, 128) for i in (1, 2)))[0]
    rows, firsts = (0, 1, 0, 0, 1, 0), (0, 0, 256, 512, 256, 768)
    for tokens, starts in ((1, (1100, 700)), (256, (1024,))):
        q = _normal(3, len(starts), 4, 4, tokens, 128)
        positions, floor = _positions(starts, tokens), jnp.zeros(len(starts), jnp.int32)
        results = []
        for groups in ((range(6),), (range(4), range(4, 6)), ((0, 2, 3, 5), (1, 4))):
            parts = no_parts(cfg, q, 256)
            for group in map(list, groups):
                own_firsts, own_rows = ([known[i] for i in group] for known in (firsts, rows))
                table = jnp.asarray(page_table(own_firsts, own_rows, len(starts), one_each=True))
                own = (pages[np.asarray(group)],)
                parts = fold(cfg, parts, q, own, table, jnp.int32(0), positions, floor)
            results.append(b"".join(np.asarray(a).tobytes() for a in parts))
        assert len(set(results)) == 1, tokens
