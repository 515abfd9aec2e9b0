"""Matrices that stay quantised on the device and are unpacked inside the step that uses them.

`Quantised` stands where a float array [..., out, in] would: layers ask its shape, merge its dims,
take rows or experts of it, and hand it to `linear`. `jaxllm.gguf.blocks` says what its parts are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxllm.gguf.blocks import BlockType


@partial(jax.tree_util.register_dataclass, data_fields=["parts"], meta_fields=["kind", "dtype"])
@dataclass(frozen=True)
class Quantised:
    """A matrix as codes and scales: arrays of a device, or of the host while they are filled.

    All parts have the dims of the matrix; only the last is shorter, as an element covers several
    values. `dtype` is that of the values which a step reads.
    """

    kind: BlockType
    dtype: np.dtype
    parts: dict[str, Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the values."""
        words = self.parts["words"].shape
        return (*words[:-1], words[-1] * self.kind.parts["words"].packs)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Quantised:
        """An index of leading dims; the last is never cut here. What is one of many matrices is
        read where it is, as only XLA can."""
        kind = self.kind if index is ... else replace(self.kind, kernel=False)
        return Quantised(kind, self.dtype, {n: part[index] for n, part in self.parts.items()})

    def __iter__(self) -> Iterator[Quantised]:
        return (self[i] for i in range(len(self)))

    def reshape(self, *shape: int) -> Quantised:
        """Dims merged or split; the last keeps whole blocks. One may be -1."""
        if -1 in shape:
            rest = -prod(shape)
            shape = tuple(prod(self.shape) // rest if n == -1 else n for n in shape)
        *lead, last = shape
        return self._with(
            {
                name: part.reshape(*lead, last // self.kind.parts[name].packs)
                for name, part in self.parts.items()
            }
        )

    def corner(self, shape: tuple[int, ...]) -> Quantised:
        """The leading part of this shape."""
        lead = tuple(slice(0, n) for n in shape[:-1])
        return self._with(
            {
                name: part[(*lead, slice(0, shape[-1] // self.kind.parts[name].packs))]
                for name, part in self.parts.items()
            }
        )

    def fill(self, stored: dict[str, np.ndarray], columns: slice) -> None:
        """Write these columns of `stored`, parts [rows, ...] with d and m a span of their type."""
        for name, part in self.parts.items():
            packs = self.kind.parts[name].packs
            given = stored[name]
            if name in ("d", "m"):
                given = np.repeat(given, self.kind.repeats, axis=1)
            own = given[:, columns.start // packs : columns.stop // packs]
            part[...] = own.reshape(part.shape)

    def blank(self, *shape: int) -> Quantised:
        """A matrix of this kind and of another shape, to be filled on the host."""
        *lead, last = shape
        return self._with(
            {
                name: np.empty((*lead, last // self.kind.parts[name].packs), part.dtype)
                for name, part in self.parts.items()
            }
        )

    def gather(self, whole: Quantised, runs: Sequence[slice]) -> None:
        """Write these runs of columns of `whole` [rows, columns], each of whole blocks."""
        for name, part in self.parts.items():
            packs = self.kind.parts[name].packs
            columns = [np.arange(run.start // packs, run.stop // packs) for run in runs]
            part[...] = whole.parts[name][:, np.concatenate(columns)].reshape(part.shape)

    def _with(self, parts: dict[str, Any]) -> Quantised:
        return Quantised(self.kind, self.dtype, parts)

    def _scale_and_shift(self) -> tuple[jax.Array, jax.Array | None]:
        """Of each block, exact: float32 [..., blocks]."""
        parts = self.parts

        def of_blocks(name: str) -> jax.Array:
            whole = parts[name].astype(jnp.float32)
            nested = parts.get(f"sub_{name}")
            if nested is None:
                return whole
            own = nested.reshape(*whole.shape, self.kind.span // self.kind.block)
            return (whole[..., None] * own.astype(jnp.float32)).reshape(nested.shape)

        return of_blocks("d"), of_blocks("m") if self.kind.minimum else None

    def _codes(self, words: jax.Array, bit: Any) -> jax.Array:
        """The codes that begin at a bit of words."""
        bits = self.kind.bits
        if self.kind.signed:
            return (words << (32 - bits - bit)) >> (32 - bits)
        return (words >> bit) & ((1 << bits) - 1)

    def values(self) -> jax.Array:
        """The matrix in `dtype`, rounded from its exact float32 values."""
        *lead, size = self.shape
        halves, n = 8 // self.kind.bits, self.kind.block
        packed = self.parts["words"].reshape(*lead, size // n, 1, n // (4 * halves), 1)
        bit = 8 * jnp.arange(4) + 4 * jnp.arange(halves)[:, None, None]
        codes = self._codes(packed, bit).reshape(*lead, size // n, n)
        scale, shift = self._scale_and_shift()
        exact = codes.astype(jnp.float32) * scale[..., None]
        if shift is not None:
            exact += shift[..., None]
        return exact.reshape(*lead, size).astype(self.dtype)

    def product(self, x: jax.Array) -> jax.Array:
        """This matrix [out, in] times x [in]: float32 [out], in a single pass over the codes.

        x is laid in one plane for each code of a word, so that neighbouring words meet
        neighbouring values; the barrier keeps it from being laid anew for every row.
        """
        out, size = self.shape
        halves, n = 8 // self.kind.bits, self.kind.block
        blocks, words = size // n, n // (4 * halves)
        planes = x.astype(jnp.float32).reshape(blocks, halves, words, 4).transpose(1, 3, 0, 2)
        planes = lax.optimization_barrier(planes)  # [halves, 4, blocks, words]
        packed = self.parts["words"].reshape(out, blocks, words)
        total = jnp.zeros(packed.shape, jnp.float32)
        for half in range(halves):
            for byte in range(4):
                codes = self._codes(packed, 8 * byte + 4 * half)
                total += codes.astype(jnp.float32) * planes[half, byte]
        scale, shift = self._scale_and_shift()
        total *= scale[..., None]
        if shift is not None:
            total += shift[..., None] * planes.sum((0, 1))
        return total.sum((-1, -2))


def values(matrix: jax.Array | Quantised) -> jax.Array:
    """The values of a matrix of either kind."""
    return matrix.values() if isinstance(matrix, Quantised) else matrix


class QuantisedParam(nnx.Module):
    """A parameter held as a `Quantised`: each part is an `nnx.Param` with the axes, the source and
    the form of the whole."""

    def __init__(self, whole: nnx.Param, kind: BlockType):
        self.kind, self.dtype = kind, np.dtype(whole.dtype)
        *lead, last = whole.shape
        for name, part in kind.parts.items():
            meta: dict[str, Any] = whole.get_metadata() | {"kind": kind, "packs": part.packs}
            empty = jnp.zeros((*lead, last // part.packs), part.dtype)
            setattr(self, name, nnx.Param(empty, **(meta | {"eager_sharding": False})))

    def __getitem__(self, index: Any) -> Quantised:
        parts = {name: getattr(self, name)[...] for name in self.kind.parts}
        return Quantised(self.kind, self.dtype, parts)[index]
