"""Attention as a fold over blocks of keys and values (online softmax, Milakov and Gimelshein 2018).

A step takes queries, a float32 carry (m, l, acc) and one block of P positions, and returns the
carry. Every cache, ring or page, resident or streamed, goes through `attend_block`, one block
after the other in the order of positions: so where a block lives cannot change a bit, and a block
in which a row sees nothing leaves that row's carry exactly as it was.

Rings and pages hold rows as `LayerConfig.cache` stores them; they are decoded one block at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.cache.biases import Biases
from jaxllm.cache.blocks import KeptBlocks
from jaxllm.cache.sparse import Followed, Kept
from jaxllm.models.config import LayerConfig
from jaxllm.models.layers import Array, precision_of
from jaxllm.models.parts import BlockIndexer

TILE = 128  # queries of a chunk that are folded together over the chunk's own keys
SMALLEST_SPAN = 512  # slots of a ring that one decode step folds at once
LOWEST = -1e30  # finite, so that exp(m - m) is 1 where nothing has been seen yet


class Carry(NamedTuple):
    """Running maximum m and sum l [N, K, G, T], weighted values acc [N, K, G, T, Hv]; float32.

    Biases go along: by how much [N, K, G, T] each query's scores fall with distance, before they
    are scaled, or what is added to them afterwards.
    """

    m: Array
    l: Array  # noqa: E741
    acc: Array
    slopes: Array | None = None
    biases: Biases | None = None
    # In the place of all these, where an indexer chooses keys or blocks of them.
    kept: Kept | Followed | KeptBlocks | None = None


class Seen(NamedTuple):
    """What queries see of a block [N, T, P], how far away its keys are (float32), and the positions
    of these [N, P]."""

    visible: Array
    distance: Array
    keys: Array


def start_carry(
    q: Array, v_dim: int, slopes: Array | None = None, sinks: Array | None = None
) -> Carry:
    """The carry of queries q [N, K, G, T, H] that have seen nothing; slopes and sinks [K, G].

    A sink is a logit without a value, learned as in gpt-oss: it adds its exponential to the sum of
    weights and nothing to the weighted values. So a query begins as if that was all it had seen.
    """
    shape = q.shape[:-1]
    if slopes is not None:
        slopes = jnp.broadcast_to(slopes[None, :, :, None], shape)
    if sinks is None:
        m, l = jnp.full(shape, LOWEST, jnp.float32), jnp.zeros(shape, jnp.float32)  # noqa: E741
    else:
        m = jnp.broadcast_to(sinks[None, :, :, None], shape)
        l = jnp.ones(shape, jnp.float32)  # noqa: E741
    return Carry(m, l, jnp.zeros((*shape, v_dim), jnp.float32), slopes)


def attend_block(cfg: LayerConfig, carry: Carry, q: Array, k: Array, v: Array, seen: Seen) -> Carry:
    """Fold one block into the carry.

    q [N, K, G, T, H]; k [N, K, P, H] and v [N, K, P, Hv] in q's type. A layer that chooses blocks
    of keys is given whole ones.
    """
    if carry.kept is not None:
        return carry._replace(kept=carry.kept.fold(cfg, q, k, v, seen))
    exact = precision_of(q)
    product = partial(jnp.einsum, precision=exact, preferred_element_type=jnp.float32)

    def queries_left(q: Array, k: Array) -> Array:
        return product("nkgth,nkph->nkgtp", q, k)

    def keys_left(q: Array, k: Array) -> Array:  # on CPUs three times as fast for one position
        return jnp.moveaxis(product("nkph,nkgth->nkpgt", k, q), 2, -1)

    on_cpu = keys_left if q.shape[3] == 1 else queries_left
    scores = jax.lax.platform_dependent(q, k, cpu=on_cpu, default=queries_left)
    if carry.slopes is not None:  # one product an addition: compilers round two as they like
        scores = scores - carry.slopes[..., None] * seen.distance[:, None, None]
    scores = scores * cfg.scale
    if carry.biases is not None:
        scores = scores + carry.biases.of(seen.keys)
    if cfg.softcap is not None:
        scores = cfg.softcap * jnp.tanh(scores / cfg.softcap)
    scores = jnp.where(seen.visible[:, None, None], scores, -jnp.inf)
    m = jnp.maximum(carry.m, scores.max(axis=-1))
    weights = jnp.exp(scores - m[..., None])
    keep = jnp.exp(carry.m - m)
    values = product("nkgtp,nkph->nkgth", weights.astype(q.dtype), v)
    l = carry.l * keep + weights.sum(axis=-1)  # noqa: E741
    return carry._replace(m=m, l=l, acc=carry.acc * keep[..., None] + values)


def finish(carry: Carry, dtype: jnp.dtype) -> Array:
    """The attention output [N, T, K, G, Hv] of a carry; zero where nothing was visible."""
    l = jnp.where(carry.l == 0.0, 1.0, carry.l)  # noqa: E741
    o = (carry.acc / l[..., None]).astype(dtype)
    return jnp.moveaxis(o, 3, 1)


def decode_block(cfg: LayerConfig, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """Stored keys and values [..., row] as q's type [..., H] and [..., Hv]."""
    types = cfg.cache
    k = types.k.decode(k, cfg.k_stored, q.dtype)
    if cfg.latent is not None:
        return k, k[..., cfg.k_dim - cfg.v_dim :]
    return k, types.v.decode(v, cfg.v_dim, q.dtype)


