"""Attention to the keys that an indexer chooses (`jaxllm.models.indexer`), as a fold over blocks.

Of the blocks folded so far a query keeps the best keys and their scores. A key is scored alike in
whichever block it is, and of equal scores the earlier one stays: so neither the place nor the size
of blocks changes the choice. Attention is over what is left at the end.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxllm.models.config import Indexer, LayerConfig
from jaxllm.models.layers import Array, precision_of

if TYPE_CHECKING:
    from jaxllm.cache.attention import Seen


class Kept(NamedTuple):
    """What queries ask [N, K, 1, T, I (Hi + 1)], and the scores [N, K, 1, T, top_k] and keys
    [N, K, 1, T, top_k, H] of the best positions so far; a score of -inf is of none."""

    asks: Array
    scores: Array
    keys: Array

    def fold(self, cfg: LayerConfig, q: Array, k: Array, v: Array, seen: Seen) -> Kept:
        """Fold keys [N, K, P, H]."""
        indexer, rope = cfg.indexer, cfg.rope
        assert isinstance(indexer, Indexer) and rope is not None
        count = indexer.top_k
        asked, weights = jnp.split(self.asks, [indexer.heads * indexer.dim], axis=-1)
        asked = asked.reshape(*asked.shape[:-1], indexer.heads, indexer.dim)
        small = k[..., rope.dim : rope.dim + indexer.dim]
        product = partial(jnp.einsum, precision=precision_of(k), preferred_element_type=jnp.float32)
        found = jax.nn.relu(product("nkgtih,nkph->nkgtip", asked, small))
        scores = jnp.sum(found * weights.astype(jnp.float32)[..., None], axis=-2)
        scores = jnp.where(seen.visible[:, None, None], scores, -jnp.inf)
        best, at = lax.top_k(jnp.concatenate([self.scores, scores], axis=-1), count)
        old = jnp.take_along_axis(self.keys, jnp.minimum(at, count - 1)[..., None], axis=-2)
        new = jnp.maximum(at - count, 0)[..., None]
        new = jnp.take_along_axis(k[:, :, None, None], new, axis=-2)
        return Kept(self.asks, best, jnp.where((at < count)[..., None], old, new))

    def attend(self, cfg: LayerConfig, q: Array) -> tuple[Array, Array, Array]:
        """The m, l and acc of a carry for queries q [N, K, G, T, H] over the keys kept."""
        product = partial(jnp.einsum, precision=precision_of(q), preferred_element_type=jnp.float32)
        keys = self.keys[:, :, 0]
        scores = product("nkgth,nktph->nkgtp", q, keys) * cfg.scale
        scores = jnp.where(self.scores > -jnp.inf, scores, -jnp.inf)
        m = scores.max(axis=-1)
        weights = jnp.exp(scores - jnp.where(m == -jnp.inf, 0.0, m)[..., None])
        values = keys[..., cfg.k_dim - cfg.v_dim :]
        acc = product("nkgtp,nktph->nkgth", weights.astype(q.dtype), values)
        return m, weights.sum(axis=-1), acc


def no_keys(cfg: LayerConfig, asks: Array, dtype: jnp.dtype) -> Kept:
    """Where a fold begins, of what is asked [N, T, K, I (Hi + 1)]."""
    assert isinstance(cfg.indexer, Indexer)
    asks = jnp.moveaxis(asks, 1, 2)[:, :, None]
    shape = (*asks.shape[:-1], cfg.indexer.top_k)
    scores = jnp.full(shape, -jnp.inf, jnp.float32)
    return Kept(asks, scores, jnp.zeros((*shape, cfg.k_dim), dtype))
