"""The choice of keys by an indexer, folded in parts, against plain numpy."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.cache.sparse import attend_kept, keep_best, nothing_kept
from jaxllm.models.parts import Indexer, Latent, Rope
from support import layer_config

TURNED, SMALL, LATENT, HEADS, TOP = 2, 4, 6, 3, 5
KEYS, QUERIES, GROUP = 24, 4, 2
ROPE = Rope(10000.0, TURNED, "neighbours")
CFG = replace(
    layer_config(1, GROUP, TURNED + SMALL + LATENT, rope=ROPE, scale=0.3),
    v_dim=LATENT,
    latent=Latent(0, 4, 4),
    indexer=Indexer(HEADS, SMALL, TOP, ROPE, bias=False),
)


@pytest.mark.parametrize("parts", [(KEYS,), (8, 16), (3, 1, 20)])
def test_best_keys(parts: tuple[int, ...]):
    draw = np.random.default_rng(0).standard_normal
    k = draw((KEYS, CFG.k_dim))
    q, asked, weights = (
        draw((QUERIES, *s)) for s in ((GROUP, CFG.k_dim), (HEADS, SMALL), (HEADS,))
    )
    q[..., TURNED : TURNED + SMALL] = 0
    positions = np.asarray([2, 6, 15, 23])  # the first sees fewer keys than it may keep
    asks = np.concatenate([asked.reshape(QUERIES, -1), weights], axis=-1)
    kept = nothing_kept(CFG, jnp.asarray(asks, jnp.float32)[None, :, None], jnp.dtype(jnp.float32))
    for start, count in zip(np.cumsum((0, *parts)), parts, strict=False):
        own = slice(start, start + count)
        seen = np.arange(KEYS)[None, own] <= positions[:, None]
        kept = keep_best(CFG, kept, jnp.asarray(k[None, None, own], jnp.float32), seen[None])
    turned = jnp.asarray(np.moveaxis(q, 1, 0)[None, None], jnp.float32)
    _, total, values = attend_kept(CFG, kept, turned)
    found = np.asarray(values / total[..., None])[0, 0]  # [G, T, Hv]
    for t, at in enumerate(positions):
        small = k[: at + 1, TURNED : TURNED + SMALL]
        scores = np.maximum(asked[t] @ small.T, 0.0)
        best = k[np.argsort(-(weights[t] @ scores), kind="stable")[:TOP]]
        for g in range(GROUP):
            p = np.exp(CFG.scale * best @ q[t, g])
            want = p / p.sum() @ best[:, -LATENT:]
            np.testing.assert_allclose(found[g, t], want, rtol=1e-4, atol=1e-4)
