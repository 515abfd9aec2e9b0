"""Attention over rings and pages by a kernel, on devices that have one.

The functions stand for those of `jaxllm.cache.attention`, which are the reference, where `flashes`
says that the kernel does what a layer asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxllm.cache.attention import Carry, Ring, decode_block, split_page
from jaxllm.models.config import LayerConfig

ROWS = 64  # queries of a warpgroup: the least that a tensor core instruction takes
PROGRAMS = 132  # that run at a time for few queries: one a multiprocessor
SMALL = 64  # keys of a block for few queries
PART = 8  # blocks of a part of a page
WIDTHS = (64, 128, 192, 256)  # of heads that the kernel has registers for
MERGED = 4  # pages in one expression: XLA takes long to compile larger ones
BLOCK = 128  # positions that rings and pages are made of, for the kernel


def has_kernel(device: Any) -> bool:
    """Whether a device has the instructions that the kernel is made of, and jax the interface."""
    modern = jax.__version_info__ >= (0, 11)
    return modern and getattr(device, "compute_capability", None) == "9.0"


def flashes(cfg: LayerConfig, count: int, dtype: Any, positions: int, stored: bool = True) -> bool:
    """Whether the kernel does what a layer asks for: for `count` tokens of each row in this type,
    over rings or pages of so many positions, with keys and values as they are `stored` or
    decoded."""
    types = {jnp.dtype(dtype)}
    if stored:
        types |= {jnp.dtype(cfg.cache.k.dtype), jnp.dtype(cfg.cache.v.dtype)}
    return (
        cfg.causal
        and not (cfg.chunked or cfg.alibi or cfg.latent or cfg.indexer)
        and types in ({jnp.dtype(jnp.bfloat16)}, {jnp.dtype(jnp.float16)})
        and {cfg.k_dim, cfg.v_dim} <= {*WIDTHS}
        and positions % BLOCK == 0
        and (count % (2 * ROWS) == 0 or (count == 1 and cfg.q_per_kv <= ROWS - 8))
    )


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
    """Fold a ring into the carry, as `attend_ring` does; with a floor [N] as `attend_tail` does."""
    from jaxllm.cache.flash_kernel import flash  # takes a second, and most devices have no use

    n, heads, per_head, length, _ = q.shape
    parts = max(1, min(ring.capacity // SMALL, PROGRAMS // (n * heads)))
    cut = tiles(per_head * length, parts, max(cfg.k_dim, cfg.v_dim))
    floor = jnp.zeros((n,), jnp.int32) if floor is None else floor
    at = jnp.concatenate([positions[:, 0], floor, row[None]])
    found = flash(_flat(q), (ring.k, ring.v), at, length, _scores(cfg), cut)
    return _merged(carry, *_whole(found, per_head, length))


def attend_pages_flash(
    cfg: LayerConfig,
    carry: Carry,
    q: jax.Array,
    pages: tuple[jax.Array, ...],
    table: jax.Array,
    row: jax.Array,
    positions: jax.Array,
) -> Carry:
    """Fold a group of full pages into the carry, as `attend_pages` does. Each page is a part, or
    several, of the keys of its row; for a chunk of one row all pages are one."""
    from jaxllm.cache.flash_kernel import flash  # takes a second, and most devices have no use

    n, heads, per_head, length, _ = q.shape
    if len(pages) > 1 or cfg.cache.k.dtype != q.dtype:
        pages = decode_block(cfg, q, *split_page(cfg, pages))
    keys, *_ = pages
    count, page = keys.shape[0], keys.shape[2]
    cut = tiles(per_head * length, max(1, page // SMALL // PART), max(cfg.k_dim, cfg.v_dim))
    at = jnp.concatenate([positions[:, 0], row[None], table])
    if length > 1:  # one row's: its carry goes through the kernel
        before = carry.m, carry.l, carry.acc
        begun = tuple(a.reshape(1, 1, heads, -1, *a.shape[4:]) for a in before)
        found = flash(_flat(q), pages, at, length, _scores(cfg), cut, count, begun)
        m, l = (a.reshape(carry.m.shape) for a in found[:2])  # noqa: E741
        acc = found[2].reshape(carry.acc.shape)
        return carry._replace(m=m, l=l, acc=acc)
    found = flash(_flat(q), pages, at, length, _scores(cfg), cut, count)
    m, l, acc = _whole(found, per_head, length)  # noqa: E741
    folds = _folds(table, count, n, row)
    for page in range(count):  # in order, so that no bit follows from how pages are grouped
        if page and page % MERGED == 0:
            carry = jax.lax.optimization_barrier(carry)
        mine, i = folds[:, page] < len(m), jnp.minimum(folds[:, page], len(m) - 1)
        more = _merged(carry, m[i], l[i], acc[i])
        carry = jax.tree.map(partial(_chosen, mine), more, carry)
    return carry


def _folds(table: jax.Array, pages: int, rows: int, row: jax.Array) -> jax.Array:
    """Which fold of a `page_table` is of each page into each of the rows from `row` on: [N, M];
    N M where none is."""
    fold = jnp.arange(pages * rows)
    turn, folds = table[-2:]
    owner = table[pages:-2][jnp.minimum(fold // turn, len(table) - pages - 3)] - row
    owner = jnp.where((owner >= 0) & (fold < folds), owner, rows)
    nothing = jnp.full((rows, pages), len(fold))
    return nothing.at[owner, fold % pages].set(fold, mode="drop")


def _chosen(rows: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """The new array [N, ...] in these rows [N]."""
    return jnp.where(rows.reshape(-1, *(1,) * (new.ndim - 1)), new, old)


def _scores(cfg: LayerConfig) -> Scores:
    return Scores(cfg.scale, cfg.softcap, cfg.window, cfg.v_dim)


def _flat(q: jax.Array) -> jax.Array:
    """[N, K, G, T, H] -> [N, K, Q, H], where Q fills the tiles."""
    n, heads, per_head, length, width = q.shape
    flat = q.reshape(n, heads, per_head * length, width)
    missing = max(0, ROWS - per_head * length)
    return jnp.pad(flat, ((0, 0), (0, 0), (0, missing), (0, 0))) if missing else flat


def _whole(found: Sequence[jax.Array], per_head: int, length: int) -> Sequence[jax.Array]:
    """Of m and l [S, parts, K, Q] and acc [S, parts, K, Q, Hv] of parts, those of whole sets
    [S, K, G, T] and [S, K, G, T, Hv]."""
    m, l, acc = (  # noqa: E741
        a[:, :, :, : per_head * length].reshape(*a.shape[:3], per_head, length, *a.shape[4:])
        for a in found
    )
    most = m.max(axis=1)
    fade = jnp.exp(m - most[:, None])
    return most, (l * fade).sum(axis=1), (acc * fade[..., None]).sum(axis=1)


def _merged(carry: Carry, m: jax.Array, l: jax.Array, acc: jax.Array) -> Carry:  # noqa: E741
    """The carry with what other keys gave."""
    most = jnp.maximum(carry.m, m)
    old, new = jnp.exp(carry.m - most), jnp.exp(m - most)
    return carry._replace(
        m=most,
        l=carry.l * old + l * new,
        acc=carry.acc * old[..., None] + acc * new[..., None],
    )
