"""Attention over rings and pages by a kernel, on devices that have one.

`attend_flash` stands for `attend_ring`, `attend_span` and `attend_tail`, `attend_pages_flash` for
`attend_pages`. Those are the reference; `flashes` and `flashes_context` say where the kernel does
what a layer asks for.
"""

from __future__ import annotations

from math import log
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxllm.cache.attention import LOWEST, Carry, Ring, decode_block, split_page
from jaxllm.models.config import LayerConfig

ROWS = 64  # queries of a warpgroup: the least that a tensor core instruction takes
PROGRAMS = 132  # that run at a time for few queries: one a multiprocessor
SMALL = 64  # keys of a block for few queries
WIDTHS = (64, 128, 192, 256)  # of heads that the kernel has registers for
BLOCK = 128  # positions that a ring is made of, for the kernel


def flashes(cfg: LayerConfig, count: int, dtype: Any, capacity: int) -> bool:
    """Whether the kernel does what a layer asks for: for `count` tokens of each row in this type,
    over rings of this capacity, or pages of so many positions."""
    return (
        cfg.causal
        and not (cfg.chunked or cfg.alibi or cfg.relative or cfg.latent or cfg.indexer)
        and jnp.dtype(dtype) in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
        and {cfg.k_dim, cfg.v_dim} <= {*WIDTHS}
        and capacity % BLOCK == 0
        and (count % (2 * ROWS) == 0 or (count == 1 and cfg.q_per_kv <= ROWS - 8))
    )


def flashes_context(cfg: LayerConfig, count: int, dtype: Any, capacity: int) -> bool:
    """The same over rings of a whole context. One token pays for no ring that has to be decoded,
    as all of it is, however little of it the token sees."""
    return flashes(cfg, count, dtype, capacity) and (count > 1 or _stored_as(cfg, dtype))


def _stored_as(cfg: LayerConfig, dtype: Any) -> bool:
    """Whether a cache has its values in this type, as the kernel reads them."""
    return {jnp.dtype(each.dtype) for each in (cfg.cache.k, cfg.cache.v)} == {jnp.dtype(dtype)}


class Tiles(NamedTuple):
    """How a kernel is cut: warpgroups that multiply, keys of a block, blocks in flight, parts of
    the keys, and rows of a tile that are kept."""

    groups: int
    block: int
    stages: int
    parts: int
    kept: int


class Scores(NamedTuple):
    """What is done to scores: their scale, a cap on their size, a window of positions. And the
    width of values, which may be joined to keys."""

    scale: float
    softcap: float | None
    window: int | None
    v_dim: int


class Parts(NamedTuple):
    """What queries have of full pages: m (for powers of two) and l [N, parts, K, Q] and acc
    [N, parts, K, Q, Hv], where Q fills the kernel's tiles."""

    m: jax.Array
    l: jax.Array  # noqa: E741
    acc: jax.Array


