"""The fused engine: a whole step is one program, the cache a ring of the whole context a layer.

On one device the program is exact. On several like devices it runs under `shard_map`: every
device's slice is zero-padded to the largest share, and sums are `psum`. Zero rows and columns add
nothing, so that padding changes no result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxllm.cache.attention import decode_spans
from jaxllm.cache.flash import flashes_context
from jaxllm.engine.base import Engine, Logits, frees_on_failure, merge_logits, merge_top
from jaxllm.engine.forward import Cache, empty_cache
from jaxllm.engine.fused_step import (
    AXIS,
    features,
    greedy_step,
    head,
    same_everywhere,
    whole_step,
)
from jaxllm.engine.local import State, Top, pack_step
from jaxllm.engine.rows import (
    LayerRow,
    copy_row,
    join_heads,
    of_ring,
    put_row,
    stack_heads,
    take_back,
    take_row,
)
from jaxllm.engine.states import StateEnds, StateRow
from jaxllm.models.layers import Array, Device
from jaxllm.models.weights import Leaves, LocalModel
from sharding import Plan, ring_positions
from sharding.splits import Ranges

STEPS_AT_ONCE = 4  # greedy ones in a program: starting it takes a host longer than a small step


class FusedEngine(Engine):
    """See the module's docstring; `Engine` says what the methods mean.

    A row is parked as it is: its ring stays. `written` says up to which position each row's rings
    were ever written, padding included; what lies a capacity below that is gone. `since` has the
    first position of rows that did not begin at zero, by row and window. `memory` has how many
    positions of an encoder each row's decoder attends to.
    """

    def __init__(
        self,
        plan: Plan,
        model: LocalModel,
        leaves: Leaves,
        where: Device | JaxMesh,
        dtype: str,
        kernels: bool,
    ):
        self.plan, self.model, self.leaves = plan, model, leaves
        self.mesh = where if isinstance(where, JaxMesh) else None
        self.earlier: tuple[State, ...] = ()  # states after fewer tokens of the last step
        self.ends = StateEnds(plan.options.slots, bool(model.cfg.stateful))
        self.row_axis = 0 if self.mesh is None else 1
        first = where.devices.flat[0] if isinstance(where, JaxMesh) else where
        self.same = SingleDeviceSharding(first) if self.mesh is None else same_everywhere(self.mesh)
        self.cache = self._empty_cache()
        on_cpu = first.platform == "cpu"
        # Virtual devices share the host's cores; a step in vain moves a state past its row's end.
        self.runs_ahead = not on_cpu or (self.mesh is None and not model.cfg.stateful)
        self.greedy_steps = STEPS_AT_ONCE if not on_cpu and self.mesh is None else 1
        self.kernels = kernels
        self.spans = () if on_cpu or self._only_kernels(dtype) else decode_spans(plan.options.ctx)
        self.written = np.zeros(plan.options.slots, np.int64)
        self.memory = np.zeros(plan.options.slots, np.int32)
        self.since: dict[tuple[int, int], int] = {}
        self.capacities = {
            layer.window: ring_positions("fused", plan.options, layer.window)
            for layer in model.cfg.layers
            if layer.window is not None and layer.owns_cache
        }

    def _empty_cache(self) -> Cache:
        """Zeros; on a mesh one slice a device along a leading axis."""
        if self.mesh is None:
            return empty_cache(self.plan, self.model, self.same)
        slices = NamedSharding(self.mesh, PartitionSpec(AXIS))
        return empty_cache(self.plan, self.model, slices, (self.mesh.size,))

    def _only_kernels(self, dtype: str) -> bool:
        """Whether attention of one token is a kernel in all layers: it reads what there is."""
        layers, options = self.model.cfg.layers, self.plan.options
        windows = {i: layers[i].window for i in self.model.cfg.cached}
        return self.kernels and all(
            flashes_context(layers[i], 1, dtype, ring_positions("fused", options, window))
            for i, window in windows.items()
        )

    @frees_on_failure
    def encode(self, tokens: np.ndarray, row: int, used: int) -> None:
        start = np.zeros(1, np.int32)
        _, self.cache, _ = whole_step(
            self.leaves,
            self.cache,
            pack_step(tokens, row, start, start, start, start, used),
            None,
            model=self.model,
            mesh=self.mesh,
            span=None,
            keep=False,
            kernels=self.kernels,
            encode=True,
        )
        self.memory[row] = used

    def recover(self) -> bool:
        lost = any(part.is_deleted() for part in jax.tree.leaves(self.cache))
        if lost:  # donated to what failed
            self.cache = self._empty_cache()
        return lost

    def _write(
        self, row: int, starts: np.ndarray, chunk: int, used: int | None = None, steps: int = 1
    ) -> int | None:
        """Note what steps write; the span of slots that they read, None to read them in turn."""
        ends = np.where(starts < 0, 0, starts + chunk * steps)
        own = slice(row, row + len(starts))
        self.written[own] = np.maximum(self.written[own], ends)
        self.ends.advance(row, starts, chunk * steps if used is None else used)
        if chunk > 1 or not self.spans:
            return None
        longest = max(ends.max(), self.memory.max())
        return next(span for span in self.spans if span >= longest)

    @frees_on_failure
    def greedy(self, tokens: Any, starts: np.ndarray, steps: int = 1) -> tuple[Any, Any]:
        span = self._write(0, starts, 1, steps=steps)
        if isinstance(tokens, np.ndarray):
            tokens = jax.device_put(tokens.astype(np.int32), self.same)
        (ids, last), self.cache = greedy_step(
            self.leaves,
            self.cache,
            tokens,
            np.stack([starts, self.memory], dtype=np.int32, casting="unsafe"),
            model=self.model,
            mesh=self.mesh,
            span=span,
            kernels=self.kernels,
            steps=steps,
        )
        return ids, last

    @frees_on_failure
    def read(self, ids: Any) -> np.ndarray:
        return np.asarray(ids)

    def rehearse(self, chunk: int) -> Iterator[int]:
        yield from (span - 1 for span in self.spans) if chunk == 1 and self.spans else (0,)

    @frees_on_failure
    def forward(
        self,
        tokens: np.ndarray,
        row: int,
        starts: np.ndarray,
        used: int | None = None,
        features: Array | None = None,
        keep: bool = False,
    ) -> Array:
        span = self._write(row, starts, tokens.shape[1], used)
        zeros, memory = np.zeros_like(starts), self.memory[row : row + len(starts)]
        packed = pack_step(tokens, row, starts, zeros, memory, zeros, used)
        if features is not None:
            features = jax.device_put(features, self.same)
        x, self.cache, self.earlier = whole_step(
            self.leaves,
            self.cache,
            packed,
            features,
            model=self.model,
            mesh=self.mesh,
            span=span,
            keep=keep,
            kernels=self.kernels,
        )
        return x

    @frees_on_failure
    def take_back(self, row: int, length: int, count: int) -> None:
        rows = np.int32(row), np.int32(count - 1)
        new = take_back(self.cache.states, self.earlier, *rows, axis=self.row_axis)
        self.cache, self.earlier = self.cache._replace(states=new), ()
        self.ends.set(row, length)

    def weights(self) -> list[Array]:
        return jax.tree.leaves((self.leaves.layers, self.leaves.ends))

    @frees_on_failure
    def logits(self, hidden: Array, at: np.ndarray, top: int) -> Logits:
        out = head(
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

    @frees_on_failure
    def features(self, hidden: Array) -> Array:
        return features(self.leaves.ends, hidden, ends=self.model.ends, mesh=self.mesh)

    def release(self, row: int) -> None:
        self.written[row] = self.memory[row] = 0
        self.ends.set(row, 0)
        for window in self.capacities:
            self.since.pop((row, window), None)

    def holds(self, row: int, length: int) -> bool:
        return self.ends_at(row, length) and all(
            self._first(row, window) <= max(0, length - window + 1) for window in self.capacities
        )

    def _first(self, row: int, window: int | None) -> int:
        """The first position that layers of a window still have."""
        if window is None:
            return 0
        since = self.since.get((row, window), 0)
        return max(since, int(self.written[row]) - self.capacities[window])

    @frees_on_failure
    def reuse(self, source: int, row: int, length: int) -> None:
        if source == row:
            return
        self.release(row)
        axis = self.row_axis
        self.cache = copy_row(self.cache, np.int32(source), np.int32(row), axis=axis)
        self.ends.copy(source, row)
        self.written[row], self.memory[row] = self.written[source], self.memory[source]
        for window in self.capacities:
            self.since[row, window] = self.since.get((source, window), 0)

    @frees_on_failure
    def read_row(self, row: int, length: int) -> list[LayerRow]:
        found = []
        for index, ring in zip(self.model.cfg.cached, self.cache.rings, strict=True):
            cfg, layer = self.model.cfg.layers[index], self.plan.layers[index]
            own = [np.asarray(a) for a in take_row(ring, np.int32(row), axis=self.row_axis)]
            if self.mesh is not None:
                own = [join_heads(list(a), layer.groups) for a in own]
            first = min(length, self._first(row, cfg.window))
            found.append(of_ring(own, first, length))
        return found

    @frees_on_failure
    def read_states(self, row: int) -> list[StateRow]:
        found = []
        for index, state in zip(self.model.cfg.stateful, self.cache.states, strict=True):
            own = [np.asarray(a) for a in take_row(state, np.int32(row), axis=self.row_axis)]
            if self.mesh is not None:
                own = [join_heads(list(a), self.plan.layers[index].states) for a in own]
            found.append(tuple(own))
        return found

    @frees_on_failure
    def write_row(
        self, row: int, layers: Sequence[LayerRow], length: int, states: Sequence[StateRow] = ()
    ) -> None:
        self.release(row)
        rings, cfg = list(self.cache.rings), self.model.cfg
        for at, (index, given) in enumerate(zip(cfg.cached, layers, strict=True)):
            ring, window = rings[at], cfg.layers[index].window
            new = self._spread(given.ring(ring.k.shape[-2]), self.plan.layers[index].groups)
            rings[at] = put_row(ring, new, np.int32(row), axis=self.row_axis)
            if window is not None:
                self.since[row, window] = max(self.since.get((row, window), 0), given.first)
        own = list(self.cache.states)
        for at, (index, given) in enumerate(zip(cfg.stateful, states, strict=True)):
            new = self._spread(given, self.plan.layers[index].states)
            own[at] = put_row(own[at], new, np.int32(row), axis=self.row_axis)
        self.cache = Cache(tuple(rings), tuple(own))
        self.written[row] = length
        self.ends.set(row, length)

    def _spread(self, whole: StateRow, ranges: Ranges) -> tuple[Any, ...]:
        """Arrays of all heads of a layer as the devices have them."""
        if self.mesh is None:
            return whole
        split = NamedSharding(self.mesh, PartitionSpec(AXIS))
        return tuple(jax.device_put(stack_heads(a, ranges), split) for a in whole)
