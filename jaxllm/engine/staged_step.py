"""One step of the staged engine, layer by layer over the devices of its plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxllm.cache.attention import Ring
from jaxllm.cache.stream import Arrived
from jaxllm.engine.folding import Folding
from jaxllm.engine.local import State
from jaxllm.engine.stages import (
    Queries,
    StageIn,
    StageOut,
    Work,
    attend,
    embed,
    run_stages,
)
from jaxllm.models.layers import Array, Heads
from jaxllm.models.parts import Follower
from sharding import exchange
from sharding.splits import holders

if TYPE_CHECKING:
    from jaxllm.engine.staged import StagedEngine


class _Waiting(NamedTuple):
    """A stage that is to run: its arguments, and the layers that end and begin."""

    given: StageIn
    ring: Ring | None
    state: State | None
    work: Work
    here: int | None
    there: int | None


class StagedStep:
    """One step: the residual x and the partials of each device on their way through the layers."""

    def __init__(
        self,
        engine: StagedEngine,
        packed: np.ndarray,
        keep: bool = False,
        encode: bool = False,
    ):
        self.engine, self.keep = engine, keep
        self.order = engine.orders[encode]
        self.following = dict(pairwise((None, *self.order, None)))  # layers of this step
        self.holders = () if encode else holders(engine.plan.vocab)
        self.earlier: dict[tuple[int, int], State] = {}  # by device and layer; see `take_back`
        self.packed = [jax.device_put(packed, SingleDeviceSharding(d)) for d in engine.devices]
        self.x: dict[int, Array] = {}
        self.made: dict[int, Array] = {}  # partials by the device that made them
        self.parts: dict[int, tuple[Array, ...]] = {}  # partials to sum, by the device that will
        self.heads: dict[int, Heads] = {}  # of a layer whose norms wait for a sum
        self.held: dict[int, tuple[Array, ...]] = {}  # of a mixer that waits for one
        self.begun: dict[int, State] = {}  # its state, meanwhile
        self.queries: dict[int, Queries] = {}
        self.waiting: dict[int, list[_Waiting]] = {}  # stages that run together, in order
        self.arrived: dict[int, list[Arrived]] = {}  # groups that the next of them folds
        self.visits: dict[int, list[Iterator[Arrived]]] = {}  # from which they come
        self.mixed: dict[int, Array] = {}  # partials of recurrent mixers that wait for attention
        self.begun_mlps: dict[int, Any] = {}  # of a layer whose MLP waits for a sum
        self.chosen: dict[int, Array] = {}  # by the last indexer, for layers that follow it
        self.chooser = -1  # its layer

    def run(self, given: Array | None = None) -> dict[int, Array]:
        """Through all layers; the tokens of a draft come with features [N, T, D]."""
        engine, plan = self.engine, self.engine.plan
        for i in holders(plan.vocab):
            leaves, ends = engine.leaves[i], engine.models[i].ends
            beside = None if given is None else engine.copy_to(given, i)
            self.made[i] = embed(leaves.ends, leaves.vocab, self.packed[i], beside, ends=ends)
            self.folding = Folding(engine, self.made[i])
        self._exchange(plan.layers[self.order[0]].devices)
        self._begin(None, ("enter",))
        for index in self.order:
            layer, there = plan.layers[index], self.following[index]
            targets = self.holders if there is None else plan.layers[there].devices
            if self.heads or self.held:
                self._exchange(layer.mixer_devices)
                for device in layer.mixer_devices:
                    self._run(device, ("in",), None, index)
            if engine.roles[index] == "memory":
                self._pass_on(index, targets)
                continue
            if layer.attn_devices and engine.roles[index] != "encoder":
                self._attend(layer.attn_devices, index)
            if len(layer.devices) == 1:
                self._alone(layer.devices[0], index, targets)
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
                self._finish(index, targets)
            else:
                self._pass_on(index, targets)
        return self.x

    def _alone(self, device: int, index: int, targets: tuple[int, ...]) -> None:
        """A layer on one device: one stage up to the next layer's queries if they are there."""
        layers = self.engine.plan.layers
        pieces = ("out",) if layers[index].mixer_devices else ()
        pieces += ("after", "mlp", "join") if layers[index].mlp_devices else ("after",)
        there = self.following[index]
        if targets != (device,) or there is None:
            self._run(device, pieces, index)
            self._hand_over(device, index, targets)
        elif layers[there].mixer_devices:
            self._run(device, (*pieces, "in"), index, there)
        else:
            self._run(device, pieces, index)

    def _finish(self, index: int, targets: tuple[int, ...]) -> None:
        """From the partials of a layer's MLP to the next layer's queries, or to the head."""
        if set(targets) <= set(self.x):
            self._exchange(targets)
            self._begin(index, ("join",))
        else:
            source = min(self.x)
            self._exchange((source,))
            self._run(source, ("join",), index)
            self._hand_over(source, index, targets)

    def _pass_on(self, index: int, targets: tuple[int, ...]) -> None:
        """From the residual of a layer without an MLP to the next layer, or to the head."""
        if set(targets) <= set(self.x):
            self._begin(index, (), targets)
        else:
            self._hand_over(min(self.x), index, targets)

    def _hand_over(self, source: int, index: int, targets: tuple[int, ...]) -> None:
        """Send the finished residual of one device to those that need it next."""
        self.made = {source: self.x[source]}
        self._exchange(targets)
        self._begin(index, ("enter",))

    def _begin(
        self, ended: int | None, first: tuple[str, ...], targets: Sequence[int] | None = None
    ) -> None:
        """Start the layer that follows one that ended, on its devices; past the last layer, only
        complete the residual."""
        layers, there = self.engine.plan.layers, self.following[ended]
        targets = list(self.parts) if targets is None else targets
        self.x = {d: x for d, x in self.x.items() if d in targets}
        for device in targets:
            here = ended if first == ("join",) else None
            if there is not None and device in layers[there].mixer_devices:
                self._run(device, (*first, self._entry(there)), here, there)
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
        own, leaves = engine.layers[device], engine.leaves[device].layers
        rings, waiting = engine.rings[device], self.waiting.setdefault(device, [])
        out, begins = "out" in pieces, "in" in pieces
        given = StageIn(
            here=() if here is None else leaves[here],
            there=() if there is None else leaves[there],
            x=None if waiting else self.x.get(device),
            parts=self.parts.pop(device, None),
            heads=self.heads.pop(device, None) if begins else None,
            held=self.held.pop(device, None) if begins else None,
            queries=self.queries.pop(device, None) if out else None,
            pages=self.folding.filled(device, self.arrived.pop(device, [])) if out else (),
            tail=None if here is None or waiting or not out else rings.get(engine.owners[here]),
            mixed=self.mixed.pop(device, None) if out else None,
            begun_mlp=self.begun_mlps.pop(device, None),
            chosen=self._choice(device, there) if begins and there is not None else None,
        )
        ring = rings.get(there) if begins and there is not None else None
        state = None
        if there is not None and (begins or "mix" in pieces):
            state = self.begun.pop(device, None) or engine.states[device].get(there)
        old, new = (None if i is None else own[i] for i in (here, there))
        waiting.append(_Waiting(given, ring, state, Work(pieces, old, new), here, there))
        del given
        between = here is not None and begins
        if there is None or not (between and self.folding.may_wait(device, there, len(waiting))):
            self._start(device)

    def _start(self, device: int) -> None:
        """Run the stages that wait on a device, as one program."""
        engine = self.engine
        engine.at_work = device
        waiting = self.waiting.pop(device)
        given, rings, states, works, here, there = zip(*waiting, strict=True)
        packed, page = self.packed[device], engine.page
        results = run_stages(given, rings, states, packed, works=works, page=page, keep=self.keep)
        del given
        waiting.clear()  # which the caller has, too: by now nothing may keep the groups
        if results[-1].folded is not None:
            engine.streams[device].done(results[-1].folded)
        for visit in self.visits.pop(device, ()):
            assert next(visit, None) is None
        for each, begun in zip(results, there, strict=True):
            if each.ring is not None:
                engine.rings[device][begun] = each.ring
        self._keep(device, results[-1], works[-1].pieces, here[-1], there[-1])

    def _keep(
        self,
        device: int,
        result: StageOut,
        pieces: tuple[str, ...],
        here: int | None,
        there: int | None,
    ) -> None:
        """What a stage made, for those that follow."""
        of_device: dict[str, dict[int, Any]] = {
            "x": self.x,
            "partial": self.made,
            "heads": self.heads,
            "held": self.held,
            "queries": self.queries,
            "begun_mlp": self.begun_mlps,
            "mixed": self.mixed,
        }
        for name, kept in of_device.items():
            made = getattr(result, name)
            if made is not None:
                kept[device] = made
        if result.state is not None and there is not None:
            if "in" in pieces:
                self.engine.states[device][there] = result.state
            else:
                self.begun[device] = result.state
        if result.chosen is not None and here is not None:
            self.chosen = self.chosen if self.chooser == here else {}
            self.chosen[device], self.chooser = result.chosen, here
        if result.earlier and there is not None:
            self.earlier[device, there] = result.earlier

    def _choice(self, device: int, layer: int) -> Array | None:
        """What a layer follows, if it does: on this device, where that is not made in the same
        stage."""
        if not isinstance(self.engine.layers[device][layer].cfg.indexer, Follower):
            return None
        if device not in self.chosen and self.chosen:
            self.chosen[device] = self.engine.copy_to(next(iter(self.chosen.values())), device)
        return self.chosen.get(device)

    def _attend(self, devices: tuple[int, ...], index: int) -> None:
        """Fold a layer's groups, but for the last where the stage that ends the layer does. Devices
        take turns, who has nothing there yet leaving out his: so none of their links rests until
        another's groups have come."""
        streams = self.engine.streams
        left = {d: self.folding.left(d, index) for d in devices}
        visits = {d: streams[d].visit(index) for d in devices}
        while visits:
            turn = [d for d in visits if len(visits) == 1 or not streams[d].waits()]
            if not turn:
                streams[devices[0]].pause()
            for device in turn:
                group = next(visits[device], None)
                if group is None:
                    del visits[device]
                elif streams[device].outstanding < left[device]:
                    self.arrived.setdefault(device, []).append(group)
                    if not streams[device].outstanding:
                        self.visits.setdefault(device, []).append(visits.pop(device))
                else:
                    self._fold(device, index, *group)
                del group

    def _fold(self, device: int, index: int, pages: tuple[Array, ...], table: Array) -> None:
        self.engine.at_work = device
        here = self.engine.layers[device][index]
        q, seen = self.queries[device]
        seen, result = attend(seen, q, pages, table, self.packed[device], here=here)
        self.engine.streams[device].done(result)
        self.queries[device] = Queries(q, seen)
