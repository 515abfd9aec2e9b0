"""Attention to the blocks of keys that an indexer chooses (MiniMax-M3), as a fold.

A block of keys is as good as its best key by the KV group's own index query; the newest blocks
come first. What is folded at a time holds whole blocks, and so each of them has an attention of its
own, of which a query keeps those of the best blocks so far: a part (m, l, acc) a block, not its
keys. The parts are put together at the end.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
from jax import lax

from jaxllm.models.config import LayerConfig
from jaxllm.models.layers import Array, precision_of
from jaxllm.models.parts import BlockIndexer

if TYPE_CHECKING:
    from jaxllm.cache.attention import Seen

LOWEST = -1e30  # finite, so that exp(m - m) is 1 where nothing has been seen


class KeptBlocks(NamedTuple):
    """What queries ask [N, K, 1, T, Hi]; of the best blocks so far the scores [N, K, 1, T, M], -inf
    for none, and the parts m and l [N, K, G, T, M] and acc [N, K, G, T, M, Hv] of attention."""

    asks: Array
    scores: Array
    m: Array
    l: Array  # noqa: E741
    acc: Array

    def fold(self, cfg: LayerConfig, q: Array, k: Array, v: Array, seen: Seen) -> KeptBlocks:
        """Fold whole blocks: keys k [N, K, P, H + Hi] and v [N, K, P, Hv], q [N, K, G, T, H]."""
        own = cfg.indexer
        assert isinstance(own, BlockIndexer)
        product = partial(jnp.einsum, precision=precision_of(q), preferred_element_type=jnp.float32)
        k, small = jnp.split(k, [cfg.k_dim], axis=-1)
        visible = seen.visible[:, None, None]
        scores = _by_block(product("nkgth,nkph->nkgtp", self.asks, small), visible, own.size)
        scores = scores.max(axis=-1)
        away = seen.distance[:, None, None, :, :: own.size]  # of a block's first key
        near = (away >= 0) & (away < own.local * own.size)
        scores = jnp.where(near & (scores > -jnp.inf), jnp.inf, scores)
        found = product("nkgth,nkph->nkgtp", q, k) * cfg.scale
        found = _by_block(found, visible, own.size)
        m = jnp.maximum(found.max(axis=-1), LOWEST)
        weights = jnp.exp(found - m[..., None])
        v = v.reshape(*v.shape[:2], -1, own.size, v.shape[-1])
        acc = product("nkgtbs,nkbsh->nkgtbh", weights.astype(q.dtype), v)
        new = (scores, m, weights.sum(axis=-1), acc)
        both = [jnp.concatenate(parts, axis=4) for parts in zip(self[1:], new, strict=True)]
        best, at = lax.top_k(both[0], self.scores.shape[-1])
        m, l, acc = (  # noqa: E741
            jnp.take_along_axis(a, at.reshape(*at.shape, *(1,) * (a.ndim - at.ndim)), axis=4)
            for a in both[1:]
        )
        return KeptBlocks(self.asks, best, m, l, acc)

    def attend(self, cfg: LayerConfig, q: Array) -> tuple[Array, Array, Array]:
        """The m, l and acc of a carry over the blocks that were kept."""
        m = self.m.max(axis=-1)
        weights = jnp.exp(self.m - m[..., None])
        return m, (self.l * weights).sum(axis=-1), (self.acc * weights[..., None]).sum(axis=-2)

    @property
    def small(self) -> Array:
        """What a fold changes, at its smallest: [N, K, 1, T]."""
        return self.scores[..., 0]


def no_blocks(cfg: LayerConfig, asks: Array, q_per_kv: int) -> KeptBlocks:
    """Where a fold begins, of what is asked [N, T, K, Hi]."""
    assert isinstance(cfg.indexer, BlockIndexer)
    asks = jnp.moveaxis(asks, 1, 2)[:, :, None]
    lead, top = asks.shape[:-1], cfg.indexer.top
    shape = (*lead[:2], q_per_kv, lead[3], top)
    nothing = jnp.zeros(shape, jnp.float32)
    scores = jnp.full((*lead, top), -jnp.inf, jnp.float32)
    acc = jnp.zeros((*shape, cfg.v_dim), jnp.float32)
    return KeptBlocks(asks, scores, jnp.full_like(nothing, LOWEST), nothing, acc)


def _by_block(scores: Array, visible: Array, size: int) -> Array:
    """Scores [N, K, G, T, P] of visible keys, -inf of others: [N, K, G, T, P / size, size]."""
    scores = jnp.where(visible, scores, -jnp.inf)
    return scores.reshape(*scores.shape[:-1], -1, size)
