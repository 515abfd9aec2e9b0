"""Steps of a few rows that are one kernel where a device has it: a product with one matrix,
attention of one token a row, and the products of a layer that follow on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import jax
import jax.numpy as jnp

from jaxllm.gguf.blocks import PLAIN
from jaxllm.models.ptx.attention_sums import Attend
from jaxllm.models.ptx.chain import LINE, Chain
from jaxllm.models.ptx.share import ROWS, Step, Turned
from jaxllm.models.quantised import Quantised
from jaxllm.runtime import multiprocessors

Matrix: TypeAlias = jax.Array | Quantised
MOST_ROWS = 4


@dataclass(frozen=True)
class Rings:
    """What one token a row attends to: rings of keys [B, K, C, H] and values [B, K, C, Hv], places
    int32 [N + 1] as `Attend` has them, queries of a head, and what scores are made with."""

    k: jax.Array
    v: jax.Array
    places: jax.Array
    per_head: int
    scale: float
    window: int | None

    def attend(self, heads: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Of queries, keys and values of each head [N, K, ...] what attention gives [N, K, G, Hv],
        and the rings with keys and values in them."""
        alone = Products(len(heads), arrays={"qkv": heads})
        alone.attend(self, "found")
        made = alone.made()
        shape = len(heads), self.k.shape[1], self.per_head, self.v.shape[-1]
        return made["found"].reshape(shape), tuple(made[name] for name in alone.changed)


@dataclass
class Products:
    """Steps of a kernel for n rows: arrays that are given, those of them that it writes to, and
    those that it makes, by names of operands."""

    n: int
    eps: float = 0.0
    arrays: dict[str, jax.Array] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    new: dict[str, jax.ShapeDtypeStruct] = field(default_factory=dict)
    steps: list[Step | Attend] = field(default_factory=list)

    def attend(self, rings: Rings, found: str) -> None:
        """Attention of what `qkv` is."""
        (_, heads, capacity, k_dim), v_dim = rings.k.shape, rings.v.shape[-1]
        names = "k_ring", "v_ring", "places", "counts"
        step = Attend(
            heads,
            rings.per_head,
            k_dim,
            v_dim,
            capacity,
            rings.scale,
            rings.window,
            "qkv",
            *names,
            "sums",
            found,
        )
        counts = jnp.zeros(self.n * heads, jnp.uint32)
        given = rings.k, rings.v, rings.places, counts
        self.arrays |= dict(zip(names, given, strict=True))
        self.changed += ["k_ring", "v_ring"]
        width = heads * rings.per_head * v_dim
        self.new[found] = jax.ShapeDtypeStruct((self.n, width), jnp.bfloat16)
        self.steps.append(step)

    def step(
        self,
        w: Matrix,
        x: str,
        found: str,
        norm: jax.Array | None = None,
        added: str = "",
        gated: bool = False,
        turned: Turned | None = None,
    ) -> None:
        """One more product, with w [out, in]; see `Step`."""
        kind, parts = (w.kind, w.parts) if isinstance(w, Quantised) else (PLAIN, {"words": w})
        names = {part: f"{found}_{part}" for part in kind.parts}
        self.arrays |= {names[part]: parts[part] for part in kind.parts}
        if norm is not None:
            self.arrays[f"{found}_norm"] = norm
        out, size = w.shape
        width = out // 2 if gated else out
        self.new[found] = jax.ShapeDtypeStruct((self.n, width), jnp.bfloat16)
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
                turned=turned,
            )
        )

    def rest(self, heads: str, out: Matrix, norm: jax.Array, up: Matrix, down: Matrix) -> None:
        """What follows on attention in a layer: heads [N, H] times out [D, H] and `x` [N, D]; that
        and its MLP of gate and up [2 M, D] and down [D, M]: `found` [N, D]."""
        self.step(out, heads, "joined", added="x")
        self.step(up, "joined", "hidden", norm, gated=True)
        self.step(down, "hidden", "found", added="joined")

    def are_a_kernel(self) -> bool:
        """Whether there is a kernel for these: few rows, whole tiles and spans, memory for x."""
        return all(map(self._has_kernel, self.steps)) and self.chain(multiprocessors()).fits

    def _has_kernel(self, step: Step | Attend) -> bool:
        if isinstance(step, Attend):
            return True
        if step.x in self.arrays and self.arrays[step.x].dtype != jnp.bfloat16:
            return False
        whole = step.out > 0 and step.out % ROWS == 0 and step.size % step.columns == 0
        if step.kind is not PLAIN:
            return whole and step.kind.kernel and self.n <= MOST_ROWS
        # In bfloat16 one row pays for itself; more are for XLA.
        return whole and self.arrays[step.parts[0]].dtype == jnp.bfloat16 and self.n == 1

    def chain(self, groups: int) -> Chain:
        """The kernel for so many groups."""
        operands = (*self.arrays, *self.counters(), *self.written(groups))
        return Chain(self.steps, self.n, groups, operands, self.eps)

    def counters(self) -> dict[str, jax.Array]:
        """By which groups wait for each other."""
        count = len(self.steps)
        return {"counters": jnp.zeros(count * LINE, jnp.uint32)} if count > 1 else {}

    def written(self, groups: int) -> dict[str, jax.ShapeDtypeStruct]:
        """What so many groups make, and room for what they hand to each other on the way."""
        room = sum(step.room(self.n, groups) for step in self.steps if isinstance(step, Attend))
        sums = {"sums": jax.ShapeDtypeStruct((room,), jnp.float32)} if room else {}
        return sums | self.new

    def made(self) -> dict[str, jax.Array]:
        """What the kernel makes, and what it has changed."""
        from jaxllm.models.product_kernel import run  # takes a second to import

        return run(self)


def one_product(
    x: jax.Array, w: Matrix, norm: jax.Array | None = None, eps: float = 0.0
) -> Products:
    """x [N, in], normalised if there is a norm's weight float32 [in], times w [out, in] transposed:
    `found` [N, out]."""
    products = Products(len(x), eps, {"x": x})
    products.step(w, "x", "found", norm)
    return products
