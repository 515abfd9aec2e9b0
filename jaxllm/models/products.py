"""Products of a few rows that are one kernel where a device has it: with one matrix, or with those
of a layer that follow on attention, one after the other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import jax
import jax.numpy as jnp

from jaxllm.gguf.blocks import PLAIN
from jaxllm.models.ptx.chain import Chain
from jaxllm.models.ptx.share import ROWS, Step
from jaxllm.models.quantised import Quantised
from jaxllm.runtime import multiprocessors

Matrix: TypeAlias = jax.Array | Quantised
MOST_ROWS = 4


@dataclass
class Products:
    """Steps of a kernel for x [N, in]: arrays that are given, and the widths of those that the
    steps write, [N, width], by names of operands."""

    x: jax.Array
    eps: float
    arrays: dict[str, jax.Array] = field(default_factory=dict)
    widths: dict[str, int] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)

    def step(
        self,
        w: Matrix,
        x: str,
        found: str,
        norm: jax.Array | None = None,
        added: str = "",
        gated: bool = False,
    ) -> None:
        """One more product, with w [out, in]; see `Step`."""
        kind, parts = (w.kind, w.parts) if isinstance(w, Quantised) else (PLAIN, {"words": w})
        names = {part: f"{found}_{part}" for part in kind.parts}
        self.arrays |= {names[part]: parts[part] for part in kind.parts}
        if norm is not None:
            self.arrays[f"{found}_norm"] = norm
        out, size = w.shape
        self.widths[found] = out // 2 if gated else out
        self.steps.append(
            Step(
                kind,
                out,
                size,
                x,
                tuple(names.values()),
                found,
                norm="" if norm is None else f"{found}_norm",
                added=added,
                gated=gated,
            )
        )

    def are_a_kernel(self) -> bool:
        """Whether there is a kernel for these: few rows, whole tiles and spans, memory for x."""
        return (
            self.x.dtype == jnp.bfloat16
            and all(map(self._has_kernel, self.steps))
            and self.chain(multiprocessors()).fits
        )

    def _has_kernel(self, step: Step) -> bool:
        whole = step.out > 0 and step.out % ROWS == 0 and step.size % step.columns == 0
        if step.kind is not PLAIN:
            return whole and step.kind.kernel and len(self.x) <= MOST_ROWS
        # In bfloat16 one row pays for itself; more are for XLA.
        return whole and self.arrays[step.parts[0]].dtype == jnp.bfloat16 and len(self.x) == 1

    def chain(self, groups: int) -> Chain:
        """The kernel for so many groups."""
        counters = ("counters",) if len(self.steps) > 1 else ()
        operands = (*self.arrays, *counters, *self.widths)
        return Chain(self.steps, len(self.x), groups, operands, self.eps)

    def made(self) -> dict[str, jax.Array]:
        """What the steps write, in bfloat16."""
        from jaxllm.models.product_kernel import run  # takes a second to import

        return run(self)


def one_product(
    x: jax.Array, w: Matrix, norm: jax.Array | None = None, eps: float = 0.0
) -> Products:
    """x [N, in], normalised if there is a norm's weight float32 [in], times w [out, in] transposed:
    `found` [N, out]."""
    products = Products(x, eps, {"x": x})
    products.step(w, "x", "found", norm)
    return products


def rest_of_layer(
    heads: jax.Array,
    x: jax.Array,
    out: Matrix,
    norm: jax.Array,
    up: Matrix,
    down: Matrix,
    eps: float,
) -> Products:
    """What follows on attention in a layer: x [N, D] and heads [N, H] times out [D, H]; that and
    its MLP of gate and up [2 M, D] and down [D, M]: `found` [N, D]."""
    products = Products(x, eps, {"heads": heads, "x": x})
    products.step(out, "heads", "joined", added="x")
    products.step(up, "joined", "hidden", norm, gated=True)
    products.step(down, "hidden", "found", added="joined")
    return products
