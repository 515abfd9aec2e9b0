"""A quantised matrix times a few rows, as one kernel for Hopper GPUs through Pallas' Mosaic GPU.

Codes are exact in bfloat16. Tensor cores multiply them as they are, and the sums of each block are
scaled in float32: exact but for the order of sums. Warpgroups take 64 rows of the matrix each and
unpack them in registers; another brings the next columns from memory meanwhile.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxllm.models.quantised import Quantised

ACC: Any = plgpu.ACC  # type: ignore[attr-defined]
ROWS = 64  # of the matrix, that a warpgroup multiplies
STEP = 256  # columns at a time: 128 bytes of four-bit codes
VECTORS = 8  # columns of the smallest product of tensor cores
CODES = {
    (8, True): jnp.int8,
    (8, False): jnp.uint8,
    (4, True): jnp.int4,
    (4, False): jnp.uint4,
}


def quantised_kernel(
    x: jax.Array, w: Quantised, groups: int = 2, stages: int = 4, parts: int = 1
) -> jax.Array:
    """x [N, in] bfloat16, N up to 8, times w [out, in] transposed: float32 [N, out].

    `out` is a multiple of 64 x groups and `in` of 256 x parts.
    """
    (out, size), kind, n = w.shape, w.kind, len(x)
    words = w.parts["words"]
    codes = lax.bitcast_convert_type(words, CODES[kind.bits, kind.signed]).reshape(out, size)
    x = jnp.pad(x, ((0, VECTORS - n), (0, 0)))
    given = {"codes": codes, "x": x}
    if kind.bits == 4:  # byte j of a block has its values j and j + n / 2
        halves = x.reshape(VECTORS, -1, 2, kind.block // 2)
        given["x"] = halves.swapaxes(2, 3).reshape(VECTORS, size)
    if kind.minimum:
        blocks = x.astype(jnp.float32).reshape(VECTORS, -1, kind.block)
        given["sums"] = blocks.sum(-1).T  # [blocks, N]
    scales = {name: part for name, part in w.parts.items() if name != "words"}
    # Copies take a multiple of 16 bytes a row; smaller ones are read where they are.
    small = {k for k, p in scales.items() if STEP * p.shape[1] // size * p.dtype.itemsize % 16}
    streamed = given | {k: p for k, p in scales.items() if k not in small}
    read = {k: p for k, p in scales.items() if k in small}
    steps, per = size // STEP // parts, STEP // kind.block
    tile_rows = groups * ROWS

    def body(*refs: Any) -> None:
        refs, (out_ref, *scratch) = refs[: len(streamed) + len(read)], refs[-len(streamed) - 4 :]
        *tiles, done, ready, free = scratch
        source = dict(zip((*streamed, *read), refs, strict=True))
        smem = dict(zip(streamed, tiles, strict=True))
        tile, part, group = (lax.axis_index(a) for a in ("tile", "part", "group"))
        by_row, by_column = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
        mine = pl.ds(group * ROWS, ROWS)

        def scale(name: str, slot: Any, i: Any, b: int) -> Any:
            """Of block b of step i, [ROWS, N]."""
            if name in smem:
                found = plgpu.load(smem[name].at[slot, mine, b], layout=by_row)
            else:
                span = size // read[name].shape[1]
                at = lax.div((part * steps + i) * STEP + b * kind.block, span)
                here = source[name].at[pl.ds(tile * tile_rows + group * ROWS, ROWS), at]
                found = plgpu.load(here, layout=by_row, optimized=False)
            return found.astype(jnp.float32)

        def wide(vector: Any, axis: int) -> Any:
            return lax.broadcast_in_dim(vector, (ROWS, VECTORS), [axis])

        def whole(name: str, slot: Any, i: Any, b: int) -> Any:
            own = scale(name, slot, i, b)
            return own * scale(f"sub_{name}", slot, i, b) if kind.nested else own

        @pl.when(group < groups)
        def _multiply() -> None:
            def fold(i: Any, total: Any) -> Any:
                slot = lax.rem(i, jnp.int32(stages))
                plgpu.barrier_wait(ready.at[slot])
                layouts = {4: plgpu.Layout.WGMMA_UPCAST_4X, 8: plgpu.Layout.WGMMA_UPCAST_2X}
                packed = plgpu.load(smem["codes"].at[slot, mine], layout=layouts[kind.bits])
                a = plgpu.layout_cast(packed, plgpu.Layout.WGMMA).astype(jnp.bfloat16)

                def multiply(*sums: Any) -> Any:
                    for b, ref in enumerate(sums):
                        at = b * kind.block
                        vectors = smem["x"].at[slot, :, pl.ds(at, kind.block)].transpose((1, 0))
                        plgpu.wgmma(ref, a[:, at : at + kind.block], vectors)
                    plgpu.wgmma_wait(0)
                    found = total
                    for b, ref in enumerate(sums):
                        found = found + ref[...] * wide(whole("d", slot, i, b), 0)
                        if kind.minimum:
                            own = plgpu.load(smem["sums"].at[slot, b], layout=by_column)
                            found = found + wide(whole("m", slot, i, b), 0) * wide(own, 1)
                    return found

                total = pl.run_scoped(multiply, *[ACC((ROWS, VECTORS), jnp.float32)] * per)
                plgpu.barrier_arrive(free.at[slot])
                return total

            zero = jnp.full((ROWS, VECTORS), 0.0, jnp.float32)
            zero = plgpu.layout_cast(zero, plgpu.Layout.WGMMA)
            done.at[group][...] = lax.fori_loop(0, steps, fold, zero)
            plgpu.commit_smem()
            here = out_ref.at[part, pl.ds(tile * tile_rows + group * ROWS, ROWS)]
            plgpu.copy_smem_to_gmem(done.at[group], here)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(group == groups)
        def _bring() -> None:
            @pl.loop(0, steps)
            def _next(i: Any) -> None:
                slot, step = lax.rem(i, jnp.int32(stages)), part * steps + i

                @pl.when(i >= stages)
                def _wait() -> None:
                    plgpu.barrier_wait(free.at[slot])

                for name, to in smem.items():
                    if name == "sums":
                        here = source[name].at[pl.ds(step * per, per)]
                    else:
                        count = STEP * streamed[name].shape[1] // size
                        rows = slice(None) if name == "x" else pl.ds(tile * tile_rows, tile_rows)
                        here = source[name].at[rows, pl.ds(step * count, count)]
                    plgpu.copy_gmem_to_smem(here, to.at[slot], ready.at[slot])

    def tile_of(name: str, array: jax.Array) -> Any:
        if name == "sums":
            return plgpu.SMEM((stages, per, VECTORS), array.dtype)
        count = STEP * array.shape[1] // size
        rows = VECTORS if name == "x" else tile_rows
        tiling: tuple[Any, ...] = ()
        if name == "x":
            tiling = _tiled(kind.block, 2 * kind.block)
        if name == "codes":
            tiling = _tiled(128 * 8 // kind.bits, 128)
        return plgpu.SMEM((stages, rows, count), array.dtype, transforms=tiling)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((parts, out, VECTORS), jnp.float32),
        scratch_types=[
            *(tile_of(name, array) for name, array in streamed.items()),
            plgpu.SMEM((groups, ROWS, VECTORS), jnp.float32),
            plgpu.Barrier(num_arrivals=len(streamed), num_barriers=stages),
            plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
        ],
        grid=(out // tile_rows, parts),
        grid_names=("tile", "part"),
        num_threads=groups + 1,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return kernel(*streamed.values(), *read.values()).sum(axis=0).T[:n]


def _tiled(columns: int, swizzle: int) -> tuple[Any, ...]:
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(swizzle)
