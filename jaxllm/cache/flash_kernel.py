"""Attention of a tile of queries over blocks of keys, as one kernel for Hopper GPUs:
FlashAttention-3 (Shah et al. 2024) through Pallas' Mosaic GPU.

Two warpgroups, or one where queries are few, multiply on tensor cores; another brings the next
blocks from memory meanwhile. For few queries the keys are cut into parts, which programs of their
own fold (flash-decoding, Dao et al. 2023).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import e, log2
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxllm.cache.attention import LOWEST
from jaxllm.cache.flash import ROWS, Scores, Tiles

ACC: Any = plgpu.ACC  # type: ignore[attr-defined]
load: Any = partial(plgpu.load, optimized=False)  # jax before 0.11 wants more


class _Work(NamedTuple):
    """Of a program: whose queries, their start, its first block and where its blocks end; and from
    a block to its first position, its ring or page, the block in that, and whether it is seen."""

    row: Any
    start: Any
    low: Any
    high: Any
    block: Callable[[Any], tuple[Any, Any, Any, Any]]


def _ring_work(
    at: Any, n: int, s: Any, first: Any, last: Any, cut: Tiles, how: Scores, size: int
) -> _Work:
    """Over a ring of `size` blocks, for queries first .. last after their row's start."""
    start, floor, ring = at[s], at[n + s], at[2 * n] + s
    oldest = floor
    if how.window is not None:
        oldest = jnp.maximum(floor, start + first - how.window + 1)
    low = lax.div(oldest, cut.block)
    high = lax.div(start + last + cut.block, cut.block)
    return _Work(s, start, low, high, lambda i: (i * cut.block, ring, lax.rem(i, size), True))


def _page_work(at: Any, n: int, s: Any, pages: int, cut: Tiles, size: int) -> _Work:
    """Over the page of one fold for few queries, over all pages for a tile of one row's; behind n
    starts and the number of the first row is a `page_table`."""
    first_row, firsts, rows = at[n], n + 1, n + 1 + pages
    turn, folds = at.shape[0] - 2, at.shape[0] - 1
    none = jnp.int32(0)
    if cut.kept == ROWS:

        def of(i: Any) -> tuple[Any, Any, Any, Any]:
            page, inside = lax.div(i, size), lax.rem(i, size)
            owner = at[rows + jnp.where(at[turn] == 1, page, 0)]
            return at[firsts + page] + inside * cut.block, page, inside, owner == first_row

        return _Work(0, at[0], none, none + pages * size, of)
    page = lax.rem(s, jnp.int32(pages))
    row = at[jnp.minimum(rows + lax.div(s, at[turn]), turn - 1)] - first_row
    mine = (row >= 0) & (row < n) & (s < at[folds])
    row, first = jnp.clip(row, 0, n - 1), at[firsts + page]
    blocks = jnp.where(mine & (at[row] >= first), size, 0)
    return _Work(row, at[row], none, blocks, lambda i: (first + i * cut.block, page, i, True))


