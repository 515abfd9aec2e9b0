"""A few rows times a quantised matrix, as one kernel for Hopper GPUs through Pallas' Mosaic GPU.

Pallas has no word for the products that it is made of, so what a thread does is inline PTX
(`quantised_ptx.py`).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu.utils import memref_ptr
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jaxlib.mlir.dialects import llvm

from jaxllm.models.quantised import Quantised
from jaxllm.models.quantised_ptx import Program


def quantised_kernel(x: jax.Array, w: Quantised) -> jax.Array:
    """x [N, in] bfloat16 times w [out, in] transposed: float32 [N, out]."""
    program = Program(w.kind, len(x), w.shape)
    text = program.text()

    def body(*refs: Any) -> None:
        kinds = (*[plgpu.RefType()] * len(refs), plgpu.Layout.WG_SPLAT(()))

        @plgpu.inline_mgpu(arg_types=kinds)
        def _run(_: Any, *operands: Any) -> None:
            *arrays, group = operands
            given = [*map(_address, arrays), group.registers.item(), mgpu.thread_idx()]
            letters = ("l" if str(value.type) == "i64" else "r" for value in given)
            llvm.inline_asm(None, given, text, ",".join(letters), has_side_effects=True)

        _run(*refs, lax.axis_index("group"))

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((len(x), w.shape[0]), jnp.float32),
        scratch_types=[
            plgpu.SMEM(program.copies, jnp.int8),
            plgpu.SMEM(program.sums, jnp.float32),
        ],
        grid=(program.groups,),
        grid_names=("group",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return kernel(x, *(w.parts[name] for name in w.kind.parts))


def _address(array: Any) -> Any:
    """Of a memref: 64 bits in device memory, 32 in memory that a group shares."""
    pointer = memref_ptr(array)
    shared = llvm.PointerType(pointer.type).address_space == 3
    return llvm.ptrtoint(ir.IntegerType.get_signless(32 if shared else 64), pointer)
