"""What a search over splits needs to know of a model on a mesh: seconds and bytes in tables.

All figures are those of `Plan` and `CostModel` for the staged engine, taken apart by layer: L
layers, R devices.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sharding import sizes
from sharding.cost import CostModel, groups_of, rates_of
from sharding.mesh import Mesh
from sharding.options import PlanOptions
from sharding.plan import make_plan
from sharding.residency import reserve
from sharding.rings import full_pages, live_pages, position_bytes, ring_positions
from sharding.shapes import ModelShape, TensorShape

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Workload:
    """The request that a split is chosen for: so many prompt tokens, then so many generated ones,
    in every slot."""

    prompt: int
    predict: int

    @classmethod
    def filling(cls, ctx: int) -> Workload:
        """Three quarters of a context of prompt, the rest generated."""
        return cls(max(1, ctx * 3 // 4), max(1, ctx - ctx * 3 // 4))

    @property
    def decode_at(self) -> int:
        """The position of the mean decode step."""
        return self.prompt + self.predict // 2

    def prefill_at(self, ubatch: int) -> int:
        """The first position of the mean chunk of the prompt."""
        return max(0, self.prompt - ubatch) // 2

    def seconds(self, slots: int, prefill_rate: float, decode_rate: float) -> float:
        """Of the whole request."""
        return slots * (self.prompt / prefill_rate + self.predict / decode_rate)


@dataclass(frozen=True)
class Stage:
    """One kind of step: seconds of attention and MLP, [L, R], and of the head, [R], if a device did
    all of it; bytes that every layer streams, [L]; bytes that an exchange moves; groups of pages of
    all layers, each of which a device with attention folds by a program of its own."""

    attn: Floats
    mlp: Floats
    head: Floats
    live: Floats
    payload: float
    folds: int


class Probe:
    """A plan with everything on one device, whose figures are those of whole layers."""

    def __init__(
        self,
        model: ModelShape,
        mesh: Mesh,
        options: PlanOptions,
        tensors: tuple[TensorShape, ...],
    ):
        alone = replace(
            options, split_mode="none", kv="host", kv_device_bytes=None, engine="staged"
        )
        self.plan = make_plan(model, Mesh(mesh.devices[:1]), alone, tensors)
        self.cost = CostModel(self.plan)
        layers = len(model.layers)
        # Of whole layers; what follows KV groups, as groups of states do; what follows MLP columns.
        self.weights, self.grouped, self.columns = (np.zeros(layers) for _ in range(3))
        self.vocab = self.outside = 0.0
        # The largest matrix that a step unpacks, of the same kinds.
        self.unpacked = {kind: np.zeros(layers) for kind in ("grouped", "columns", "whole")}
        self.unpacked_vocab = 0.0
        for tensor in tensors:
            self._weigh(tensor)

    def under(self, options: PlanOptions) -> Probe:
        """The same with other cache types, chunks or prefetch."""
        found = copy(self)
        names = ("cache_type_k", "cache_type_v", "ubatch", "prefetch")
        mine = {name: getattr(options, name) for name in names}
        found.plan = replace(self.plan, options=replace(self.plan.options, **mine))
        found.cost = self.cost.under(found.plan)
        return found

    def _weigh(self, tensor: TensorShape) -> None:
        size = float(tensor.nbytes)
        unpacked = float(sizes.unpacked(tensor, size, self.plan.options.itemsize))
        split = tensor.split_axis
        if tensor.layer is None:
            if split is None:
                self.outside += size
            else:
                self.vocab += size
                self.unpacked_vocab = max(self.unpacked_vocab, unpacked)
            return
        self.weights[tensor.layer] += size
        kind = "whole"
        if split is not None:
            kind = "grouped" if split.name in ("kv_group", "state_group") else "columns"
            into = self.grouped if kind == "grouped" else self.columns
            into[tensor.layer] += size
        most = self.unpacked[kind]
        most[tensor.layer] = max(most[tensor.layer], unpacked)


class Tables:
    """See the module's docstring. Bytes are those of whole layers, [L], unless said otherwise.

    Attributes:
        cap: bytes that may be used, [R]; infinite where a device does not tell.
        link: bytes a second of each device's link, [R].
        decode, prefill: the mean step of each kind.
        weights: split and whole bytes of each layer; `grouped` of them follow KV groups, as groups
            of recurrent states do, `columns` the MLP, the rest is on every device of the layer.
        vocab, outside: bytes of vocabulary tables, and of other tensors outside layers.
        ring, pages: cache on the device in any case, recurrent states included, and full pages;
            `whole_ring` is a cache that one program keeps on one device.
        group: of a group of pages; `copies` times as many are in flight while any is streamed.
        handed_on, attention, dense, fixed: of `sizes.layer_compute`, the MLP's as a part that
            follows its columns and one that does not.
        residual, logits: bytes of one residual, and of the logits of all rows.
        unpacked, unpacked_vocab: of the largest quantised matrix once it is unpacked, of each kind
            of `weights`, and of the vocabulary tables.
    """

    def __init__(self, probe: Probe, mesh: Mesh, workload: Workload):
        plan = probe.plan
        self.model, self.mesh, self.options = plan.model, mesh, plan.options
        infos = mesh.devices
        inf = float("inf")
        self.cap = np.array([inf if d.free is None else d.free - reserve(d) for d in infos], float)
        self.link = np.array([d.link_gbps or 0.0 for d in infos]) * 1e9
        self._probe = probe
        options = plan.options
        at = workload.prefill_at(options.ubatch)
        self.decode = self._stage(options.slots, options.slots, workload.decode_at, 0.0)
        self.prefill = self._stage(options.ubatch, 1, at, options.ubatch / 2)
        self.weights, self.grouped, self.columns = probe.weights, probe.grouped, probe.columns
        self.vocab, self.outside = probe.vocab, probe.outside
        self.unpacked, self.unpacked_vocab = probe.unpacked, probe.unpacked_vocab
        self._cache()
        self._compute()

    def _stage(self, tokens: int, rows: int, position: int, more: float) -> Stage:
        plan, model = self._probe.plan, self.model
        infos = self.mesh.devices
        read, flops = (
            rates_of(infos, range(len(infos)), name, unit)
            for name, unit in (("read_gbps", 1e9), ("tflops", 1e12))
        )
        work = self._probe.cost.work(tokens, rows, position + more)
        attn, mlp, head = (np.maximum(s / read, n / flops) for s, n in work)
        live = [
            rows * len(live_pages(self.options, position, shape.window)) * plan.page_bytes(i, 0)
            for i, shape in enumerate(model.layers)
        ]
        pages = [
            len(live_pages(self.options, position, s.window)) for s in model.layers if s.kv_heads
        ]
        folds = sum(groups_of(n, self.options.group_pages) for n in pages)
        payload = tokens * model.embed * self.options.itemsize
        return Stage(attn, mlp, head, np.array(live, float), payload, folds)

    def dispatch(self, stage: Stage, devices: int, with_attention: int, stages: int) -> float:
        """Seconds of the host thread for a step of the staged engine."""
        programs = devices + stages * len(self.model.layers) + stage.folds * with_attention
        return programs * self.mesh.fabric.dispatch_us * 1e-6

    def _cache(self) -> None:
        options = self.options
        ring, pages, whole, groups = [], [], [], []
        for index, shape in enumerate(self.model.layers):
            slots = options.slots * shape.kv_heads * shape.owns_cache
            position = position_bytes(shape, options)
            full = full_pages(options, shape.window)
            states = options.slots * shape.states * shape.state_bytes
            tail, all_positions = (
                ring_positions(engine, options, shape.window) for engine in ("staged", "fused")
            )
            ring.append(slots * position * tail + states)
            whole.append(slots * position * all_positions + states)
            pages.append(slots * position * full * options.page)
            group = options.group_pages * self._probe.plan.page_bytes(index, 0) if full else 0
            groups.append(group)
        self.ring, self.pages, self.group = (np.array(x, float) for x in (ring, pages, groups))
        self.whole_ring = np.array(whole, float)
        self.copies = max(1, options.prefetch)

    def _compute(self) -> None:
        options, model = self.options, self.model
        whole, none = [], []
        states = [
            sizes.states_compute(self._probe.plan, i, s.states) for i, s in enumerate(model.layers)
        ]
        for i, shape in enumerate(model.layers):
            every = shape.kv_heads, shape.mlp, shape.shared_mlp
            whole.append(sizes.layer_compute(self._probe.plan, i, *every))
            none.append(sizes.layer_compute(self._probe.plan, i, 0, 0, 0))
        self.handed_on, self.attention, mlp = np.array(whole, float).T
        self.attention += np.array(states, float)
        self.fixed = np.array(none, float)[:, 2]
        self.dense = mlp - self.fixed
        self.residual = float(max(options.ubatch, options.slots) * model.embed * options.itemsize)
        logit = 4 if options.itemsize == 4 else 4 + options.itemsize
        self.logits = float(max(options.slots, sizes.LOGIT_ROWS) * model.vocab * logit)


@dataclass(frozen=True)
class Slices:
    """The cache of some layers on some device as a budget spends it: whole slices, one a layer,
    then part of one in whole groups of pages from its beginning. Bytes; arrays of one shape.

    Attributes:
        count: slices.
        size: of a slice.
        live: of a slice's pages that a step reads.
        group: of a group of pages.
    """

    count: Floats
    size: Floats
    live: Floats
    group: Floats

    @classmethod
    def of(cls, count: Floats, pages: Floats, live: Floats, group: Floats) -> Slices:
        """Of so many layers with these bytes in all."""
        each = np.maximum(count, 1.0)
        return cls(each, np.maximum(pages / each, 1.0), live / each, np.maximum(group, 1.0))

    def streamed(self, kept: Floats) -> Floats:
        """Bytes that a step streams while so many stay."""
        whole = np.minimum(np.floor(kept / self.size + 1e-9), self.count)
        part = np.floor((kept - whole * self.size) / self.group + 1e-9) * self.group
        return (self.count - whole) * self.live - np.where(
            whole < self.count, np.minimum(self.live, np.maximum(part, 0.0)), 0.0
        )

    def kept_for(self, streamed: Floats) -> Floats:
        """The fewest bytes that must stay so that a step streams no more than so many."""
        live = np.maximum(self.live, 1e-9)
        whole = np.maximum(self.count - np.floor(streamed / live + 1e-9) - 1, 0.0)
        rest = np.maximum((self.count - whole) * self.live - streamed, 0.0)
        part = np.ceil(rest / self.group - 1e-9) * self.group
        return whole * self.size + np.minimum(part, self.size)
