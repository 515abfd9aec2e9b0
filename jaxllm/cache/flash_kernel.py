"""Attention of a tile of queries over blocks of keys, as one kernel for Hopper GPUs:
FlashAttention-3 (Shah et al. 2024) through Pallas' Mosaic GPU.

Two warpgroups, or one where queries are few, multiply on tensor cores; another brings the next
blocks from memory meanwhile. For few queries the keys are cut into parts, which programs of their
own fold (flash-decoding, Dao et al. 2023).
"""

from __future__ import annotations

from functools import partial
from math import e, log2
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxllm.cache.attention import LOWEST
from jaxllm.cache.flash import ROWS, Scores, Tiles

ACC: Any = plgpu.ACC  # type: ignore[attr-defined]


def flash(
    q: jax.Array, k: jax.Array, v: jax.Array, at: jax.Array, length: int, how: Scores, cut: Tiles
) -> list[jax.Array]:
    """Queries q [N, K, Q, H] over rings k [B, K, C, H] and v [B, K, C, Hv].

    Query j of a row is at position start + j mod length; `at`, int32 [N + 1], has the starts and
    the ring of the first row. A negative start is of a row that sees nothing.

    Returns m and l [N, parts, K, Q] and acc [N, parts, K, Q, Hv] as a `Carry` has them, float32.
    """
    n, heads, queries, width = q.shape
    out_width, dtype = v.shape[-1], q.dtype
    groups, block, stages, parts, kept = cut
    tile, size = groups * ROWS, k.shape[2] // block
    count = queries // tile
    scale = how.scale * log2(e) if how.softcap is None else how.scale

    def body(q_ref: Any, k_ref: Any, v_ref: Any, at_ref: Any, *refs: Any) -> None:
        m_ref, l_ref, acc_ref, q_smem, union, v_smem, sums, *barriers = refs
        k_smem, acc_smem = union
        q_ready, k_ready, v_ready, k_free, v_free = barriers
        part, index, head, row = (lax.axis_index(a) for a in ("part", "tile", "head", "row"))
        group = lax.axis_index("group")
        if length > 1:  # late positions see the most keys: theirs come first
            per_head, heads_in = length // tile, count // (length // tile)
            index = lax.rem(index, heads_in) * per_head + per_head - 1 - lax.div(index, heads_in)
        own = index * tile + group * ROWS
        start, ring_row = at_ref[row], at_ref[n] + row
        first = start + (lax.rem(index * tile, length) if length > 1 else 0)
        last = first + (tile if length > 1 else 1) - 1
        oldest = 0 if how.window is None else lax.div(jnp.maximum(0, first - how.window + 1), block)
        blocks = lax.div(last + block, block) - oldest  # each holds its positions, or later ones
        each = lax.div(blocks + parts - 1, parts)
        low = oldest + part * each
        high = jnp.minimum(oldest + blocks, low + each)

        @pl.when(group < groups)
        def _multiply() -> None:
            if groups > 1:
                plgpu.set_max_registers(240, action="increase")
            mine = q_smem.at[group]
            plgpu.copy_gmem_to_smem(q_ref.at[row, head, pl.ds(own, ROWS)], mine, q_ready.at[group])
            plgpu.barrier_wait(q_ready.at[group])
            q_first = start + (lax.rem(own, length) if length > 1 else 0)

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
                iota = partial(
                    plgpu.broadcasted_iota, jnp.int32, (ROWS, block), layout=plgpu.Layout.WGMMA
                )
                ahead = iota(1) + (i * block - q_first)  # of a key before its query: negative
                if length > 1:
                    ahead = ahead - iota(0)
                found = ahead <= 0
                return found if how.window is None else found & (ahead > -how.window)

            def full(value: float, shape: tuple[int, ...], layout: Any) -> Any:
                return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

            by_row = plgpu.Layout.WGMMA.reduce(1)
            carry = (
                full(0.0, (ROWS, out_width), plgpu.Layout.WGMMA),
                full(LOWEST, (ROWS,), by_row),
                full(0.0, (ROWS,), by_row),
            )
            whole = low  # blocks before it are seen as a whole
            if how.window is None:
                whole = jnp.clip(lax.div(q_first + 1, block), low, jnp.maximum(low, high))
            carry = lax.fori_loop(low, whole, partial(fold, masked=False), carry)
            acc, m, l = lax.fori_loop(whole, high, partial(fold, masked=True), carry)  # noqa: E741
            sums.at[group, 0][...] = m * (1 / log2(e))  # in base two until here
            sums.at[group, 1][...] = l
            here = (row, part, head, pl.ds(own, kept))
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
                here = (ring_row, head, pl.ds(lax.rem(i, size) * block, block))
                for ref, smem, ready, free in (
                    (k_ref, k_smem, k_ready, k_free),
                    (v_ref, v_smem, v_ready, v_free),
                ):

                    @pl.when(i - low >= stages)
                    def _wait(free: Any = free) -> None:
                        plgpu.barrier_wait(free.at[slot])

                    plgpu.copy_gmem_to_smem(ref.at[here], smem.at[slot], ready.at[slot])

    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    free = plgpu.Barrier(num_arrivals=groups, num_barriers=stages)
    f32, total = jnp.float32, (n, parts, heads, kept if kept < ROWS else queries)
    whole_acc = (ROWS, out_width) if kept < ROWS else (8, 8)
    kernel = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct(total, f32),
            jax.ShapeDtypeStruct(total, f32),
            jax.ShapeDtypeStruct((*total, out_width), f32),
        ],
        scratch_types=[
            plgpu.SMEM((groups, ROWS, width), dtype, transforms=swizzled),
            plgpu.RefUnion(  # keys are done with when sums are written
                plgpu.SMEM((stages, block, width), dtype, transforms=swizzled),
                plgpu.SMEM(whole_acc, f32),
            ),
            plgpu.SMEM((stages, block, out_width), dtype, transforms=swizzled),
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
    return kernel(q, k, v, at)
