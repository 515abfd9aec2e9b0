"""Products of a few rows as one kernel for Hopper GPUs, through Pallas' Mosaic GPU.

Pallas has no word for the products that it is made of, so what a thread does is inline PTX
(`ptx/chain.py`).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jax.experimental.mosaic.gpu.utils import memref_ptr
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jaxlib.mlir.dialects import llvm

from jaxllm.models.products import Products
from jaxllm.models.ptx.share import LANES, WARPS
from jaxllm.runtime import multiprocessors


def run(products: Products) -> dict[str, jax.Array]:
    """What the steps make and what they have changed, by name."""
    groups = multiprocessors()
    chain, new = products.chain(groups), products.written(groups)
    assert chain.fits
    text = chain.text()

    def body(*refs: Any) -> None:
        @plgpu.inline_mgpu(arg_types=[plgpu.RefType()] * len(refs))
        def _run(_: Any, *operands: Any) -> None:
            given = [*map(_address, operands)]
            letters = ("l" if str(value.type) == "i64" else "r" for value in given)
            llvm.inline_asm(None, given, text, ",".join(letters), has_side_effects=True)

        _run(*refs)

    kernel = plgpu.kernel(
        body,
        out_type=list(new.values()),
        scratch_types=[plgpu.SMEM((chain.memory,), jnp.int8)],
        grid=(groups,),
        grid_names=("group",),
        num_threads=WARPS * LANES // 128,
        thread_name="thread",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )

    arrays = products.arrays | products.counters()

    def call(given: dict[str, jax.Array]) -> dict[str, jax.Array]:  # in an order of its own
        written: dict[str, Any] = {name: jax.new_ref(given[name]) for name in products.changed}
        found = dict(zip(new, kernel(*((given | written)[name] for name in arrays)), strict=True))
        changed = {name: ref[...] for name, ref in written.items()}
        return changed | {name: found[name] for name in products.new}

    # Mapped, it runs once for each: groups that wait for each other have to run at the same time.
    return sequential_vmap(call)(arrays)


def _address(array: Any) -> Any:
    """Of a memref: 64 bits in device memory, 32 in memory that a group shares."""
    pointer = memref_ptr(array)
    shared = llvm.PointerType(pointer.type).address_space == 3
    return llvm.ptrtoint(ir.IntegerType.get_signless(32 if shared else 64), pointer)
