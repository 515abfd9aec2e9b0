"""The time of a step, from a plan and the rates of its mesh. numpy only, and no device.

A step reads what it multiplies with and what it attends to, once:

    computing   a device takes max(bytes / memory rate, operations / matmul rate) for its part of a
                layer's attention, and again for its MLP
    -sm tensor  devices work at the same time: the slowest counts, then an exchange, twice a layer
    -sm layer   devices work one after another, with a copy where the device changes
    links       bytes of streamed pages / link rate, a device
    dispatch    the host thread starts every program; it runs ahead of the devices

and two laws put them together. Without copies ahead, links add to everything else (`additive`: what
llama.cpp's host cache does). With them a step takes as long as the slowest of these (`overlapped`),
with one exception: under -sm layer a link works during the others' turns only for as much as the
device has room for (`Plan.staging_bytes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sharding.errors import PlanError
from sharding.mesh import DeviceInfo, Mesh
from sharding.options import PlanOptions
from sharding.plan import Plan
from sharding.rings import live_pages, position_bytes
from sharding.shapes import ModelShape, TensorShape

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step's parts.

    Attributes:
        turns: computing, by device in order where devices take turns, else of all in one.
        exchange: of all exchanges and copies between devices.
        dispatch: of the host thread.
        links: of each device's link.
        ahead: of each turn, how much of its link's time may lie in the turns of others.
    """

    turns: tuple[float, ...]
    exchange: float
    dispatch: float
    links: tuple[float, ...]
    ahead: tuple[float, ...]

    @property
    def compute(self) -> float:
        """Of computing, exchanges included."""
        return sum(self.turns) + self.exchange

    @property
    def additive(self) -> float:
        """Of the step when nothing is copied ahead."""
        return max(self.compute, self.dispatch) + sum(self.links)

    @property
    def overlapped(self) -> float:
        """Of the step when copies run under computation."""
        return max(self._chain, self.dispatch, *self.links)

    @property
    def _chain(self) -> float:
        if len(self.turns) == 1:
            return self.compute
        waits = zip(self.turns, self.links, self.ahead, strict=True)
        return self.exchange + sum(max(turn, link - ahead) for turn, link, ahead in waits)

    @property
    def limit(self) -> Literal["computing", "exchange", "dispatch", "link"]:
        """What the overlapped step waits for most."""
        slowest = max(self.links)
        if slowest > self.compute and slowest >= self.dispatch:
            return "link"
        if self.dispatch > self.compute:
            return "dispatch"
        return "exchange" if self.exchange > sum(self.turns) else "computing"


