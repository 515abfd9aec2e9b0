"""The fused engine: a whole step is one program, the cache a ring of the whole context a layer.

On one device the program is exact. On several like devices it runs under `shard_map`: every
device's slice is zero-padded to the largest share, and sums are `psum`. Zero rows and columns add
nothing, so that padding changes no result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxllm.cache.attention import Ring, attend_ring, attend_span, decode_spans, empty_ring
from jaxllm.engine.base import Engine, Logits, frees_on_failure, merge_logits, merge_top
from jaxllm.engine.local import (
    Step,
    Top,
    begin_attention,
    end_attention,
    head_logits,
    pack_step,
    unpack_step,
)
from jaxllm.engine.rows import (
    LayerRow,
    copy_row,
    join_heads,
    of_ring,
    put_row,
    stack_heads,
    take_row,
)
from jaxllm.errors import OptionError
from jaxllm.models.block import BlockDef
from jaxllm.models.layers import Array, Device
from jaxllm.models.weights import Leaves, LocalModel
from jaxllm.runtime import DEVICE_LOOPS
from sharding import Plan, ring_positions

AXIS = "devices"


def forward(
    model: LocalModel,
    leaves: Leaves,
    rings: tuple[Ring, ...],
    step: Step,
    total: Callable[[Array], Array],
    span: int | None = None,
) -> tuple[Array, tuple[Ring, ...]]:
    """One step over all layers: the hidden states [N, T, D] before the head, and the new rings.

    With a span rows have one token, and attention reads that many slots of a ring at once.
    """
    ends = model.ends.bind(leaves.ends)
    x = total(ends.embed(step.tokens, step.positions, leaves.vocab))
    held: dict[int, Ring] = dict(zip(model.cfg.cached, rings, strict=True))
    for index, (definition, cfg, values, owner) in enumerate(
        zip(model.blocks, model.cfg.layers, leaves.layers, model.cfg.owners, strict=True)
    ):
        block = definition.bind(values)
        heads = block.project(x)
        squares = block.head_squares(heads)
        squares = None if squares is None else total(squares)
        own = held[index] if cfg.owns_cache else None
        q, carry, own = begin_attention(block, cfg, heads, squares, own, step)
        held |= {} if own is None else {index: own}
        if span is None:
            carry = attend_ring(cfg, carry, q, held[owner], step.row, step.positions)
        else:
            carry = attend_span(cfg, carry, q, held[owner], step.row, step.positions, span)
        x, read = block.join_attention(x, total(end_attention(block, cfg, carry, x)))
        x = block.join_mlp(x, total(block.mlp(read)))
    return x, tuple(held.values())


def _per_device(mesh: JaxMesh | None, local: Callable, sharded: int, whole: int) -> Callable:
    """`local` over every device of the mesh: its first `sharded` arguments and all its results
    have a leading device axis, the `whole` last ones are the same everywhere."""
    if mesh is None:
        return local
    split, same = PartitionSpec(AXIS), PartitionSpec()

    def body(*args: object) -> object:
        own = jax.tree.map(lambda a: a[0], args[:sharded])
        return jax.tree.map(lambda a: a[None], local(*own, *args[sharded:]))

    specs = (split,) * sharded + (same,) * whole
    return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=split, check_vma=False)


def _same(mesh: JaxMesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def _total(mesh: JaxMesh | None) -> Callable[[Array], Array]:
    return (lambda x: x) if mesh is None else partial(jax.lax.psum, axis_name=AXIS)


@partial(
    jax.jit,
    static_argnames=("model", "mesh", "span"),
    donate_argnames=("rings",),
    compiler_options=DEVICE_LOOPS,
)
def _forward(
    leaves: Leaves,
    rings: tuple[Ring, ...],
    packed: Array,
    *,
    model: LocalModel,
    mesh: JaxMesh | None,
    span: int | None,
) -> tuple[Array, tuple[Ring, ...]]:
    def local(
        leaves: Leaves, rings: tuple[Ring, ...], packed: Array
    ) -> tuple[Array, tuple[Ring, ...]]:
        return forward(model, leaves, rings, unpack_step(packed), _total(mesh), span)

    return _per_device(mesh, local, 2, 1)(leaves, rings, packed)


@partial(jax.jit, static_argnames=("model", "mesh", "span"), donate_argnames=("rings",))
def _greedy(
    leaves: Leaves,
    rings: tuple[Ring, ...],
    tokens: Array,
    starts: Array,
    *,
    model: LocalModel,
    mesh: JaxMesh | None,
    span: int | None,
) -> tuple[Array, tuple[Ring, ...]]:
    """A step of one token a row, head included: the likeliest tokens [N], and the new rings."""

    def local(
        leaves: Leaves, rings: tuple[Ring, ...], tokens: Array, starts: Array
    ) -> tuple[Array, tuple[Ring, ...]]:
        zeros = jnp.zeros_like(starts)
        step = Step(tokens[:, None], zeros[0], starts, zeros)
        x, rings = forward(model, leaves, rings, step, _total(mesh), span)
        at = zeros[:, None]
        best = head_logits(model.ends.bind(leaves.ends), x, at, leaves.vocab, top=1)
        assert isinstance(best, Top)
        values, ids = best.values[:, 0, 0], best.ids[:, 0, 0]
        if mesh is not None:  # the first of equal devices has the lower ids
            values, ids = (jax.lax.all_gather(a, AXIS) for a in (values, ids))
            ids = jnp.take_along_axis(ids, values.argmax(axis=0)[None], axis=0)[0]
        return ids, rings

    ids, rings = _per_device(mesh, local, 2, 2)(leaves, rings, tokens, starts)
    if mesh is not None:
        ids = jax.lax.with_sharding_constraint(ids[0], _same(mesh))
    return ids, rings


@partial(jax.jit, static_argnames=("ends", "top", "mesh"))
def _head(
    leaves: tuple[Array, ...],
    vocab: Array,
    x: Array,
    at: Array,
    *,
    ends: BlockDef,
    top: int,
    mesh: JaxMesh | None,
) -> Array | Top:
    def local(leaves: tuple[Array, ...], vocab: Array, x: Array, at: Array) -> Array | Top:
        return head_logits(ends.bind(leaves), x, at, vocab, top)

    return _per_device(mesh, local, 3, 1)(leaves, vocab, x, at)


def pure_step(
    model: LocalModel, ctx: int, ubatch: int
) -> Callable[..., tuple[Array, tuple[Ring, ...]]]:
    """fn(leaves, rings, tokens [B, T], starts [B]) -> (logits [B, T, V], rings), for one device.

    Positions are known only when the program runs: rows that would leave the context, or reach
    across a multiple of `ubatch` (where a ring may end), get logits that are no numbers, as do rows
    with a token outside the vocabulary.
    """

    def step(
        leaves: Leaves, rings: tuple[Ring, ...], tokens: Array, starts: Array
    ) -> tuple[Array, tuple[Ring, ...]]:
        count = tokens.shape[1]
        if count > ubatch:
            raise OptionError(f"a step of {count} tokens is longer than ubatch {ubatch}; cut it")
        zeros = jnp.zeros((len(tokens), 1), jnp.int32)
        packed = jnp.concatenate([tokens, zeros, starts[:, None], zeros], axis=1, dtype=jnp.int32)
        x, rings = forward(model, leaves, rings, unpack_step(packed), lambda x: x)
        written = (starts >= 0) & (starts + count <= ctx) & (starts % ubatch + count <= ubatch)
        known = ((tokens >= 0) & (tokens < model.cfg.vocab)).all(axis=1)
        logits = model.ends.bind(leaves.ends).logits(x)
        return jnp.where((written & known)[:, None, None], logits, jnp.nan), rings

    return step


class FusedEngine(Engine):
    """See the module's docstring; `Engine` says what the methods mean.

    A row is parked as it is: its ring stays. `written` says up to which position each row's rings
    were ever written, padding included; what lies a capacity below that is gone. `since` has the
    first position of rows that did not begin at zero, by row and window.
    """

    def __init__(self, plan: Plan, model: LocalModel, leaves: Leaves, where: Device | JaxMesh):
        self.plan, self.model, self.leaves = plan, model, leaves
        self.mesh = where if isinstance(where, JaxMesh) else None
        self.where = where
        self.rings = empty_rings(plan, model, where)
        self.row_axis = 0 if self.mesh is None else 1
        first = where.devices.flat[0] if isinstance(where, JaxMesh) else where
        self.same = SingleDeviceSharding(first) if self.mesh is None else _same(self.mesh)
        self.runs_ahead = first.platform != "cpu"
        self.spans = decode_spans(plan.options.ctx) if self.runs_ahead else ()
        self.written = np.zeros(plan.options.slots, np.int64)
        self.since: dict[tuple[int, int], int] = {}
        self.capacities = {
            layer.window: ring_positions("fused", plan.options, layer.window)
            for layer in model.cfg.layers
            if layer.window is not None and layer.owns_cache
        }

    def recover(self) -> bool:
        lost = any(part.is_deleted() for ring in self.rings for part in ring)
        if lost:  # donated to what failed
            self.rings = empty_rings(self.plan, self.model, self.where)
        return lost

    def _write(self, row: int, starts: np.ndarray, chunk: int) -> int | None:
        """Note what a step writes; the span of slots that it reads, None to read them in turn."""
        ends = np.where(starts < 0, 0, starts + chunk)
        own = slice(row, row + len(starts))
        self.written[own] = np.maximum(self.written[own], ends)
        if chunk > 1 or not self.spans:
            return None
        return next(span for span in self.spans if span >= ends.max())

    @frees_on_failure
    def greedy(self, tokens: Any, starts: np.ndarray) -> Any:
        span = self._write(0, starts, 1)
        if isinstance(tokens, np.ndarray):
            tokens = jax.device_put(tokens.astype(np.int32), self.same)
        ids, self.rings = _greedy(
            self.leaves,
            self.rings,
            tokens,
            starts.astype(np.int32),
            model=self.model,
            mesh=self.mesh,
            span=span,
        )
        return ids

    @frees_on_failure
    def read(self, ids: Any) -> np.ndarray:
        return np.asarray(ids)

    def rehearse(self, chunk: int) -> Iterator[int]:
        yield from (span - 1 for span in self.spans) if chunk == 1 and self.spans else (0,)

    @frees_on_failure
    def forward(self, tokens: np.ndarray, row: int, starts: np.ndarray) -> Array:
        span = self._write(row, starts, tokens.shape[1])
        packed = pack_step(tokens, row, starts, np.zeros_like(starts))
        x, self.rings = _forward(
            self.leaves,
            self.rings,
            packed,
            model=self.model,
            mesh=self.mesh,
            span=span,
        )
        return x

    def weights(self) -> list[Array]:
        return jax.tree.leaves((self.leaves.layers, self.leaves.ends))

    @frees_on_failure
    def logits(self, hidden: Array, at: np.ndarray, top: int) -> Logits:
        out = _head(
            self.leaves.ends,
            self.leaves.vocab,
            hidden,
            at.astype(np.int32),
            ends=self.model.ends,
            top=top,
            mesh=self.mesh,
        )
        out = jax.device_get(out)
        if self.mesh is None:
            return merge_top([out], top) if isinstance(out, Top) else merge_logits([out])
        # What a slice is padded with is cut off: it is not of this vocabulary.
        counts = [stop - start for start, stop in self.plan.vocab]
        if not isinstance(out, Top):
            return merge_logits([p[..., :n] for p, n in zip(out, counts, strict=True)])
        parts = [
            Top(out.values[i][..., :n], out.ids[i][..., :n], None if top == 1 else out.lse[i])
            for i, n in enumerate(counts)
        ]
        return merge_top(parts, top)

    def release(self, row: int) -> None:
        self.written[row] = 0
        for window in self.capacities:
            self.since.pop((row, window), None)

    def holds(self, row: int, length: int) -> bool:
        return all(
            self._first(row, window) <= max(0, length - window + 1) for window in self.capacities
        )

    def _first(self, row: int, window: int | None) -> int:
        """The first position that layers of a window still have."""
        if window is None:
            return 0
        since = self.since.get((row, window), 0)
        return max(since, int(self.written[row]) - self.capacities[window])

    def reuse(self, source: int, row: int, length: int) -> None:
        if source == row:
            return
        self.release(row)
        axis = self.row_axis
        self.rings = copy_row(self.rings, np.int32(source), np.int32(row), axis=axis)
        self.written[row] = self.written[source]
        for window in self.capacities:
            self.since[row, window] = self.since.get((source, window), 0)

    def read_row(self, row: int, length: int) -> list[LayerRow]:
        found = []
        for index, ring in zip(self.model.cfg.cached, self.rings, strict=True):
            cfg, layer = self.model.cfg.layers[index], self.plan.layers[index]
            own = [np.asarray(a) for a in take_row(ring, np.int32(row), axis=self.row_axis)]
            if self.mesh is not None:
                own = [join_heads(list(a), layer.groups) for a in own]
            first = min(length, self._first(row, cfg.window))
            found.append(of_ring(own, first, length))
        return found

    def write_row(self, row: int, layers: Sequence[LayerRow], length: int) -> None:
        self.release(row)
        for at, (index, given) in enumerate(zip(self.model.cfg.cached, layers, strict=True)):
            ring, window = self.rings[at], self.model.cfg.layers[index].window
            new: Any = given.ring(ring.k.shape[-2])
            if self.mesh is not None:
                own = self.plan.layers[index].groups
                split = NamedSharding(self.mesh, PartitionSpec(AXIS))
                new = tuple(jax.device_put(stack_heads(a, own), split) for a in new)
            ring = put_row(ring, new, np.int32(row), axis=self.row_axis)
            self.rings = (*self.rings[:at], ring, *self.rings[at + 1 :])
            if window is not None:
                self.since[row, window] = max(self.since.get((row, window), 0), given.first)
        self.written[row] = length


def empty_rings(plan: Plan, model: LocalModel, where: Device | JaxMesh) -> tuple[Ring, ...]:
    """Zeroed rings of layers with a cache; on a mesh one slice a device along a leading axis."""
    options = plan.options
    lead, sharding = (), None
    if isinstance(where, JaxMesh):
        lead, sharding = (where.size,), NamedSharding(where, PartitionSpec(AXIS))
    else:
        sharding = SingleDeviceSharding(where)
    rings = []
    for index in model.cfg.cached:
        layer, heads = model.cfg.layers[index], model.kv_heads[index]
        capacity = ring_positions("fused", options, layer.window)
        rings.append(empty_ring(layer, (*lead, options.slots, heads, capacity), sharding))
    return tuple(rings)
