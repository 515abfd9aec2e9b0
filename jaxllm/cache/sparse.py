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

from jaxllm.models.config import LayerConfig
from jaxllm.models.layers import Array, precision_of
from jaxllm.models.parts import Indexer

if TYPE_CHECKING:
    from jaxllm.cache.attention import Seen


class Kept(NamedTuple):
    """What queries ask [N, K, 1, T, I (Hi + 1)]; the scores and positions [N, K, 1, T, top_k] and
    keys [N, K, 1, T, top_k, H] of the best so far, where a score of -inf is of none."""

    asks: Array
    scores: Array
    at: Array
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
        best, found = lax.top_k(jnp.concatenate([self.scores, scores], axis=-1), count)
        old, new = jnp.minimum(found, count - 1), jnp.maximum(found - count, 0)

        def mixed(kept: Array, folded: Array, axis: int) -> Array:
            more = (1,) * (kept.ndim - found.ndim)
            ours, theirs, of = (i.reshape(*i.shape, *more) for i in (old, new, found))
            ours = jnp.take_along_axis(kept, ours, axis=axis)
            return jnp.where(of < count, ours, jnp.take_along_axis(folded, theirs, axis=axis))

        at = mixed(self.at, seen.keys[:, None, None, None], -1)
        return Kept(self.asks, best, at, mixed(self.keys, k[:, :, None, None], -2))

    def attend(self, cfg: LayerConfig, q: Array) -> tuple[Array, Array, Array]:
        """The m, l and acc of a carry for queries q [N, K, G, T, H] over the keys kept."""
        return _attend(cfg, q, self.keys, self.scores > -jnp.inf)

    @property
    def chosen(self) -> Array:
        """The positions of the keys kept, -1 for none: [N, 1, 1, T, top_k], as all KV heads choose
        alike."""
        return jnp.where(self.scores > -jnp.inf, self.at, -1)[:, :1]

    @property
    def small(self) -> Array:
        """What a fold changes, at its smallest: [N, K, 1, T]."""
        return self.scores[..., 0]


class Followed(NamedTuple):
    """Positions [N, K, 1, T, top_k] that an earlier layer has chosen, -1 for none, and their keys
    [N, K, 1, T, top_k, H] as far as they were folded."""

    at: Array
    keys: Array

    def fold(self, cfg: LayerConfig, q: Array, k: Array, v: Array, seen: Seen) -> Followed:
        """Fold keys [N, K, P, H] of positions that follow one another where they are visible."""
        place = self.at - seen.keys[:, :1, None, None, None]
        inside = (self.at >= 0) & (place >= 0) & (place < k.shape[2])
        place = jnp.where(inside, place, 0)
        inside &= jnp.take_along_axis(seen.visible[:, None, None], place, axis=-1)
        found = jnp.take_along_axis(k[:, :, None, None], place[..., None], axis=-2)
        return Followed(self.at, jnp.where(inside[..., None], found, self.keys))

    def attend(self, cfg: LayerConfig, q: Array) -> tuple[Array, Array, Array]:
        """As `Kept.attend`."""
        return _attend(cfg, q, self.keys, self.at >= 0)

    @property
    def small(self) -> Array:
        """What a fold changes, at its smallest: [N, K, 1, T]."""
        return self.keys[..., 0, 0]


def _attend(cfg: LayerConfig, q: Array, keys: Array, real: Array) -> tuple[Array, Array, Array]:
    """The m, l and acc of queries [N, K, G, T, H] over keys [N, K, 1, T, M, H], those that are."""
    product = partial(jnp.einsum, precision=precision_of(q), preferred_element_type=jnp.float32)
    keys = keys[:, :, 0]
    scores = product("nkgth,nktph->nkgtp", q, keys) * cfg.scale
    scores = jnp.where(real, scores, -jnp.inf)
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
    keys = jnp.zeros((*shape, cfg.k_dim), dtype)
    return Kept(asks, scores, jnp.zeros(shape, jnp.int32), keys)


def no_followed(cfg: LayerConfig, chosen: Array, kv_heads: int, dtype: jnp.dtype) -> Followed:
    """Where a fold begins, of what was chosen [N, 1, 1, T, top_k] before."""
    at = jnp.broadcast_to(chosen, (len(chosen), kv_heads, *chosen.shape[2:]))
    return Followed(at, jnp.zeros((*at.shape, cfg.k_dim), dtype))
