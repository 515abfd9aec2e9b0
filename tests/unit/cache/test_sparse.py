"""The choice of keys, or of blocks of them, folded in parts, against plain numpy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.cache.attention import Seen, visible_positions
from jaxllm.cache.blocks import no_blocks
from jaxllm.cache.sparse import no_followed, no_keys
from jaxllm.models.config import LayerConfig
from jaxllm.models.parts import BlockIndexer, Follower, Indexer, Latent, Rope
from support import layer_config

TURNED, SMALL, LATENT, HEADS, TOP = 2, 4, 6, 3, 5
KEYS, QUERIES, GROUP = 24, 4, 2
POSITIONS = np.asarray([2, 6, 15, 23])  # the first sees fewer keys than it may keep
ROPE = Rope(10000.0, TURNED, "neighbours")
FLOAT = jnp.dtype(jnp.float32)
CFG = replace(
    layer_config(1, GROUP, TURNED + SMALL + LATENT, rope=ROPE, scale=0.3),
    v_dim=LATENT,
    latent=Latent(0, 4, 4),
    indexer=Indexer(HEADS, SMALL, TOP, ROPE, bias=False, followed=True),
)
SIZE, BLOCKS, DIM, VALUE = 4, 3, 6, 5
IN_BLOCKS = replace(
    layer_config(1, GROUP, DIM, scale=0.3),
    v_dim=VALUE,
    indexer=BlockIndexer(SMALL, SIZE, BLOCKS, local=1, rope=ROPE),
)


def _parts(cfg: LayerConfig, parts: tuple[int, ...]) -> Iterator[tuple[slice, Seen]]:
    """Keys that are folded at a time, and what queries see of them."""
    for start, count in zip(np.cumsum((0, *parts)), parts, strict=False):
        own = jnp.arange(start, start + count)[None]
        floor = jnp.zeros((1,), jnp.int32)
        seen = visible_positions(cfg, jnp.asarray(POSITIONS)[None], own, floor)
        yield slice(start, start + count), seen


def _one_head(a: np.ndarray) -> jax.Array:
    """Keys or values [P, H] of one row and KV head."""
    return jnp.asarray(a[None, None], FLOAT)


def _turned(q: np.ndarray) -> jax.Array:
    """[T, G, H] -> [1, 1, G, T, H]."""
    return jnp.asarray(np.moveaxis(q, 1, 0)[None, None], FLOAT)


def _softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


@pytest.mark.parametrize("parts", [(KEYS,), (8, 16), (3, 1, 20)])
def test_best_keys(parts: tuple[int, ...]):
    """And the same keys of a layer that follows."""
    draw = np.random.default_rng(0).standard_normal
    k = draw((KEYS, CFG.k_dim))
    q, asked, weights = (
        draw((QUERIES, *s)) for s in ((GROUP, CFG.k_dim), (HEADS, SMALL), (HEADS,))
    )
    q[..., TURNED : TURNED + SMALL] = 0
    asks = np.concatenate([asked.reshape(QUERIES, -1), weights], axis=-1)
    kept = no_keys(CFG, jnp.asarray(asks, FLOAT)[None, :, None], FLOAT)
    for own, seen in _parts(CFG, parts):
        kept = kept.fold(CFG, _turned(q), _one_head(k[own]), _one_head(k[own, :0]), seen)
    after = replace(CFG, k_dim=TURNED + LATENT, indexer=Follower(TOP))
    k_after, q_after = draw((KEYS, after.k_dim)), draw((QUERIES, GROUP, after.k_dim))
    followed = no_followed(after, kept.chosen, 1, FLOAT)
    for own, seen in _parts(after, parts):
        k_own = _one_head(k_after[own])
        followed = followed.fold(after, _turned(q_after), k_own, k_own[..., :0], seen)
    _, total, values = kept.attend(CFG, _turned(q))
    found = np.asarray(values / total[..., None])[0, 0]  # [G, T, Hv]
    _, total, values = followed.attend(after, _turned(q_after))
    found_after = np.asarray(values / total[..., None])[0, 0]
    for t, at in enumerate(POSITIONS):
        small = k[: at + 1, TURNED : TURNED + SMALL]
        scores = np.maximum(asked[t] @ small.T, 0.0)
        best = np.argsort(-(weights[t] @ scores), kind="stable")[:TOP]
        chosen = np.asarray(kept.chosen)[0, 0, 0, t]
        assert sorted(chosen[chosen >= 0]) == sorted(best)
        for g in range(GROUP):
            for keys, query, result in ((k, q, found), (k_after, q_after, found_after)):
                want = _softmax(CFG.scale * keys[best] @ query[t, g]) @ keys[best, -LATENT:]
                np.testing.assert_allclose(result[g, t], want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("parts", [(KEYS,), (8, 16), (4, 4, 16)])
def test_best_blocks(parts: tuple[int, ...]):
    draw = np.random.default_rng(0).standard_normal
    k, v = draw((KEYS, DIM + SMALL)), draw((KEYS, VALUE))
    q, asked = draw((QUERIES, GROUP, DIM)), draw((QUERIES, SMALL))
    kept = no_blocks(IN_BLOCKS, jnp.asarray(asked, FLOAT)[None, :, None], GROUP)
    for own, seen in _parts(IN_BLOCKS, parts):
        kept = kept.fold(IN_BLOCKS, _turned(q), _one_head(k[own]), _one_head(v[own]), seen)
    _, total, values = kept.attend(IN_BLOCKS, _turned(q))
    found = np.asarray(values / total[..., None])[0, 0]
    for t, at in enumerate(POSITIONS):
        scores = k[: at + 1, DIM:] @ asked[t]
        best = [scores[i : i + SIZE].max() for i in range(0, at + 1, SIZE)]
        best[-1] = np.inf  # the query's own
        blocks = np.argsort(best)[::-1][:BLOCKS]
        keys = [i for i in range(at + 1) if i // SIZE in blocks]
        for g in range(GROUP):
            want = _softmax(IN_BLOCKS.scale * k[keys, :DIM] @ q[t, g]) @ v[keys]
            np.testing.assert_allclose(found[g, t], want, rtol=1e-4, atol=1e-4)