class CostModel:
    """What the steps of one plan take. Tables are [layers, devices].

    Raises:
        PlanError: for a device in use whose rates are not known, and for a model with an encoder.
    """

    def __init__(self, plan: Plan):
        if any(shape.role != "decoder" for shape in plan.model.layers):
            raise PlanError(
                f"{plan.model.name or 'the model'} has an encoder, whose steps are not predicted:"
                " give a split of its own."
            )
        self.plan = plan
        used = plan.used_devices
        infos = plan.mesh.devices
        self._read = rates_of(infos, used, "read_gbps", 1e9)
        self._flops = rates_of(infos, used, "tflops", 1e12)
        layers, devices = len(plan.layers), len(plan.mesh)
        # Bytes and values of weights; those of a mixture apart, for a token reads few of them.
        self._attn = _Weights.none(layers, devices)
        self._mlp = _Weights.none(layers, devices)
        self._experts = _Weights.none(layers, devices)
        # Outside the layers: tables, and what is read whole beside them.
        self._tables: dict[str, Floats] = {"": np.zeros((2, devices))}
        self._vectors = np.zeros((2, devices))
        self._counted: set[str] = set()  # matrices
        for tensor in plan.tensors:
            self._count(tensor)
        # Of several tables the head reads one whole; an embedding takes a few rows.
        self._head = max(self._tables.values(), key=np.sum) + self._vectors
        self._groups = np.array([_counts(plan, layer.groups) for layer in plan.layers], float)
        self._states = np.array([_counts(plan, layer.states) for layer in plan.layers], float)

    def under(self, plan: Plan) -> CostModel:
        """Of a plan that cuts weights as this one does, with other options."""
        found = copy(self)
        found.plan = plan
        return found

    def decode(self, position: int) -> StepTime:
        """One token of every slot, each with `position` earlier ones."""
        slots = self.plan.options.slots
        return self._step(slots, slots, position, float(position))

    def prefill(self, position: int) -> StepTime:
        """One whole chunk (`ubatch` tokens) of one row's prompt, from `position` on."""
        tokens = self.plan.options.ubatch
        return self._step(tokens, 1, position, position + tokens / 2)

    def seconds(self, step: StepTime) -> float:
        """Of a step under this plan: overlapped where it copies ahead, else additive."""
        return step.overlapped if self.plan.options.prefetch > 1 else step.additive

    def decode_rate(self, position: int) -> float:
        """Tokens a second of all slots together."""
        return self.plan.options.slots / self.seconds(self.decode(position))

    def prefill_rate(self, position: int) -> float:
        """Prompt tokens a second at a depth."""
        return self.plan.options.ubatch / self.seconds(self.prefill(position))

    def _count(self, tensor: TensorShape) -> None:
        plan = self.plan
        matrix, values = values_of(tensor, self._counted)
        split = tensor.split_axis
        ranges = None if split is None else plan.ranges(split.name, tensor.layer)
        if ranges is None:
            part = np.array([plan.holds(tensor, d) for d in range(len(plan.mesh))], float)
        else:
            dim = tensor.axes.index(split.name) if split else 0
            part = _counts(plan, ranges) / (tensor.shape[dim] * tensor.packs_along(dim))
        both = np.stack((tensor.nbytes * part, values * part))
        if tensor.layer is None:
            if len(tensor.shape) == 1:
                self._vectors += both
            elif split is not None:
                self._tables[matrix] = self._tables.get(matrix, 0.0) + both
            return
        into = self._attn
        if split is not None and split.follows == "weight":
            into = self._experts if "expert" in tensor.axes else self._mlp
        into.bytes[tensor.layer] += both[0]
        into.values[tensor.layer] += both[1]

    def _step(self, tokens: int, rows: int, position: int, seen: float) -> StepTime:
        plan, options, fabric = self.plan, self.plan.options, self.plan.mesh.fabric
        attn, mlp, head = (self._seconds(*part) for part in self.work(tokens, rows, seen))
        devices = range(len(plan.mesh))
        sent = np.array([plan.step_bytes(d, position, rows) for d in devices], float)
        rates = rates_of(plan.mesh.devices, np.flatnonzero(sent), "link_gbps", 1e9)
        links = sent / rates
        payload = tokens * plan.model.embed * options.itemsize
        dispatch = self._programs(position) * fabric.dispatch_us * 1e-6
        if options.split_mode == "tensor":
            together = np.sum if fabric.shared else np.max
            turns = (float(sum(together(stage, axis=-1).sum() for stage in (attn, mlp, head))),)
            exchange = self._exchanges(payload)
        else:
            turns = tuple((attn + mlp).sum(0) + head)
            places = [layer.devices[0] for layer in plan.layers]
            pairs = [p for p in zip(places, places[1:], strict=False) if p[0] != p[1]]
            exchange = sum(fabric.copy_seconds(pair, payload) for pair in pairs)
        staging = np.array([plan.staging_bytes(d) for d in range(len(plan.mesh))], float)
        return StepTime(turns, exchange, dispatch, tuple(links), tuple(staging / rates))

    def work(self, tokens: int, rows: int, seen: float) -> tuple[tuple[Floats, Floats], ...]:
        """Bytes read and operations, by layer and device, of attention or a recurrent mixer and of
        MLPs, and by device of the head; a recurrent state is read and written once a step. `seen`
        is the mean of a token's earlier positions."""
        plan = self.plan
        cache, scores, states = attention_work(plan.model, plan.options, tokens, rows, seen)
        repeat = np.array([layer.replication for layer in plan.layers], float)
        read = cache[:, None] * self._groups + states[:, None] * self._states
        scored = (scores / repeat)[:, None] * self._groups
        attn = self._attn.bytes + read, 2 * tokens * self._attn.values + scored
        touched, part = (each[:, None] for each in experts_work(plan.model, tokens))
        mlp = (
            self._mlp.bytes + touched * self._experts.bytes,
            2 * tokens * (self._mlp.values + part * self._experts.values),
        )
        return attn, mlp, (self._head[0], 2 * rows * self._head[1])

    def _seconds(self, size: Floats, operations: Floats) -> Floats:
        return np.maximum(size / self._read, operations / self._flops)

    def _exchanges(self, payload: float) -> float:
        """Of the partials of embedding, mixers and MLPs."""
        plan, fabric = self.plan, self.plan.mesh.fabric
        collective = plan.engine == "fused"
        found: dict[tuple[int, ...], float] = {}
        total = 0.0
        stages = [(plan.used_devices, 1)]
        for shape, layer in zip(plan.model.layers, plan.layers, strict=True):
            stages.append((layer.devices, shape.exchanges))
        for devices, times in stages:
            if devices not in found:
                found[devices] = fabric.exchange_seconds(devices, payload, collective)
            total += times * found[devices]
        return total

    def _programs(self, position: int) -> int:
        """Programs that the host thread starts in a step."""
        plan, options = self.plan, self.plan.options
        if plan.engine == "fused":
            return 2
        count = len(plan.used_devices)
        for shape, layer in zip(plan.model.layers, plan.layers, strict=True):
            live = len(live_pages(options, position, shape.window))
            folds = groups_of(live, options.group_pages)
            stages = 2 if len(layer.devices) > 1 else 1
            count += stages * len(layer.devices) + folds * len(layer.attn_devices)
        return count