def queries_first(q: Array) -> Array:
    """[N, T, K, G, H] -> [N, K, G, T, H]."""
    return jnp.moveaxis(q, 1, 3)


def visible_positions(
    cfg: LayerConfig, q_positions: Array, k_positions: Array, floor: Array
) -> Seen:
    """Which keys a query sees, from q_positions [N, T], k_positions [N, P], floor [N].

    Causal; not before `floor` (positions that another store holds); within the layer's window, or
    within its chunk of positions.
    """
    q_pos, k_pos = q_positions[:, :, None], k_positions[:, None, :]
    visible = (k_pos <= q_pos) & (k_pos >= floor[:, None, None])
    if cfg.window is not None:
        visible &= q_pos - k_pos < cfg.window
        if cfg.chunked:
            visible &= k_pos >= q_pos // cfg.window * cfg.window
    return Seen(visible, (q_pos - k_pos).astype(jnp.float32), k_positions)


class Ring(NamedTuple):
    """Stored keys and values [B, K, C, row] on the device; position p lives at p mod C.

    Where V is a part of K its rows are empty.

    C is a multiple of the page size and of the largest chunk, and a chunk never crosses a multiple
    of the largest chunk, so that a write is one contiguous slice. Positions past a row's end may
    hold anything: no query sees them before they are written.
    """

    k: Array
    v: Array

    @property
    def capacity(self) -> int:
        return self.k.shape[2]


def empty_ring(cfg: LayerConfig, shape: tuple[int, ...], where: Any) -> Ring:
    """A zeroed ring of `shape` [..., B, K, C] with the sharding `where`."""
    parts = (cfg.cache.k, cfg.k_stored), (cfg.cache.v, cfg.v_stored)
    return Ring(*(jnp.zeros((*shape, t.row(dim)), t.dtype, device=where) for t, dim in parts))


def write_ring(cfg: LayerConfig, ring: Ring, k: Array, v: Array, row: Array, starts: Array) -> Ring:
    """Write k [N, T, K, H] and v [N, T, K, Hv] of rows row .. row + N at positions starts [N].

    Of several rows, those with a negative start are not written.
    """

    def write(cache: Array, new: Array) -> Array:
        new = jnp.swapaxes(new, 1, 2)  # [N, K, T, row]
        at = starts % ring.capacity
        zero = jnp.zeros((), at.dtype)
        if new.shape[0] == 1:
            return jax.lax.dynamic_update_slice(cache, new, (row, zero, at[0], zero))
        at = jnp.where(starts < 0, ring.capacity, at)  # past the end: dropped
        rows = jnp.arange(len(new), dtype=at.dtype)
        windows = jax.lax.ScatterDimensionNumbers((1, 2, 3), (0,), (0, 2))
        return jax.lax.scatter(
            cache,
            jnp.stack([rows, at], axis=1),
            new,
            windows,
            indices_are_sorted=True,
            unique_indices=True,
            mode=jax.lax.GatherScatterMode.FILL_OR_DROP,
        )

    return Ring(write(ring.k, cfg.cache.k.encode(k)), write(ring.v, cfg.cache.v.encode(v)))


def ring_block(ring: Ring, row: Array, rows: int, first: Array, page: int) -> tuple[Array, Array]:
    """The block of `page` positions from position `first` [N] (a multiple of page) on, of `rows`
    rows from `row` on: stored k and v [N, K, P, row]."""
    at = first % ring.capacity
    zero = jnp.zeros((), at.dtype)

    def read(cache: Array) -> Array:
        sizes = (cache.shape[1], page, cache.shape[3])
        if rows == 1:
            return jax.lax.dynamic_slice(cache, (row, zero, at[0], zero), (1, *sizes))
        return jax.vmap(lambda c, i: jax.lax.dynamic_slice(c, (zero, i, zero), sizes))(cache, at)

    return read(ring.k), read(ring.v)


