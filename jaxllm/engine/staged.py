"""The staged engine: programs of single devices, with copies between them and pages between.

    device 0   enter+in | pages ... | out |     | after+mlp |     | join+in | pages ... | out
    device 1   enter+in | pages ... | out | <-> | after+mlp | <-> | join+in | pages ... | out
                                       exchange           exchange

A stage is a short list of pieces that need nothing from another device; where one device holds
everything, what follows attention in a layer and what precedes it in the next are one stage. Its
newest positions are in a ring on the device (the tail); when a page of a row is full it moves to
the device's `PageStore`, wherever that keeps it, and steps get it through the `PageStream`.
Programs depend on the plan, the batch and the chunk alone, never on where a page lives: that is why
the place of the cache changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxllm.cache.attention import Ring, empty_ring, join_page, split_page
from jaxllm.cache.groups import HostMemory, group_sizes
from jaxllm.cache.store import PageStore
from jaxllm.cache.stream import PageStream
from jaxllm.engine.base import Engine, Logits, frees_on_failure, merge_logits, merge_top
from jaxllm.engine.folding import Stages
from jaxllm.engine.local import State, pack_step
from jaxllm.engine.rehearsal import rehearse
from jaxllm.engine.rows import (
    LayerRow,
    copy_row,
    join_heads,
    of_ring,
    put_row,
    take_back,
    take_row,
)
from jaxllm.engine.staged_step import StagedStep
from jaxllm.engine.stages import cut, features, head, layer_of
from jaxllm.engine.states import HostStates, StateEnds, StateRow, empty_state
from jaxllm.models.layers import Array, Device
from jaxllm.models.weights import Leaves, LocalModel
from sharding import Plan, Role, pages_left, ring_positions
from sharding.links import Place
from sharding.memory import memory_of


class StagedEngine(Engine):
    """See the module's docstring; `Engine` says what the methods mean.

    leaves and models have one entry a device of the plan; `place(device, layer, first)` says
    where a full page goes. `drafting` says that steps of one row and of all take turns;
    `state_place` is where recurrent states are between steps, `kernels` whether attention is one.
    """

    def __init__(
        self,
        plan: Plan,
        models: list[LocalModel],
        leaves: list[Leaves],
        devices: list[Device],
        place: Callable[[int, int, int], Place],
        drafting: bool = False,
        state_place: Place = "device",
        kernels: bool = False,
    ):
        self.plan, self.models, self.leaves, self.devices = plan, models, leaves, devices
        self.kernels = kernels
        self.stages: Stages = "together"
        self.layers = [
            [
                layer_of(*each, kernels)
                for each in zip(m.blocks, m.cfg.layers, m.kv_heads, m.states, strict=True)
            ]
            for m in models
        ]
        options = plan.options
        self.owners = models[0].cfg.owners  # whose cache each layer reads
        self.norms_heads = [cfg.needs_squares for cfg in models[0].cfg.layers]
        mixers = [cfg.recurrent for cfg in models[0].cfg.layers]
        self.summed = [mixer is not None and mixer.summed for mixer in mixers]
        self.sums_columns = [cfg.sums_columns for cfg in models[0].cfg.layers]
        self.page = options.page
        self.floor = np.zeros(options.slots, np.int32)
        self.memory = np.zeros(options.slots, np.int32)  # positions of an encoder that rows read
        self.memory_floor = np.zeros(options.slots, np.int32)
        layers, pages, host = len(self.owners), options.group_pages, HostMemory()
        self.stores = [
            PageStore(d, layers, pages, partial(place, i), host, mixes=not drafting)
            for i, d in enumerate(devices)
        ]
        self.roles = [cfg.role for cfg in models[0].cfg.layers]
        self.orders = {encode: models[0].cfg.of_step(encode) for encode in (False, True)}
        self.streams = [
            PageStream(s, self._read_by(i), options.prefetch) for i, s in enumerate(self.stores)
        ]
        for stream in self.streams:
            stream.peers = self.streams
        self.rings = [self._empty_rings(i) for i in range(len(devices))]
        self.state_place: Place = state_place
        self.host = host
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

    def _read_by(self, device: int) -> list[int | None]:
        """Whose pages each layer reads on a device; None where it has no attention there."""
        order = self.orders[False]
        return [
            own if i in order and device in self.plan.layers[i].attn_devices else None
            for i, own in enumerate(self.owners)
        ]

    def _empty_rings(self, device: int) -> dict[int, Ring]:
        options, model = self.plan.options, self.models[device]
        to = SingleDeviceSharding(self.devices[device])
        rings = {}
        with memory_of(self.plan, device):
            for i, layer in enumerate(self.plan.layers):
                if device in layer.attn_devices and i in model.cfg.cached:
                    cfg = model.cfg.layers[i]
                    capacity = ring_positions("staged", options, cfg.window, cfg.role)
                    rings[i] = empty_ring(cfg, (options.slots, model.kv_heads[i], capacity), to)
        return rings

    def _empty_states(self, device: int) -> MutableMapping[int, State]:
        options, model = self.plan.options, self.models[device]
        to = SingleDeviceSharding(self.devices[device])
        found: MutableMapping[int, State] = {}
        if self.state_place != "device":
            found = HostStates(self.devices[device], self.state_place, self.host)
        with memory_of(self.plan, device):
            for i, layer in enumerate(self.plan.layers):
                if device in layer.state_devices:
                    lead = options.slots, model.states[i]
                    found[i] = empty_state(model.cfg.layers[i], lead, to)
        return found

    def recover(self) -> bool:
        for stream in self.streams:
            stream.give_up()
        lost = False
        for device, kept in enumerate(zip(self.rings, self.states, strict=True)):
            if any(part.is_deleted() for own in kept for part in _on_device(own)):
                self.rings[device] = self._empty_rings(device)  # donated to what failed
                self.states[device] = self._empty_states(device)
                lost = True
        return lost

    @frees_on_failure
    def encode(self, tokens: np.ndarray, row: int, used: int) -> None:
        start = np.zeros(1, np.int32)
        packed = pack_step(tokens, row, start, start, start, start, used)
        StagedStep(self, packed, encode=True).run()
        full = pages_left(self.plan.options, used)
        self._flush(row, "memory", 0, full, used)
        self.memory[row], self.memory_floor[row] = used, full * self.page

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
        rows, own = len(tokens), slice(row, row + len(tokens))
        memory, memory_floor = self.memory[own], self.memory_floor[own]
        packed = pack_step(tokens, row, starts, self.floor[own], memory, memory_floor, used)
        self.ends.advance(row, starts, tokens.shape[1] if used is None else used)
        for stream in self.streams:
            stream.begin(row, rows, again=rows == self.plan.options.slots)
        step = StagedStep(self, packed, keep=keep)
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
            full = pages_left(self.plan.options, end - first)
            if full > 0:
                self._flush(row + n, "decoder", first, full, end)
                self.floor[row + n] = first + full * self.page
            self._trim(row + n, end)

    def _trim(self, row: int, end: int) -> None:
        """Drop pages that the next query, at position `end`, no longer sees."""
        for window, layers in self.window_layers.items():
            oldest = max(0, end - window + 1)
            if oldest // self.page * self.page > self.trimmed.get((row, window), 0):
                self.trimmed[row, window] = oldest // self.page * self.page
                for device, layer in layers:
                    self.stores[device].trim(layer, row, oldest)

    def _flush(self, row: int, role: Role, first: int, full: int, end: int) -> None:
        """Give the stores so many full pages of a row, from position `first` on, of the layers of
        one role."""
        for device, store in enumerate(self.stores):
            for window, layers in self.paged(device, role).items():
                oldest = 0 if window is None else max(0, end - window + 1)
                unseen = min(full, max(0, oldest - first) // self.page)
                at, left = first + unseen * self.page, full - unseen
                for size in reversed(group_sizes(self.plan.options.group_pages)):
                    while left >= size:
                        store.add(row, at, self.cut(device, layers, row, at, size))
                        at, left = at + size * self.page, left - size

    def paged(self, device: int, role: Role) -> dict[int | None, list[int]]:
        """Layers of one role that have a tail on the device, by window."""
        found: dict[int | None, list[int]] = {}
        for layer in self.rings[device]:
            if self.roles[layer] == role:
                found.setdefault(self.models[device].cfg.layers[layer].window, []).append(layer)
        return found

    def cut(
        self, device: int, layers: list[int], row: int, first: int, pages: int
    ) -> dict[int, tuple[Array, ...]]:
        """So many full pages of a row in the tails of some layers."""
        rings = tuple(self.rings[device][i] for i in layers)
        found = cut(rings, np.int32(row), np.int32(first), page=self.page, pages=pages)
        return dict(zip(layers, found, strict=True))

    def rehearse(self, chunk: int) -> Iterator[int]:
        return rehearse(self, chunk)

    @frees_on_failure
    def release(self, row: int) -> None:
        self.floor[row] = self.memory[row] = self.memory_floor[row] = 0
        self.ends.set(row, 0)
        for window in self.window_layers:
            self.trimmed.pop((row, window), None)
        for store in self.stores:
            store.release(row)

    @frees_on_failure
    def park(self, row: int) -> None:
        for store in self.stores:
            store.park(row)

    def unpark(self, row: int) -> None:
        for store in self.stores:
            store.unpark(row)

    def holds(self, row: int, length: int) -> bool:
        return self.ends_at(row, length) and all(
            self.trimmed.get((row, window), 0) <= max(0, length - window + 1)
            for window in self.window_layers
        )

    @frees_on_failure
    def reuse(self, source: int, row: int, length: int) -> None:
        trimmed = {w: self.trimmed.get((source, w), 0) for w in self.window_layers}
        left, at = int(self.floor[source]), (np.int32(source), np.int32(row))
        floor = min(left, pages_left(self.plan.options, length) * self.page)
        if left > length > floor:
            self._back_to_tail(source, row, floor, length)
        elif source != row and length > floor:
            for rings in self.rings:
                own = {i: ring for i, ring in rings.items() if self.roles[i] == "decoder"}
                rings.update(copy_row(own, *at, axis=0))
        for store in self.stores:
            store.adopt(source, row, floor)
        self.floor[row] = floor
        if source != row and self.ends.stateful:
            for own in self.states:
                own.update({i: copy_row(own[i], *at, axis=0) for i in own})
            self.ends.copy(source, row)
        self.trimmed |= {(row, window): first for window, first in trimmed.items()}
        self._trim(row, length)

    def _back_to_tail(self, source: int, row: int, floor: int, length: int) -> None:
        """Put pages of a row, of positions floor .. length, into the tail of one that begins with
        them, as they would be there if it had computed them itself."""
        for model, store, rings in zip(self.models, self.stores, self.rings, strict=True):
            for index in [i for i in rings if self.roles[i] == "decoder"]:
                pages = list(store.row_pages(index, source, floor, length))
                kept = [split_page(model.cfg.layers[index], own) for _, own in pages]
                k, v = (np.concatenate(side, axis=1) for side in zip(*kept, strict=True))
                tail = LayerRow(k, v, pages[0][0]).positions(floor, length)
                ring = rings[index]
                rings[index] = put_row(ring, tail.ring(ring.capacity), np.int32(row), axis=0)

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
        floor = pages_left(self.plan.options, length) * self.page
        given_of = dict(zip(self.models[0].cfg.cached, layers, strict=True))
        for device, rings in enumerate(self.rings):
            store, to = self.stores[device], SingleDeviceSharding(self.devices[device])
            for index, ring in rings.items():
                given = given_of[index].heads(*self.plan.layers[index].groups[device])
                for at in range(given.first // self.page * self.page, floor, self.page):
                    k, v = given.positions(at, at + self.page).ring(self.page)
                    pages = join_page(k[None], v[None])
                    store.add(row, at, {index: tuple(jax.device_put(p, to) for p in pages)})
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
        sent = [own.sent if isinstance(own, HostStates) else 0 for own in self.states]
        return [stream.sent + own for stream, own in zip(self.streams, sent, strict=True)]


def _on_device(kept: Any) -> list[Array]:
    """The arrays of rings or states that a step is given as they are, and may use up."""
    return [] if isinstance(kept, HostStates) else jax.tree.leaves(kept)
