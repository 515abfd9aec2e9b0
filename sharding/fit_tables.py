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
from sharding.cost import CostModel, groups_of, rates_of, values_of
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

    def steps(self, options: PlanOptions) -> tuple[float, float]:
        """Chunks of prompt and decode steps of all slots."""
        return options.slots * self.prompt / options.ubatch, float(self.predict)


@dataclass(frozen=True)
class Stage:
    """One kind of step.

    Attributes:
        count: how many of them a request takes.
        attn, mlp: seconds if a device did all of a layer's, [L, R].
        groups: seconds of all layers' attention for every number of KV groups, with what a device
            has whole, [R, K + 1].
        head, vectors: seconds of the head with all rows, and of what it takes with none, [R].
        live: bytes that a layer streams, [L].
        payload: bytes that an exchange moves.
        folds: groups of pages of all layers, each of which a device with attention folds by a
            program of its own.
    """

    count: float
    attn: Floats
    mlp: Floats
    groups: Floats
    head: Floats
    vectors: Floats
    live: Floats
    payload: float
    folds: int


@dataclass(frozen=True)
class Cut:
    """A cut that a search found.

    Attributes:
        shares: layers a device, or MLP blocks a device where every layer is cut.
        groups: KV groups a device where every layer is cut; empty where layers are whole.
        resident: whether all of the cache stays on the devices.
        prefill, decode, seconds: of a chunk of the prompt, of a decode step, and of the request.
        limit: what its decode step waits for, in words.
    """

    shares: tuple[int, ...]
    groups: tuple[int, ...]
    resident: bool
    prefill: float
    decode: float
    seconds: float
    limit: str


class Probe:
    """A plan with everything on one device, whose figures are those of whole layers; `fused` is the
    same as one program with the cache on the device."""

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
        first = Mesh(mesh.devices[:1])
        self.plan = make_plan(model, first, alone, tensors)
        self.fused = make_plan(model, first, replace(alone, kv="device", engine="fused"), tensors)
        self.cost = CostModel(self.plan)
        layers = len(model.layers)
        # Of whole layers; what follows KV groups, as groups of states do; what follows MLP columns.
        self.weights, self.grouped, self.columns = (np.zeros(layers) for _ in range(3))
        self.vocab = self.outside = 0.0
        # Bytes and values of what layers have whole, [L], and of vectors outside them.
        self.whole, self.vectors = np.zeros((2, layers)), np.zeros(2)
        # The largest matrix that a step unpacks, of the same kinds.
        self.unpacked = {kind: np.zeros(layers) for kind in ("grouped", "columns", "whole")}
        self.unpacked_vocab = 0.0
        self._counted: set[str] = set()
        for tensor in tensors:
            self._weigh(tensor)

    def under(self, options: PlanOptions) -> Probe:
        """The same with other cache types, chunks or prefetch."""
        found = copy(self)
        names = ("cache_type_k", "cache_type_v", "ubatch", "prefetch")
        mine = {name: getattr(options, name) for name in names}
        for name in ("plan", "fused"):
            plan = getattr(self, name)
            setattr(found, name, replace(plan, options=replace(plan.options, **mine)))
        found.cost = self.cost.under(found.plan)
        return found

    def _weigh(self, tensor: TensorShape) -> None:
        size = float(tensor.nbytes)
        unpacked = float(sizes.unpacked(tensor, size, self.plan.options.itemsize))
        split = tensor.split_axis
        both = np.array((size, values_of(tensor, self._counted)[1]))
        if tensor.layer is None:
            if split is None:
                self.outside += size
                self.vectors += both * (len(tensor.shape) == 1)
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
        else:
            self.whole[:, tensor.layer] += both
        most = self.unpacked[kind]
        most[tensor.layer] = max(most[tensor.layer], unpacked)