def ring_step(chunk: int, capacity: int) -> int:
    """Positions of the blocks in which a ring is folded for a chunk of so many queries.

    One query reads at most a sixteenth of the ring for nothing, and never folds more than sixteen
    blocks of a long one; a chunk wants products that are large and scores that stay small.
    """
    wanted = max(128, capacity // 16 if chunk == 1 else min(chunk, 512))
    return min(1 << (wanted.bit_length() - 1), capacity & -capacity)


def attend_ring(
    cfg: LayerConfig, carry: Carry, q: Array, ring: Ring, row: Array, positions: Array
) -> Carry:
    """Fold a whole ring: all blocks from the oldest that a query sees up to the newest.

    The number of blocks follows the positions [N, T], so that a step costs what its context does.
    """
    rows, chunk = positions.shape
    block = ring_step(chunk, ring.capacity)
    oldest = jnp.zeros((), jnp.int32)
    if cfg.window is not None:
        oldest = jnp.maximum(positions.min() - cfg.window + 1, 0) // block
    floor = jnp.zeros((rows,), jnp.int32)
    alone = cfg.causal and rows == 1 and chunk > TILE  # then it is itself folded as a triangle
    alone &= not isinstance(cfg.indexer, BlockIndexer)  # whose blocks a tile could cut
    alone &= carry.biases is None  # which are not made for tiles
    ends = positions[:, :1] if alone else positions[:, -1:] + 1

    def fold(i: Array, carry: Carry) -> Carry:
        # The same slice of every row: a plain slice, where rows of their own would be a gather.
        at = (i * block) % ring.capacity
        zero = jnp.zeros((), at.dtype)
        k, v = (
            jax.lax.dynamic_slice(c, (row, zero, at, zero), (rows, c.shape[1], block, c.shape[3]))
            for c in ring
        )
        k_pos = jnp.broadcast_to(i * block + jnp.arange(block), (rows, block))
        seen = visible_positions(cfg, positions, k_pos, floor)
        seen = seen._replace(visible=seen.visible & (k_pos < ends)[:, None])
        return attend_block(cfg, carry, q, *decode_block(cfg, q, k, v), seen)

    carry = jax.lax.fori_loop(oldest, -(-ends.max() // block), fold, carry)
    if alone:
        k, v = ring_block(ring, row, 1, positions[:, 0], chunk)
        keys = decode_block(cfg, q, k, v)
        carry = attend_itself(cfg, carry, q, *keys, start=positions[0, 0])
    return carry


def decode_spans(capacity: int) -> tuple[int, ...]:
    """Numbers of slots that `attend_span` has programs for: powers of two, and all of them. Part
    of a ring is copied before it is read, so that only a small part is worth it."""
    spans, span = [], SMALLEST_SPAN
    while 3 * span <= capacity:
        spans.append(span)
        span *= 2
    return (*spans, capacity)


def attend_span(
    cfg: LayerConfig, carry: Carry, q: Array, ring: Ring, row: Array, positions: Array, span: int
) -> Carry:
    """Fold the first `span` slots of a ring at once, for rows of one query each.

    A GPU asks the host before each turn of a loop whose length it computes; a fixed span needs no
    loop. Every position of positions [N, 1] below `capacity` must be below `span`.
    """
    rows, span = len(positions), min(span, ring.capacity)
    zero = jnp.zeros((), row.dtype)
    k, v = (
        jax.lax.dynamic_slice(c, (row, zero, zero, zero), (rows, c.shape[1], span, c.shape[3]))
        for c in ring
    )
    # Slot s holds the newest position that is congruent to it; before the first lap none.
    k_pos = positions - (positions - jnp.arange(span)) % ring.capacity
    floor = jnp.zeros((rows,), jnp.int32)
    seen = visible_positions(cfg, positions, k_pos, floor)
    return attend_block(cfg, carry, q, *decode_block(cfg, q, k, v), seen)


def attend_itself(
    cfg: LayerConfig, carry: Carry, q: Array, k: Array, v: Array, start: Array
) -> Carry:
    """Fold the keys [N, K, T, H] and values of the queries' own chunk, from position `start` on, a
    tile of queries at a time over the keys that it sees: half of the square."""
    tiles = []
    for first in range(0, q.shape[3], TILE):
        last = min(first + TILE, q.shape[3])
        oldest = 0 if cfg.window is None else max(0, first - cfg.window + 1) // TILE * TILE
        q_pos, k_pos = (start + jnp.arange(i, last)[None] for i in (first, oldest))
        seen = visible_positions(cfg, q_pos, k_pos, jnp.zeros((1,), jnp.int32))
        part = jax.tree.map(lambda c, a=first, b=last: c[:, :, :, a:b], carry)
        keys = slice(oldest, last)
        part = attend_block(cfg, part, q[:, :, :, first:last], k[:, :, keys], v[:, :, keys], seen)
        tiles.append(part)
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=3), *tiles)


def attend_tail(
    cfg: LayerConfig,
    carry: Carry,
    q: Array,
    ring: Ring,
    row: Array,
    positions: Array,
    floor: Array,
    page: int,
) -> Carry:
    """Fold the unfinished pages of each row: from `floor` [N] (a multiple of page), where its full
    pages end, to the newest position. Fewer than `page` positions precede the chunk there."""
    rows = positions.shape[0]

    def fold(i: Array, carry: Carry) -> Carry:
        first = floor + i * page
        k, v = ring_block(ring, row, rows, first, page)
        k_pos = first[:, None] + jnp.arange(page)
        seen = visible_positions(cfg, positions, k_pos, floor)
        return attend_block(cfg, carry, q, *decode_block(cfg, q, k, v), seen)

    blocks = ((positions.max(axis=1) - floor) // page).max() + 1
    return jax.lax.fori_loop(0, blocks, fold, carry)


def page_table(
    firsts: Sequence[int], rows: Sequence[int], slots: int, one_each: bool = False
) -> np.ndarray:
    """What `attend_pages` has to know of a group in a step of so many slots, int32: the first
    position of each page [M]; rows [max(M, slots)]; a turn and the number of folds. Fold i is of
    page i % M into rows[i // turn]. So all rows have each page, or each page has one of the rows.
    """
    pages = len(firsts)
    turn, folds = (1, pages) if one_each else (pages, pages * len(rows))
    room = (0,) * (max(pages, slots) - len(rows))
    return np.asarray([*firsts, *rows, *room, turn, folds], np.int32)


def attend_pages(
    cfg: LayerConfig,
    carry: Carry,
    q: Array,
    pages: tuple[Array, ...],
    table: Array,
    row: Array,
    positions: Array,
) -> Carry:
    """Fold a group of full pages, one page into one row after the other.

    pages: as `join_page` makes them, [M, K, P, ...]; table: as `page_table` does. The number of
    folds is traced on purpose: a loop of known length would be unrolled by the compiler and could
    round otherwise than in a group of another size.
    """
    rows = positions.shape[0]
    size = pages[0].shape[0]
    page = pages[0].shape[2]
    floor = jnp.zeros((1,), jnp.int32)
    turn, folds = table[-2:]

    def fold(i: Array, carry: Carry) -> Carry:
        n = i % size
        k, v = split_page(cfg, tuple(jax.lax.dynamic_slice_in_dim(p, n, 1) for p in pages))
        k, v = decode_block(cfg, q, k, v)
        mine = table[size + i // turn] - row  # the row among those of this step
        at = jnp.clip(mine, 0, rows - 1)
        take = partial(jax.lax.dynamic_slice_in_dim, start_index=at, slice_size=1)
        k_pos = table[n] + jnp.arange(page)[None]
        seen = visible_positions(cfg, take(positions), k_pos, floor)
        seen = seen._replace(visible=seen.visible & (at == mine))
        part = attend_block(cfg, jax.tree.map(take, carry), take(q), k, v, seen)
        put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=at, axis=0)
        return jax.tree.map(lambda c, p: put(c, p), carry, part)

    return jax.lax.fori_loop(0, folds, fold, carry)


def join_page(k: Any, v: Any) -> tuple[Any, ...]:
    """Stored keys and values of pages as they travel: one array if their dtypes allow it."""
    if k.dtype != v.dtype:
        return k, v
    return ((np if isinstance(k, np.ndarray) else jnp).concatenate([k, v], axis=-1),)


def split_page(cfg: LayerConfig, pages: tuple[Any, ...]) -> tuple[Any, Any]:
    """The inverse of `join_page`."""
    if len(pages) == 2:
        return pages[0], pages[1]
    row = cfg.cache.k.row(cfg.k_stored)
    return pages[0][..., :row], pages[0][..., row:]
