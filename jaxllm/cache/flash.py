"""Attention over a ring by a kernel, on devices that have one.

`attend_flash` stands for `attend_ring` and `attend_span`, which are the reference, where `flashes`
says that the kernel does what a layer asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxllm.cache.attention import Carry, Ring
from jaxllm.models.config import LayerConfig

ROWS = 64  # queries of a warpgroup: the least that a tensor core instruction takes
PROGRAMS = 132  # that run at a time for few queries: one a multiprocessor
SMALL = 64  # keys of a block for few queries
WIDTHS = (64, 128, 192, 256)  # of heads that the kernel has registers for
BLOCK = 128  # positions that a ring is made of, for the kernel


def has_kernel(device: Any) -> bool:
    """Whether a device has the instructions that the kernel is made of, and jax the interface."""
    modern = jax.__version_info__ >= (0, 11)
    return modern and getattr(device, "compute_capability", None) == "9.0"


def flashes(cfg: LayerConfig, count: int, dtype: Any, capacity: int) -> bool:
    """Whether the kernel does what a layer asks for: for `count` tokens of each row in this type,
    over rings of this capacity."""
    types = {jnp.dtype(dtype), jnp.dtype(cfg.cache.k.dtype), jnp.dtype(cfg.cache.v.dtype)}
    return (
        cfg.causal
        and not (cfg.chunked or cfg.alibi or cfg.relative or cfg.latent or cfg.indexer)
        and types in ({jnp.dtype(jnp.bfloat16)}, {jnp.dtype(jnp.float16)})
        and {cfg.k_dim, cfg.v_dim} <= {*WIDTHS}
        and capacity % BLOCK == 0
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
    """What is done to scores: their scale, a cap on their size, a window of positions."""

    scale: float
    softcap: float | None
    window: int | None


def tiles(queries: int, parts: int, width: int) -> Tiles:
    """For `queries` of a head whose keys may be cut into so many parts."""
    if queries >= ROWS:
        return Tiles(2, 64 if width > 128 else 128, 2, 1, ROWS)
    return Tiles(1, SMALL, 2 if width > 128 else 3, parts, -(-queries // 8) * 8)


def attend_flash(
    cfg: LayerConfig, carry: Carry, q: jax.Array, ring: Ring, row: jax.Array, positions: jax.Array
) -> Carry:
    """Fold a whole ring into the carry, as `attend_ring` does."""
    from jaxllm.cache.flash_kernel import flash  # takes a second, and most devices have no use

    n, heads, per_head, length, _ = q.shape
    parts = max(1, min(ring.capacity // SMALL, PROGRAMS // (n * heads)))
    cut = tiles(per_head * length, parts, max(cfg.k_dim, cfg.v_dim))
    at = jnp.append(positions[:, 0], row)
    how = Scores(cfg.scale, cfg.softcap, cfg.window)
    found = flash(_flat(q), ring.k, ring.v, at, length, how, cut)
    return _merged(carry, *_whole(found, per_head, length))


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