class Tables:
    """See the module's docstring. Bytes are those of whole layers, [L], unless said otherwise.

    Attributes:
        cap: bytes that may be used, [R]; infinite where a device does not tell.
        link: bytes a second of each device's link, [R].
        prefill, decode: the mean step of each kind.
        weights: split and whole bytes of each layer; `grouped` of them follow KV groups, as groups
            of recurrent states do, `columns` the MLP, the rest is on every device of the layer.
        vocab, outside: bytes of vocabulary tables, and of other tensors outside layers.
        ring, pages: cache on the device in any case, recurrent states included, and full pages.
        fused: bytes of everything on one device as one program.
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
        chunks, steps = workload.steps(options)
        self.prefill = self._stage(chunks, options.ubatch, 1, at, options.ubatch / 2)
        self.decode = self._stage(steps, options.slots, options.slots, workload.decode_at, 0.0)
        self.fused = float(probe.fused.needed_bytes(0))
        self.weights, self.grouped, self.columns = probe.weights, probe.grouped, probe.columns
        self.vocab, self.outside = probe.vocab, probe.outside
        self.unpacked, self.unpacked_vocab = probe.unpacked, probe.unpacked_vocab
        self._cache()
        self._compute()

    @property
    def stages(self) -> tuple[Stage, Stage]:
        """Of the prompt, and of what is generated."""
        return self.prefill, self.decode

    @property
    def most_groups(self) -> int:
        """KV groups of a layer; groups of recurrent states in a model without attention."""
        shapes = self.model.layers
        return max(s.kv_heads for s in shapes) or max(s.states for s in shapes)

    def _stage(self, count: float, tokens: int, rows: int, position: int, more: float) -> Stage:
        plan, model = self._probe.plan, self.model
        infos = self.mesh.devices
        read, flops = (
            rates_of(infos, range(len(infos)), name, unit)
            for name, unit in (("read_gbps", 1e9), ("tflops", 1e12))
        )
        work = self._probe.cost.work(tokens, rows, position + more)
        attn, mlp, head = (np.maximum(s / read, n / flops) for s, n in work)
        part = np.arange(self.most_groups + 1) / max(1, self.most_groups)
        whole = self._probe.whole * np.array([[1.0], [2.0 * tokens]])
        size, values = (
            (own[:, None] + part * (both - own[:, None]))[:, None]  # [L, 1, K + 1]
            for own, both in zip(whole, work[0], strict=True)
        )
        groups = np.maximum(size / read[:, None], values / flops[:, None]).sum(0)
        size, values = self._probe.vectors
        vectors = np.maximum(size / read, 2 * rows * values / flops)
        live = [
            rows * len(live_pages(self.options, position, shape.window)) * plan.page_bytes(i, 0)
            for i, shape in enumerate(model.layers)
        ]
        pages = [
            len(live_pages(self.options, position, s.window)) for s in model.layers if s.kv_heads
        ]
        folds = sum(groups_of(n, self.options.group_pages) for n in pages)
        payload = tokens * model.embed * self.options.itemsize
        seconds = attn, mlp, groups, head, vectors
        return Stage(count, *seconds, np.array(live, float), payload, folds)

    def dispatch(self, stage: Stage, devices: int, with_attention: int, stages: int) -> float:
        """Seconds of the host thread for a step of the staged engine."""
        programs = devices + stages * len(self.model.layers) + stage.folds * with_attention
        return programs * self.mesh.fabric.dispatch_us * 1e-6

    def link_seconds(self, sent: Floats) -> Floats:
        """Of so many bytes to each device, [..., R]."""
        found = np.divide(sent, self.link, out=np.full_like(sent, np.inf), where=self.link > 0)
        return np.where(sent > 0, found, 0.0)

    def cut(
        self,
        shares: tuple[tuple[int, ...], tuple[int, ...], bool],
        compute: Floats,
        links: Floats,
        starts: Floats,
        words: str,
    ) -> Cut:
        """A cut of these shares, groups and residency, from the seconds of computing, in `words`,
        [2], of links, [2, R], and of the host thread, [2], in a step of each kind."""
        steps = np.maximum(np.maximum(compute, starts), links.max(1))
        if starts[1] > max(compute[1], links[1].max()):
            words = "waits for the host thread that starts programs"
        elif links[1].max() > compute[1]:
            slowest = self.mesh.devices[int(links[1].argmax())]
            words = f"waits for the link of {slowest.label}"
        seconds = float(np.array([s.count for s in self.stages]) @ steps)
        return Cut(*shares, float(steps[0]), float(steps[1]), seconds, words)

    def _cache(self) -> None:
        options = self.options
        ring, pages, groups = [], [], []
        for index, shape in enumerate(self.model.layers):
            slots = options.slots * shape.kv_heads * shape.owns_cache
            position = position_bytes(shape, options)
            full = full_pages(options, shape.window)
            states = options.slots * shape.states * shape.state_bytes
            tail = ring_positions("staged", options, shape.window)
            ring.append(slots * position * tail + states)
            pages.append(slots * position * full * options.page)
            group = options.group_pages * self._probe.plan.page_bytes(index, 0) if full else 0
            groups.append(group)
        self.ring, self.pages, self.group = (np.array(x, float) for x in (ring, pages, groups))
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
        width = (model.embed + model.beside) * options.itemsize
        self.residual = float(max(options.ubatch, options.slots) * width)
        logit = 4 if options.itemsize == 4 else 4 + options.itemsize
        self.logits = float(max(options.slots, sizes.LOGIT_ROWS) * model.vocab * logit)