def tiles(queries: int, parts: int, width: int) -> Tiles:
    """For `queries` of a head whose keys may be cut into so many parts."""
    if queries >= ROWS:
        return Tiles(2, 64 if width > 128 else 128, 2, 1, ROWS)
    return Tiles(1, SMALL, 2 if width > 128 else 3, parts, -(-queries // 8) * 8)


def attend_flash(
    cfg: LayerConfig,
    carry: Carry,
    q: jax.Array,
    ring: Ring,
    row: jax.Array,
    positions: jax.Array,
    floor: jax.Array | None = None,
) -> Carry:
    """Fold a whole ring into the carry, as `attend_ring` does; with a floor [N] as `attend_tail`
    does."""
    from jaxllm.cache.flash_kernel import flash  # takes a second, and most devices have no use

    keys, cut = (ring.k, ring.v), _cut(cfg, q, ring.capacity)
    if not _stored_as(cfg, q.dtype):
        k, v = (jax.lax.dynamic_slice_in_dim(a, row, len(q)) for a in keys)
        keys, row = decode_block(cfg, q, k, v), jnp.zeros_like(row)
    floor = jnp.zeros((len(q),), jnp.int32) if floor is None else floor
    found = flash(_flat(q), keys, _places(positions, floor, row), q.shape[3], _scores(cfg), cut)
    return with_parts(carry, Parts(*found), q)


def no_parts(cfg: LayerConfig, q: jax.Array, page: int) -> Parts:
    """Where a fold of pages of so many positions begins, for queries q [N, K, G, T, H]."""
    n, heads, per_head, length, _ = q.shape
    cut = _cut_pages(cfg, q, page)
    lead = n, cut.parts, heads, max(ROWS, per_head * length)
    nothing = jnp.zeros(lead, jnp.float32)
    return Parts(jnp.full_like(nothing, LOWEST), nothing, jnp.zeros((*lead, cfg.v_dim)))


def attend_pages_flash(
    cfg: LayerConfig,
    before: Parts,
    q: jax.Array,
    pages: tuple[jax.Array, ...],
    table: jax.Array,
    row: jax.Array,
    positions: jax.Array,
    floor: jax.Array,
) -> Parts:
    """Fold a group of full pages, as `attend_pages` does; their ring's floor [N] is not read."""
    from jaxllm.cache.flash_kernel import flash  # takes a second, and most devices have no use

    if not _stored_as(cfg, q.dtype):
        pages = decode_block(cfg, q, *split_page(cfg, pages))
    cut, places = _cut_pages(cfg, q, pages[0].shape[2]), _places(positions, floor, row)
    return Parts(*flash(_flat(q), pages, places, q.shape[3], _scores(cfg), cut, table, before))


def with_parts(carry: Carry, parts: Parts, q: jax.Array) -> Carry:
    """The carry of queries q [N, K, G, T, H] with what they have of other keys."""
    per_head, length = q.shape[2:4]
    m, l, acc = (  # noqa: E741
        a[:, :, :, : per_head * length].reshape(*a.shape[:3], per_head, length, *a.shape[4:])
        for a in parts
    )
    most = m.max(axis=1)
    fade = jnp.exp2(m - most[:, None])
    l, acc = (l * fade).sum(axis=1), (acc * fade[..., None]).sum(axis=1)  # noqa: E741
    m = most * log(2)
    most = jnp.maximum(carry.m, m)
    old, new = jnp.exp(carry.m - most), jnp.exp(m - most)
    return carry._replace(
        m=most,
        l=carry.l * old + l * new,
        acc=carry.acc * old[..., None] + acc * new[..., None],
    )


def _places(positions: jax.Array, floor: jax.Array, row: jax.Array) -> jax.Array:
    """What `flash` takes; of a ring and of the pages before it alike, so that they share it."""
    return jnp.concatenate([positions[:, 0], floor, row[None]])


def _scores(cfg: LayerConfig) -> Scores:
    return Scores(cfg.scale, cfg.softcap, cfg.window, cfg.v_dim)


def _cut(cfg: LayerConfig, q: jax.Array, positions: int) -> Tiles:
    """For a ring, or pages, of so many positions."""
    n, heads, per_head, length, _ = q.shape
    parts = max(1, min(positions // SMALL, PROGRAMS // (n * heads)))
    return tiles(per_head * length, parts, max(cfg.k_dim, cfg.v_dim))


def _cut_pages(cfg: LayerConfig, q: jax.Array, page: int) -> Tiles:
    """For pages: all rows of a tile are kept, from group to group."""
    return _cut(cfg, q, page)._replace(kept=ROWS)


def _flat(q: jax.Array) -> jax.Array:
    """[N, K, G, T, H] -> [N, K, Q, H], where Q fills the tiles."""
    n, heads, per_head, length, width = q.shape
    flat = q.reshape(n, heads, per_head * length, width)
    missing = max(0, ROWS - per_head * length)
    return jnp.pad(flat, ((0, 0), (0, 0), (0, missing), (0, 0))) if missing else flat