@dataclass
class _Weights:
    """Bytes and values that weights have, [layers, devices]."""

    bytes: Floats
    values: Floats

    @classmethod
    def none(cls, layers: int, devices: int) -> _Weights:
        return cls(np.zeros((layers, devices)), np.zeros((layers, devices)))


def _counts(plan: Plan, ranges: tuple[tuple[int, int], ...]) -> Floats:
    """Units a device, padding of the fused engine included."""
    counts = np.array([stop - start for start, stop in ranges], float)
    return np.full_like(counts, counts.max()) if plan.padded else counts


def attention_work(
    model: ModelShape, options: PlanOptions, tokens: int, rows: int, seen: float
) -> tuple[Floats, Floats, Floats]:
    """Of every layer: bytes read of the cache of a KV group, operations of its scores, and bytes of
    a group of recurrent states, which is read and written once."""
    cache, scores, states = [], [], []
    for shape in model.layers:
        live = seen if shape.window is None else min(seen, shape.window)
        cache.append(rows * live * position_bytes(shape, options))
        scores.append(2 * tokens * live * shape.q_per_kv * (shape.k_dim + shape.v_dim))
        states.append(2 * rows * shape.state_bytes)
    return np.array(cache, float), np.array(scores, float), np.array(states, float)


def experts_work(model: ModelShape, tokens: int) -> tuple[Floats, Floats]:
    """Of every layer: the part of its experts that any of the tokens is sent to, expected, and the
    part that each is."""
    used = [s.experts_used / s.experts if s.experts else 0.0 for s in model.layers]
    part = np.array(used, float)
    return 1 - (1 - part) ** tokens, part


def values_of(tensor: TensorShape, counted: set[str]) -> tuple[str, float]:
    """The matrix that a tensor is of, and values of it that none of the `counted` ones had: each
    array of a quantised matrix covers all its values, which are multiplied with once."""
    matrix = tensor.name.rpartition(".")[0] if tensor.packs > 1 else tensor.name
    if matrix in counted:
        return matrix, 0.0
    counted.add(matrix)
    return matrix, float(np.prod(tensor.shape)) * tensor.packs


def groups_of(pages: int, largest: int) -> int:
    """How many groups of 1, 4, 16 ... pages, `largest` at most, hold so many pages."""
    count, size = pages // largest, largest
    pages %= largest
    while pages:
        size = max(1, size // 4)
        count, pages = count + pages // size, pages % size
    return count


def rates_of(infos: Sequence[DeviceInfo], needed: object, name: str, unit: float) -> Floats:
    """A rate of each device in units a second; any number for those that are not needed.

    Raises:
        PlanError: where a needed one is not known.
    """
    found = np.ones(len(infos))
    for i in np.asarray(needed, int):
        rate = getattr(infos[i], name)
        if rate is None or not rate > 0:
            raise PlanError(
                f"{name} of device {infos[i].label} is {rate!r}; measure the machine's rates or"
                " give them (--devices-file)."
            )
        found[i] = rate
    return found * unit


def calibrated(plan: Plan, position: int, seconds: float) -> Mesh:
    """The plan's mesh with memory and matmul rates of all devices scaled by one factor, so that
    the plan's decode step at `position` computes in `seconds`, as it was measured to.

    Raises:
        PlanError: when exchanges alone take longer.
    """
    step = CostModel(plan).decode(position)
    left = seconds - step.exchange
    if left <= 0:
        raise PlanError(
            f"a step of {seconds} s was measured and its exchanges alone take {step.exchange} s;"
            " lower the machine's exchange latency."
        )
    factor = (step.compute - step.exchange) / left

    def scaled(info: DeviceInfo) -> DeviceInfo:
        rates = {"read_gbps": info.read_gbps, "tflops": info.tflops}
        return replace(info, **{k: None if v is None else v * factor for k, v in rates.items()})

    return replace(plan.mesh, devices=tuple(scaled(d) for d in plan.mesh.devices))