def flash(
    q: jax.Array,
    keys: tuple[jax.Array, ...],
    at: jax.Array,
    length: int,
    how: Scores,
    cut: Tiles,
    pages: int | None = None,
    begun: tuple[jax.Array, ...] = (),
) -> list[jax.Array]:
    """Queries q [N, K, Q, H] over rings k [B, K, C, H] and v [B, K, C, Hv], or over pages that look
    alike; pages may have keys and values joined in one array.

    Query j of a row is at position start + j mod length. `at`, int32, has of rings the starts [N],
    the positions [N] where they begin to count, and the ring of the first row; of pages the starts
    [N], the number of the first row, and the table that `attend_pages` takes.

    Returns m and l [S, parts, K, Q] and acc [S, parts, K, Q, Hv] as a `Carry` has them, float32: of
    each row; or of each fold of the table where queries are fewer than a tile, unless it is into a
    row that is not there. `begun` has the same of keys before, for one set in one part.
    """
    n, heads, queries, width = q.shape
    dtype, positions = q.dtype, keys[0].shape[2]
    groups, block, stages, parts, kept = cut
    tile, size = groups * ROWS, positions // block
    count = queries // tile
    sets = n if pages is None or kept == ROWS else n * pages
    scale = how.scale * log2(e) if how.softcap is None else how.scale
    k_columns = pl.ds(0, width)
    v_columns = pl.ds(width if len(keys) == 1 else 0, how.v_dim)

    def body(q_ref: Any, *refs: Any) -> None:
        k_ref, v_ref = refs[0], refs[len(keys) - 1]
        at_ref, *rest = refs[len(keys) :]
        before, rest = rest[: len(begun)], rest[len(begun) :]
        m_ref, l_ref, acc_ref, q_smem, union, v_smem, sums, *barriers = rest
        k_smem, acc_smem = union
        q_ready, k_ready, v_ready, k_free, v_free = barriers
        part, index, head, s = (lax.axis_index(a) for a in ("part", "tile", "head", "set"))
        group = lax.axis_index("group")
        if length > 1:  # late positions see the most keys: theirs come first
            per_head, heads_in = length // tile, count // (length // tile)
            index = lax.rem(index, heads_in) * per_head + per_head - 1 - lax.div(index, heads_in)
        own = index * tile + group * ROWS
        if pages is None:
            first = lax.rem(index * tile, length) if length > 1 else 0
            last = first + (tile if length > 1 else 1) - 1
            work = _ring_work(at_ref, n, s, first, last, cut, how, size)
        else:
            work = _page_work(at_ref, n, s, pages, cut, size)
        each = lax.div(work.high - work.low + parts - 1, parts)
        low = work.low + part * each
        high = jnp.minimum(work.high, low + each)

        # What becomes of a fold that is none is not read.
        idle = False if pages is None or kept == ROWS else work.high == 0

        @pl.when((group < groups) & ~jnp.bool_(idle))
        def _multiply() -> None:
            if groups > 1:
                plgpu.set_max_registers(240, action="increase")
            mine = q_smem.at[group]
            plgpu.copy_gmem_to_smem(
                q_ref.at[work.row, head, pl.ds(own, ROWS)], mine, q_ready.at[group]
            )
            plgpu.barrier_wait(q_ready.at[group])
            q_first = work.start + (lax.rem(own, length) if length > 1 else 0)

            def fold(i: Any, carry: Any, masked: bool) -> Any:
                acc, m, l = carry  # noqa: E741
                slot = lax.rem(i - low, jnp.int32(stages))
                plgpu.barrier_wait(k_ready.at[slot])

                def multiply(s_ref: Any) -> Any:
                    plgpu.wgmma(s_ref, mine, k_smem.at[slot].transpose((1, 0)))
                    return s_ref[...]

                x = pl.run_scoped(multiply, ACC((ROWS, block), jnp.float32))
                plgpu.barrier_arrive(k_free.at[slot])
                x = x * scale
                if how.softcap is not None:
                    x = jnp.tanh(x * (1 / how.softcap)) * (how.softcap * log2(e))
                if masked:
                    x = jnp.where(seen(i), x, -jnp.inf)
                most = jnp.maximum(m, x.max(axis=1))
                fade = jnp.exp2(m - most)
                p = jnp.exp2(x - lax.broadcast_in_dim(most, x.shape, [0]))
                acc = acc * lax.broadcast_in_dim(fade, acc.shape, [0])
                l = l * fade + p.sum(axis=1)  # noqa: E741
                weights = p.astype(dtype)
                plgpu.barrier_wait(v_ready.at[slot])

                def add(acc_ref: Any) -> None:
                    plgpu.wgmma(acc_ref, weights, v_smem.at[slot])

                acc = pl.run_state(add)(ACC.init(acc))
                plgpu.barrier_arrive(v_free.at[slot])
                return acc, most, l

            def seen(i: Any) -> Any:
                k_first, _, _, its = work.block(i)
                iota = partial(
                    plgpu.broadcasted_iota, jnp.int32, (ROWS, block), layout=plgpu.Layout.WGMMA
                )
                ahead = iota(1) + (k_first - q_first)  # of a key before its query: negative
                if length > 1:
                    ahead = ahead - iota(0)
                found = ahead <= 0
                if how.window is not None:
                    found = found & (ahead > -how.window)
                if pages is None:
                    found = found & (iota(1) >= at_ref[n + s] - k_first)
                return found if its is True else found & its

            def full(value: float, shape: tuple[int, ...], layout: Any) -> Any:
                return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

            by_row = plgpu.Layout.WGMMA.reduce(1)
            here = (s, part, head, pl.ds(own, kept))
            if before:
                m, l, acc = (ref.at[here] for ref in before)  # noqa: E741
                acc = load(acc, layout=plgpu.Layout.WGMMA)
                carry = acc, load(m, layout=by_row) * log2(e), load(l, layout=by_row)
            else:
                carry = (
                    full(0.0, (ROWS, how.v_dim), plgpu.Layout.WGMMA),
                    full(LOWEST, (ROWS,), by_row),
                    full(0.0, (ROWS,), by_row),
                )
            whole = low  # blocks before it are seen as a whole
            if how.window is None and pages is None:
                whole = jnp.clip(lax.div(q_first + 1, block), low, jnp.maximum(low, high))
            elif how.window is None and kept < ROWS:
                whole = jnp.maximum(low, high)
            carry = lax.fori_loop(low, whole, partial(fold, masked=False), carry)
            acc, m, l = lax.fori_loop(whole, high, partial(fold, masked=True), carry)  # noqa: E741
            sums.at[group, 0][...] = m * (1 / log2(e))  # in base two until here
            sums.at[group, 1][...] = l
            if kept < ROWS:
                acc_smem[...] = acc
            else:
                acc_ref[here] = acc
            plgpu.commit_smem()
            for i, ref in enumerate((m_ref, l_ref)):
                plgpu.copy_smem_to_gmem(sums.at[group, i, pl.ds(0, kept)], ref.at[here])
            if kept < ROWS:
                plgpu.copy_smem_to_gmem(acc_smem.at[pl.ds(0, kept)], acc_ref.at[here])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(group == groups)
        def _bring() -> None:
            if groups > 1:
                plgpu.set_max_registers(24, action="decrease")

            @pl.loop(low, high)
            def _next(i: Any) -> None:
                slot = lax.rem(i - low, jnp.int32(stages))
                _, at, inside, _ = work.block(i)
                here = (at, head, pl.ds(inside * block, block))
                for ref, smem, ready, free, columns in (
                    (k_ref, k_smem, k_ready, k_free, k_columns),
                    (v_ref, v_smem, v_ready, v_free, v_columns),
                ):

                    @pl.when(i - low >= stages)
                    def _wait(free: Any = free) -> None:
                        plgpu.barrier_wait(free.at[slot])

                    plgpu.copy_gmem_to_smem(ref.at[*here, columns], smem.at[slot], ready.at[slot])

    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    free = plgpu.Barrier(num_arrivals=groups, num_barriers=stages)
    f32, total = jnp.float32, (sets, parts, heads, kept if kept < ROWS else queries)
    whole_acc = (ROWS, how.v_dim) if kept < ROWS else (8, 8)
    kernel = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct(total, f32),
            jax.ShapeDtypeStruct(total, f32),
            jax.ShapeDtypeStruct((*total, how.v_dim), f32),
        ],
        scratch_types=[
            plgpu.SMEM((groups, ROWS, width), dtype, transforms=swizzled),
            plgpu.RefUnion(  # keys are done with when sums are written
                plgpu.SMEM((stages, block, width), dtype, transforms=swizzled),
                plgpu.SMEM(whole_acc, f32),
            ),
            plgpu.SMEM((stages, block, how.v_dim), dtype, transforms=swizzled),
            plgpu.SMEM((groups, 2, ROWS), f32),
            plgpu.Barrier(num_barriers=groups),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
            free,
            free,
        ],
        grid=(parts, count, heads, sets),
        grid_names=("part", "tile", "head", "set"),
        num_threads=groups + 1,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    return kernel(q, *keys, at, *begun)
