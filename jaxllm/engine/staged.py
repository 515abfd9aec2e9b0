"""The staged engine: programs of single devices, with copies between them and pages between.

    device 0   enter+in | pages ... | out |     | after+mlp |     | join+in | pages ... | out
    device 1   enter+in | pages ... | out | <-> | after+mlp | <-> | join+in | pages ... | out
                                       exchange           exchange

A stage is a short list of pieces that need nothing from another device; where one device holds
everything, what follows attention in a layer and what precedes it in the next are one stage. Its
newest positions are in a ring on the device (the tail); when a page of a row is full it moves to
the device's `PageStore`, wherever that keeps it. Programs depend on the plan, the batch and the
chunk alone, never on where a page lives: that is why the place of the cache changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxllm.cache.attention import Ring, empty_ring, join_page, split_page
from jaxllm.cache.store import PageStore, group_sizes
from jaxllm.engine.base import Engine, Logits, frees_on_failure, merge_logits, merge_top
from jaxllm.engine.local import State, pack_step
from jaxllm.engine.rows import (
    LayerRow,
    copy_row,
    join_heads,
    of_ring,
    put_row,
    take_back,
    take_row,
)
from jaxllm.engine.stages import (
    Queries,
    StageIn,
    attend,
    cut,
    embed,
    features,
    head,
    layer_of,
    stage,
)
from jaxllm.engine.states import StateEnds, StateRow, empty_state
from jaxllm.models.layers import Array, Device, Heads
from jaxllm.models.weights import Leaves, LocalModel
from sharding import Plan, exchange, ring_positions
from sharding.links import Place
from sharding.memory import memory_of


class StagedEngine(Engine):
    """See the module's docstring; `Engine` says what the methods mean.

    leaves and models have one entry a device of the plan; `place(device, layer, first)` says
    where a full page goes.
    """

    def __init__(
        self,
        plan: Plan,
        models: list[LocalModel],
        leaves: list[Leaves],
        devices: list[Device],
        place: Callable[[int, int, int], Place],
    ):
        self.plan, self.models, self.leaves, self.devices = plan, models, leaves, devices
        self.layers = [
            list(map(layer_of, m.blocks, m.cfg.layers, m.kv_heads, m.states)) for m in models
        ]
        options = plan.options
        self.owners = models[0].cfg.owners  # whose cache each layer reads
        self.norms_heads = [cfg.needs_squares for cfg in models[0].cfg.layers]
        mixers = [cfg.recurrent for cfg in models[0].cfg.layers]
        self.summed = [mixer is not None and mixer.summed for mixer in mixers]
        self.sums_columns = [cfg.sums_columns for cfg in models[0].cfg.layers]
        self.page = options.page
        self.floor = np.zeros(options.slots, np.int32)
        self.stores = [
            PageStore(d, self.owners, options.group_pages, options.prefetch, partial(place, i))
            for i, d in enumerate(devices)
        ]
        for store in self.stores:
            store.peers = self.stores
        self.rings = [self._empty_rings(i) for i in range(len(devices))]
        self.states = [self._empty_states(i) for i in range(len(devices))]
        self.earlier: dict[tuple[int, int], State] = {}  # states after fewer tokens of a step
        self.ends = StateEnds(options.slots, bool(models[0].cfg.stateful))
        self.trimmed: dict[tuple[int, int], int] = {}  # first position kept, by row and window
        self.window_layers: dict[int, list[tuple[int, int]]] = {}  # (device, layer) by window
        for device, rings in enumerate(self.rings):
            for layer in rings:
                window = models[device].cfg.layers[layer].window
                if window is not None:
                    self.window_layers.setdefault(window, []).append((device, layer))

    def _empty_rings(self, device: int) -> dict[int, Ring]:
        options, model = self.plan.options, self.models[device]
        to = SingleDeviceSharding(self.devices[device])
        rings = {}
        with memory_of(self.plan, device):
            for i, layer in enumerate(self.plan.layers):
                if device in layer.attn_devices and i in model.cfg.cached:
                    cfg = model.cfg.layers[i]
                    capacity = ring_positions("staged", options, cfg.window)
                    rings[i] = empty_ring(cfg, (options.slots, model.kv_heads[i], capacity), to)
        return rings

    def _empty_states(self, device: int) -> dict[int, State]:
        options, model = self.plan.options, self.models[device]
        to = SingleDeviceSharding(self.devices[device])
        with memory_of(self.plan, device):
            return {
                i: empty_state(model.cfg.layers[i], (options.slots, model.states[i]), to)
                for i, layer in enumerate(self.plan.layers)
                if device in layer.state_devices
            }

    def recover(self) -> bool:
        for store in self.stores:
            store.give_up()
        lost = False
        for device, kept in enumerate(zip(self.rings, self.states, strict=True)):
            if any(part.is_deleted() for part in jax.tree.leaves(kept)):
                self.rings[device] = self._empty_rings(device)  # donated to what failed
                self.states[device] = self._empty_states(device)
                lost = True
        return lost

    @frees_on_failure
    def forward(
        self,
        tokens: np.ndarray,
        row: int,
        starts: np.ndarray,
        used: int | None = None,
        features: Array | None = None,
        keep: bool = False,
    ) -> dict[int, Array]:
        rows = len(tokens)
        packed = pack_step(tokens, row, starts, self.floor[row : row + rows], used)
        self.ends.advance(row, starts, tokens.shape[1] if used is None else used)
        step = _Forward(self, packed, row, rows, rows == self.plan.options.slots, keep)
        found = step.run(features)
        self.earlier = step.earlier
        return found

    @frees_on_failure
    def take_back(self, row: int, length: int, count: int) -> None:
        rows = np.int32(row), np.int32(count - 1)
        for (device, layer), earlier in self.earlier.items():
            states = self.states[device]
            states[layer] = take_back(states[layer], earlier, *rows, axis=0)
        self.earlier = {}
        self.ends.set(row, length)

    def copy_to(self, whole: Array, device: int) -> Array:
        """An array of any place on a device of the plan."""
        return jax.device_put(whole, SingleDeviceSharding(self.devices[device]))

    def weights(self) -> list[Array]:
        return jax.tree.leaves([(own.layers, own.ends) for own in self.leaves])

    @frees_on_failure
    def logits(self, hidden: dict[int, Array], at: np.ndarray, top: int) -> Logits:
        outs, at = [], at.astype(np.int32)
        for i, (start, stop) in enumerate(self.plan.vocab):
            if stop > start:
                self.at_work = i
                leaves, ends = self.leaves[i], self.models[i].ends
                outs.append(head(leaves.ends, leaves.vocab, hidden[i], at, ends=ends, top=top))
        parts = jax.device_get(outs)
        return merge_top(parts, top) if top else merge_logits(parts)

    @frees_on_failure
    def features(self, hidden: dict[int, Array]) -> Array:
        self.at_work = i = min(hidden)
        return features(self.leaves[i].ends, hidden[i], ends=self.models[i].ends)

    @frees_on_failure
    def settle(self, row: int, ends: np.ndarray) -> None:
        for n, end in enumerate(ends.tolist()):
            first = int(self.floor[row + n])
            full = (end - first) // self.page
            if full > 0:
                self._flush(row + n, first, full, end)
            self._trim(row + n, end)

    def _trim(self, row: int, end: int) -> None:
        """Drop pages that the next query, at position `end`, no longer sees."""
        for window, layers in self.window_layers.items():
            oldest = max(0, end - window + 1)
            if oldest // self.page * self.page > self.trimmed.get((row, window), 0):
                self.trimmed[row, window] = oldest // self.page * self.page
                for device, layer in layers:
                    self.stores[device].trim(layer, row, oldest)

    def _flush(self, row: int, first: int, full: int, end: int) -> None:
        for device, rings in enumerate(self.rings):
            store = self.stores[device]
            for layer, ring in rings.items():
                window = self.models[device].cfg.layers[layer].window
                oldest = 0 if window is None else max(0, end - window + 1)
                at, left = first, full
                for size in reversed(group_sizes(self.plan.options.group_pages)):
                    while left >= size:
                        if at + size * self.page > oldest:
                            pages = cut(
                                ring, np.int32(row), np.int32(at), page=self.page, pages=size
                            )
                            store.add(layer, row, at, pages)
                        at, left = at + size * self.page, left - size
        self.floor[row] = first + full * self.page

    def rehearse(self, chunk: int) -> Iterator[int]:
        yield 0
        for size in group_sizes(self.plan.options.group_pages):
            if size * self.page > self.plan.options.ctx:
                continue
            self._hold_group(size)
            yield 0
            for store in self.stores:  # a group that loses a page is cut
                for layer in range(len(self.plan.layers)):
                    store.trim(layer, 0, self.page)
        self.release(0)

    @frees_on_failure
    def _hold_group(self, size: int) -> None:
        """Let row 0 have one group of so many pages in a layer of each kind, and nothing else."""
        self.release(0)
        at = np.int32(0)
        for store, model, rings in zip(self.stores, self.models, self.rings, strict=True):
            first_of_kind = {(model.cfg.layers[i], model.kv_heads[i]): i for i in rings}
            for layer in first_of_kind.values():
                store.add(layer, 0, 0, cut(rings[layer], at, at, page=self.page, pages=size))

    @frees_on_failure
    def release(self, row: int) -> None:
        self.floor[row] = 0
        self.ends.set(row, 0)
        for window in self.window_layers:
            self.trimmed.pop((row, window), None)
        for store in self.stores:
            store.release(row)

    @frees_on_failure
    def park(self, row: int) -> None:
        for store in self.stores:
            store.park(row)

    def holds(self, row: int, length: int) -> bool:
        return self.ends_at(row, length) and all(
            self.trimmed.get((row, window), 0) <= max(0, length - window + 1)
            for window in self.window_layers
        )

    @frees_on_failure
    def reuse(self, source: int, row: int, length: int) -> None:
        trimmed = {w: self.trimmed.get((source, w), 0) for w in self.window_layers}
        for store in self.stores:
            store.adopt(source, row, length)
        self.floor[row] = length
        if source != row and self.ends.stateful:
            at = np.int32(source), np.int32(row)
            self.states = [copy_row(own, *at, axis=0) if own else own for own in self.states]
            self.ends.copy(source, row)
        self.trimmed |= {(row, window): first for window, first in trimmed.items()}
        self._trim(row, length)

    @frees_on_failure
    def read_row(self, row: int, length: int) -> list[LayerRow]:
        found = []
        for index in self.models[0].cfg.cached:
            layer, window = self.plan.layers[index], self.plan.model.layers[index].window
            first = 0 if window is None else self.trimmed.get((row, window), 0)
            parts = [self._read(device, index, row, length) for device in layer.attn_devices]
            ranges = [layer.groups[device] for device in layer.attn_devices]
            k, v = (join_heads(side, ranges) for side in zip(*parts, strict=True))
            whole = LayerRow(k, v, length - k.shape[1])
            found.append(whole.positions(first, length))
        return found

    def _read(self, device: int, layer: int, row: int, length: int) -> tuple[np.ndarray, ...]:
        """k and v [K, S, row] of a device's heads, from its first page to the end of the row."""
        cfg, floor = self.models[device].cfg.layers[layer], int(self.floor[row])
        tail = take_row(self.rings[device][layer], np.int32(row), axis=0)
        parts = [split_page(cfg, p) for _, p in self.stores[device].row_pages(layer, row)]
        parts.append(of_ring([np.asarray(a) for a in tail], floor, length)[:2])
        surplus = max(0, floor - length)
        whole = (np.concatenate(side, axis=1) for side in zip(*parts, strict=True))
        return tuple(a[:, : a.shape[1] - surplus] for a in whole)

    @frees_on_failure
    def read_states(self, row: int) -> list[StateRow]:
        found = []
        for index in self.models[0].cfg.stateful:
            layer, at = self.plan.layers[index], np.int32(row)
            own = [take_row(self.states[d][index], at, axis=0) for d in layer.state_devices]
            ranges = [layer.states[d] for d in layer.state_devices]
            parts = zip(*jax.device_get(own), strict=True)
            found.append(tuple(join_heads(part, ranges) for part in parts))
        return found

    @frees_on_failure
    def write_row(
        self, row: int, layers: Sequence[LayerRow], length: int, states: Sequence[StateRow] = ()
    ) -> None:
        self.release(row)
        floor = length // self.page * self.page
        given_of = dict(zip(self.models[0].cfg.cached, layers, strict=True))
        for device, rings in enumerate(self.rings):
            store, to = self.stores[device], SingleDeviceSharding(self.devices[device])
            for index, ring in rings.items():
                given = given_of[index].heads(*self.plan.layers[index].groups[device])
                for at in range(given.first // self.page * self.page, floor, self.page):
                    k, v = given.positions(at, at + self.page).ring(self.page)
                    pages = join_page(k[None], v[None])
                    store.add(index, row, at, tuple(jax.device_put(p, to) for p in pages))
                tail = given.positions(floor, length).ring(ring.capacity)
                rings[index] = put_row(ring, tail, np.int32(row), axis=0)
                window = self.models[device].cfg.layers[index].window
                if window is not None:
                    before = self.trimmed.get((row, window), 0)
                    self.trimmed[row, window] = max(before, given.first)
        whole = dict(zip(self.models[0].cfg.stateful, states, strict=True))
        for device, own in enumerate(self.states):
            for index, state in own.items():
                start, stop = self.plan.layers[index].states[device]
                new = tuple(a[start:stop] for a in whole[index])
                own[index] = put_row(state, new, np.int32(row), axis=0)
        self.ends.set(row, length)
        self.floor[row] = floor
        self._trim(row, length)

    def link_bytes(self) -> list[int]:
        return [store.sent for store in self.stores]


class _Forward:
    """One step: the residual x and the partials of each device on their way through the layers."""

    def __init__(
        self,
        engine: StagedEngine,
        packed: np.ndarray,
        row: int,
        rows: int,
        again: bool,
        keep: bool,
    ):
        self.engine, self.row, self.rows, self.keep = engine, row, rows, keep
        self.earlier: dict[tuple[int, int], State] = {}  # by device and layer; see `take_back`
        self.packed = [jax.device_put(packed, SingleDeviceSharding(d)) for d in engine.devices]
        for store in engine.stores:
            store.begin(row, rows, again)
        self.x: dict[int, Array] = {}
        self.made: dict[int, Array] = {}  # partials by the device that made them
        self.parts: dict[int, tuple[Array, ...]] = {}  # partials to sum, by the device that will
        self.heads: dict[int, Heads] = {}  # of a layer whose norms wait for a sum
        self.held: dict[int, tuple[Array, ...]] = {}  # of a mixer that waits for one
        self.queries: dict[int, Queries] = {}
        self.mixed: dict[int, Array] = {}  # partials of recurrent mixers that wait for attention
        self.begun_mlps: dict[int, Any] = {}  # of a layer whose MLP waits for a sum

    def run(self, given: Array | None = None) -> dict[int, Array]:
        """Through all layers; the tokens of a draft come with features [N, T, D]."""
        engine, plan = self.engine, self.engine.plan
        holders = [i for i, (a, b) in enumerate(plan.vocab) if b > a]
        for i in holders:
            leaves, ends = engine.leaves[i], engine.models[i].ends
            beside = None if given is None else engine.copy_to(given, i)
            self.made[i] = embed(leaves.ends, leaves.vocab, self.packed[i], beside, ends=ends)
        last = len(plan.layers) - 1
        self._exchange(plan.layers[0].devices)
        self._begin(0, ("enter",))
        for index, layer in enumerate(plan.layers):
            targets = holders if index == last else plan.layers[index + 1].devices
            if self.heads or self.held:
                self._exchange(layer.mixer_devices)
                for device in layer.mixer_devices:
                    self._run(device, ("in",), None, index)
            if layer.attn_devices:
                self._attend(layer.attn_devices, index)
            if len(layer.devices) == 1:
                self._alone(layer.devices[0], index, tuple(targets))
                continue
            for device in layer.mixer_devices:
                self._run(device, ("out",), index)
            if layer.mixer_devices:
                self._exchange(layer.devices)
            waits = len(layer.mlp_devices) > 1 and engine.sums_columns[index]
            for device in layer.devices:
                work = ("begin_mlp" if waits else "mlp",) if device in layer.mlp_devices else ()
                self._run(device, ("after", *work), index)
            if waits:
                self._exchange(layer.mlp_devices)
                for device in layer.mlp_devices:
                    self._run(device, ("end_mlp",), index)
            if layer.mlp_devices:
                self._finish(index, tuple(targets))
            else:
                self._pass_on(index, tuple(targets))
        return self.x

    def _alone(self, device: int, index: int, targets: tuple[int, ...]) -> None:
        """A layer on one device: one stage up to the next layer's queries if they are there."""
        layers = self.engine.plan.layers
        pieces = ("out",) if layers[index].mixer_devices else ()
        pieces += ("after", "mlp", "join") if layers[index].mlp_devices else ("after",)
        following = layers[index + 1] if index + 1 < len(layers) else None
        if targets != (device,) or following is None:
            self._run(device, pieces, index)
            self._hand_over(device, index, targets)
        elif following.mixer_devices:
            self._run(device, (*pieces, "in"), index, index + 1)
        else:
            self._run(device, pieces, index)

    def _finish(self, index: int, targets: tuple[int, ...]) -> None:
        """From the partials of a layer's MLP to the next layer's queries, or to the head."""
        if set(targets) <= set(self.x):
            self._exchange(targets)
            self._begin(index + 1, ("join",))
        else:
            source = min(self.x)
            self._exchange((source,))
            self._run(source, ("join",), index)
            self._hand_over(source, index, targets)

    def _pass_on(self, index: int, targets: tuple[int, ...]) -> None:
        """From the residual of a layer without an MLP to the next layer, or to the head."""
        if set(targets) <= set(self.x):
            self._begin(index + 1, (), targets)
        else:
            self._hand_over(min(self.x), index, targets)

    def _hand_over(self, source: int, index: int, targets: tuple[int, ...]) -> None:
        """Send the finished residual of one device to those that need it next."""
        self.made = {source: self.x[source]}
        self._exchange(targets)
        self._begin(index + 1, ("enter",))

    def _begin(
        self, index: int, first: tuple[str, ...], targets: Sequence[int] | None = None
    ) -> None:
        """Start layer `index` on its devices; past the last layer, only complete the residual."""
        layers = self.engine.plan.layers
        targets = list(self.parts) if targets is None else targets
        self.x = {d: x for d, x in self.x.items() if d in targets}
        for device in targets:
            here = index - 1 if first == ("join",) else None
            if index < len(layers) and device in layers[index].mixer_devices:
                self._run(device, (*first, self._entry(index)), here, index)
            elif first:
                self._run(device, first, here)

    def _entry(self, index: int) -> str:
        """The first piece of a layer: norms over heads of several devices need a sum first, and
        so do mixers that make something of all their groups."""
        layer = self.engine.plan.layers[index]
        if len(layer.state_devices) > 1 and self.engine.summed[index]:
            return "mix"
        shared = len(layer.attn_devices) > 1
        return "project" if shared and self.engine.norms_heads[index] else "in"

    def _exchange(self, targets: tuple[int, ...]) -> None:
        self.parts = exchange(self.made, list(targets), self.engine.devices)
        self.made = {}

    def _run(
        self, device: int, pieces: tuple[str, ...], here: int | None, there: int | None = None
    ) -> None:
        engine = self.engine
        engine.at_work = device
        layers, rings, states = (
            engine.leaves[device].layers,
            engine.rings[device],
            engine.states[device],
        )
        out, begins = "out" in pieces, "in" in pieces
        mixes = begins or "mix" in pieces
        given = StageIn(
            here=() if here is None else layers[here],
            there=() if there is None else layers[there],
            x=self.x.get(device),
            parts=self.parts.pop(device, None),
            heads=self.heads.pop(device, None) if begins else None,
            held=self.held.pop(device, None) if begins else None,
            queries=self.queries.pop(device, None) if out else None,
            tail=rings.get(engine.owners[here]) if out and here is not None else None,
            mixed=self.mixed.pop(device, None) if out else None,
            begun_mlp=self.begun_mlps.pop(device, None),
        )
        result = stage(
            given,
            rings.get(there) if begins and there is not None else None,
            states.get(there) if mixes and there is not None else None,
            self.packed[device],
            pieces=pieces,
            here=None if here is None else engine.layers[device][here],
            there=None if there is None else engine.layers[device][there],
            page=engine.page,
            keep=self.keep,
        )
        if result.x is not None:
            self.x[device] = result.x
        if result.partial is not None:
            self.made[device] = result.partial
        if result.heads is not None:
            self.heads[device] = result.heads
        if result.held is not None:
            self.held[device] = result.held
        if result.queries is not None:
            self.queries[device] = result.queries
        if result.ring is not None and there is not None:
            rings[there] = result.ring
        if result.begun_mlp is not None:
            self.begun_mlps[device] = result.begun_mlp
        if result.mixed is not None:
            self.mixed[device] = result.mixed
        if result.state is not None and there is not None:
            states[there] = result.state
        if result.earlier and there is not None:
            self.earlier[device, there] = result.earlier

    def _attend(self, devices: tuple[int, ...], index: int) -> None:
        """Fold a layer's groups. Devices take turns, who has nothing there yet leaving out his: so
        none of their links rests until another's groups have come."""
        stores = self.engine.stores
        owner = self.engine.owners[index]
        visits = {d: stores[d].visit(owner, self.row, self.rows) for d in devices}
        while visits:
            turn = [d for d in visits if len(visits) == 1 or not stores[d].waits()]
            if not turn:
                stores[devices[0]].pause()
            for device in turn:
                group = next(visits[device], None)
                if group is None:
                    del visits[device]
                else:
                    self._fold(device, index, *group)

    def _fold(self, device: int, index: int, pages: tuple[Array, ...], table: Array) -> None:
        self.engine.at_work = device
        here = self.engine.layers[device][index]
        q, carry = self.queries[device]
        carry, result = attend(carry, q, pages, table, self.packed[device], here=here)
        self.engine.stores[device].done(result)
        self.queries[device] = Queries(q, carry)
