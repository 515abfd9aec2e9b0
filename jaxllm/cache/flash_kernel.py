"""Attention of a tile of queries over blocks of keys, as one kernel for Hopper GPUs:
FlashAttention-3 (Shah et al. 2024) through Pallas' Mosaic GPU.

Two warpgroups, or one where queries are few, multiply on tensor cores; another brings the next
blocks from memory meanwhile. For few queries the keys are cut into parts, which programs of their
own fold (flash-decoding, Dao et al. 2023).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from math import e, log2
from operator import or_
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxllm.cache.attention import LOWEST
from jaxllm.cache.flash import ROWS, Scores, Tiles

ACC: Any = plgpu.ACC  # type: ignore[attr-defined]
load: Any = partial(plgpu.load, optimized=False)


class _Span(NamedTuple):
    """Blocks low .. high of a ring or page `index`, seen as a whole before `whole`; the first
    position of block i is base + i times its size."""

    index: Any
    base: Any
    low: Any
    whole: Any
    high: Any


def flash(
    q: jax.Array,
    keys: tuple[jax.Array, ...],
    places: jax.Array,
    length: int,
    how: Scores,
    cut: Tiles,
    table: jax.Array | None = None,
    before: tuple[jax.Array, ...] = (),
) -> list[jax.Array]:
    """Queries q [N, K, Q, H] over rings k [B, K, C, H] and v [B, K, C, Hv], or over a group of
    pages, which look alike and may have keys and values joined in one array.

    Query j of a row is at position start + j mod length; a negative start is of a row that sees
    nothing. `places`, int32, has the starts [N], the positions [N] where rings begin to count
    (multiples of a block) and the number of the first row. A group of pages comes with the table
    that `attend_pages` takes.

    Returns m and l [N, parts, K, Q] and acc [N, parts, K, Q, Hv] as a `Carry` has them, float32, m
    for powers of two. `before` has the same of keys folded earlier. Each part has its own blocks of
    every page, and folds page after page: how pages are grouped changes no bit.
    """
    n, heads, queries, width = q.shape
    dtype = q.dtype
    groups, block, stages, parts, kept = cut
    tile, size = groups * ROWS, keys[0].shape[2] // block
    count, given = queries // tile, () if table is None else (table,)
    pages = None if table is None else len(keys[0])
    scale = how.scale * log2(e) if how.softcap is None else how.scale
    k_columns = pl.ds(0, width)
    v_columns = pl.ds(width if len(keys) == 1 else 0, how.v_dim)

    def body(q_ref: Any, *refs: Any) -> None:
        k_ref, v_ref, at_ref = refs[0], refs[len(keys) - 1], refs[len(keys)]
        table_ref, rest = refs[len(keys) + len(given)], refs[len(keys) + len(given) + 1 :]
        before_refs, rest = rest[: len(before)], rest[len(before) :]
        m_ref, l_ref, acc_ref, q_smem, union, v_smem, sums, *barriers = rest
        k_smem, acc_smem = union
        q_ready, k_ready, v_ready, k_free, v_free = barriers
        part, index, head, row = (lax.axis_index(a) for a in ("part", "tile", "head", "row"))
        group = lax.axis_index("group")
        if length > 1:  # late positions see the most keys: theirs come first
            per_head, heads_in = length // tile, count // (length // tile)
            index = lax.rem(index, heads_in) * per_head + per_head - 1 - lax.div(index, heads_in)
        own = index * tile + group * ROWS
        start, zero = at_ref[row], jnp.int32(0)
        first = start + (lax.rem(index * tile, length) if length > 1 else 0)
        last = first + (tile if length > 1 else 1) - 1
        q_first = start + (lax.rem(own, length) if length > 1 else 0)

        def ring(_: Any) -> _Span:
            oldest = at_ref[n + row]
            if how.window is not None:
                oldest = jnp.maximum(oldest, first - how.window + 1)
            oldest = lax.div(oldest, jnp.int32(block))
            blocks = lax.div(last + block, block) - oldest  # each has its positions, or later ones
            each = lax.div(blocks + parts - 1, parts)
            low = oldest + part * each
            high = jnp.minimum(oldest + blocks, low + each)
            whole = low
            if how.window is None:
                whole = jnp.clip(lax.div(q_first + 1, block), low, jnp.maximum(low, high))
            return _Span(at_ref[2 * n] + row, zero, low, whole, high)

        def page(i: Any) -> _Span:
            assert pages is not None and table is not None
            turn, folds = table_ref[table.size - 2], table_ref[table.size - 1]
            mine = at_ref[2 * n] + row
            listed = lax.div(folds, jnp.int32(pages))  # rows that have every page
            has = reduce(or_, ((j < listed) & (table_ref[pages + j] == mine) for j in range(n)))
            if pages > 1:  # or each page has a row of its own
                has = jnp.where(turn == 1, table_ref[pages + i] == mine, has)
            base, share = table_ref[i], -(-size // parts)
            low = part * share
            high = jnp.minimum(jnp.int32(size), low + share)
            high = jnp.where(has & (last >= base), jnp.maximum(low, high), low)
            whole = low
            if how.window is None:
                whole = jnp.where(q_first >= base + size * block - 1, high, low)
            return _Span(i, base, low, whole, high)

        def over(spans: Callable[[Any, Any], Any], begun: Any) -> Any:
            """Fold all spans in order."""
            if pages is None:
                return spans(zero, begun)
            return lax.fori_loop(0, pages, spans, begun)

        find = ring if pages is None else page

        @pl.when(group < groups)
        def _multiply() -> None:
            if groups > 1:
                plgpu.set_max_registers(240, action="increase")
            mine = q_smem.at[group]
            plgpu.copy_gmem_to_smem(q_ref.at[row, head, pl.ds(own, ROWS)], mine, q_ready.at[group])
            plgpu.barrier_wait(q_ready.at[group])

            def fold(i: Any, carry: Any, span: _Span, masked: bool) -> Any:
                acc, m, l, used = carry  # noqa: E741
                slot = lax.rem(used, jnp.int32(stages))
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
                    x = jnp.where(seen(span.base + i * block), x, -jnp.inf)
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
                return acc, most, l, used + 1

            def seen(k_first: Any) -> Any:
                iota = partial(
                    plgpu.broadcasted_iota, jnp.int32, (ROWS, block), layout=plgpu.Layout.WGMMA
                )
                ahead = iota(1) + (k_first - q_first)  # of a key before its query: negative
                if length > 1:
                    ahead = ahead - iota(0)
                found = ahead <= 0
                return found if how.window is None else found & (ahead > -how.window)

            def full(value: float, shape: tuple[int, ...], layout: Any) -> Any:
                return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

            by_row = plgpu.Layout.WGMMA.reduce(1)
            here = (row, part, head, pl.ds(own, kept))
            if before:
                m, l, acc = before_refs  # noqa: E741
                carry = (
                    load(acc.at[here], layout=plgpu.Layout.WGMMA),
                    load(m.at[here], layout=by_row),
                    load(l.at[here], layout=by_row),
                )
            else:
                carry = (
                    full(0.0, (ROWS, how.v_dim), plgpu.Layout.WGMMA),
                    full(LOWEST, (ROWS,), by_row),
                    full(0.0, (ROWS,), by_row),
                )

            def spans(i: Any, carry: Any) -> Any:
                span = find(i)
                unmasked, masked = (partial(fold, span=span, masked=m) for m in (False, True))
                carry = lax.fori_loop(span.low, span.whole, unmasked, carry)
                return lax.fori_loop(span.whole, span.high, masked, carry)

            acc, m, l, _ = over(spans, (*carry, zero))  # noqa: E741
            sums.at[group, 0][...] = m
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

            def bring(i: Any, used: Any, span: _Span) -> Any:
                slot = lax.rem(used, jnp.int32(stages))
                here = (span.index, head, pl.ds(lax.rem(i, size) * block, block))
                for ref, columns, smem, ready, free in (
                    (k_ref, k_columns, k_smem, k_ready, k_free),
                    (v_ref, v_columns, v_smem, v_ready, v_free),
                ):

                    @pl.when(used >= stages)
                    def _wait(free: Any = free) -> None:
                        plgpu.barrier_wait(free.at[slot])

                    plgpu.copy_gmem_to_smem(ref.at[*here, columns], smem.at[slot], ready.at[slot])
                return used + 1

            def spans(i: Any, used: Any) -> Any:
                span = find(i)
                return lax.fori_loop(span.low, span.high, partial(bring, span=span), used)

            over(spans, zero)

    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    free = plgpu.Barrier(num_arrivals=groups, num_barriers=stages)
    f32, total = jnp.float32, (n, parts, heads, kept if kept < ROWS else queries)
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
        grid=(parts, count, heads, n),
        grid_names=("part", "tile", "head", "row"),
        num_threads=groups + 1,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    return kernel(q, *keys, places, *given, *before)
