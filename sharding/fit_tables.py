"""What a search over splits needs to know of a model on a mesh: seconds and bytes in tables.

All figures are those of `Plan` and `CostModel` for the staged engine, taken apart by layer: L
layers, R devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sharding import sizes
from sharding.cost import attention_work, experts_work, groups_of, rates_of
from sharding.errors import PlanError
from sharding.fit_cache import Pages
from sharding.fit_joint import Groups
from sharding.fit_probe import FOLLOWED, Probe
from sharding.fit_units import Floats, Grid, LayerSet
from sharding.mesh import Mesh
from sharding.options import PlanOptions
from sharding.residency import reserve
from sharding.rings import full_pages, live_pages, position_bytes, ring_positions

COUNTED = "kv_heads", "states"
ROWS = 256  # parts of the vocabulary that are given out where no layer has an MLP


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

    def check(self, ctx: int) -> None:
        """PlanError for a request that a context does not hold; the last token is only drawn."""
        needed = self.prompt + self.predict - 1
        if needed > ctx:
            raise PlanError(
                f"a request of {self.prompt} prompt tokens and {self.predict} generated ones takes"
                f" {needed} positions and the context (-c) has {ctx}; raise it, or ask for fewer."
            )

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


class Work(NamedTuple):
    """What one part of a step, attention or the MLP, reads and computes in layers of K kinds: how
    many layers are of a kind, [K], in which of `Tables.sets` they are, -1 for all devices, [K], and
    bytes and operations of what a device has whole, [K, 2], and of all units of each total,
    [K, U, 2]."""

    layers: np.ndarray
    sets: np.ndarray
    whole: Floats
    units: Floats

    @classmethod
    def of(cls, sets: np.ndarray, whole: Floats, units: Floats) -> Work:
        """Of layers, [L], [L, 2] and [L, U, 2]; those that are alike become a kind."""
        rows = np.column_stack((sets, whole, units.reshape(len(sets), -1)))
        _, first, layers = np.unique(rows, axis=0, return_index=True, return_counts=True)
        return cls(layers, sets[first], whole[first], units[first])


@dataclass(frozen=True)
class Stage:
    """One kind of step.

    Attributes:
        count: how many of them a request takes.
        rows, position: sequences of a step, and how many earlier positions each has.
        read, flops: bytes and operations a second of each device, [R].
        attn, mlp: seconds if a device did all of a layer's, [L, R].
        mixers, mlps: the same apart, by kinds of layers.
        head, vectors: seconds of the head with all rows, and of what it takes with none, [R].
        payload: bytes that an exchange moves.
        folds: groups of pages of a layer's attention, each of which a device folds by a program of
            its own, [L].
    """

    count: float
    rows: int
    position: int
    read: Floats
    flops: Floats
    attn: Floats
    mlp: Floats
    mixers: Work
    mlps: Work
    head: Floats
    vectors: Floats
    payload: float
    folds: np.ndarray


@dataclass(frozen=True)
class Cut:
    """A cut that a search found.

    Attributes:
        shares: layers a device, or MLP blocks a device where every layer is cut.
        groups: of each total of mixers, groups a device where every layer is cut; empty where
            layers are whole.
        resident: whether all of the cache stays on the devices.
        prefill, decode, seconds: of a chunk of the prompt, of a decode step, and of the request.
        limit: what its decode step waits for, in words.
    """

    shares: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    resident: bool
    prefill: float
    decode: float
    seconds: float
    limit: str


class Tables:
    """See the module's docstring. Bytes are those of whole layers, [L], unless said otherwise.

    Attributes:
        cap: bytes that may be used, [R]; infinite where a device does not tell.
        link: bytes a second of each device's link, [R].
        prefill, decode: the mean step of each kind.
        mixers, mlps: the totals of groups and of MLP blocks.
        follows: which of these totals a layer's part of each of `FOLLOWED` follows, [L].
        sets: layers on the same devices, but for those that are on all; `set_of` [L] tells which a
            layer is in, -1 for none, and `everywhere` counts the exchanges and layers of those.
        weights, parts: bytes of each layer, and by what they follow.
        vocab, outside, rotary: bytes of vocabulary tables, of tensors outside layers that go with
            rows of these, and of those that go with attention.
        ring: cache on the device in any case, recurrent states included, by what it follows.
        pages: of every cache, and of which kind it is, one row a kind, [kinds, L].
        fused: bytes of everything on one device as one program.
        copies: how many groups of pages are in flight while any is streamed.
        handed_on, compute, fixed: of `sizes.layer_compute`, by what it follows, and of the MLP what
            does not follow its columns.
        residual, logits: bytes of one residual, and of the logits of all rows.
        unpacked, unpacked_vocab: of the largest quantised matrix once it is unpacked, by what it
            follows, and of the vocabulary tables.
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
        self._units()
        at = workload.prefill_at(options.ubatch)
        chunks, steps = workload.steps(options)
        self.prefill = self._stage(chunks, options.ubatch, 1, at, options.ubatch / 2)
        self.decode = self._stage(steps, options.slots, options.slots, workload.decode_at, 0.0)
        self.sets = self._folding()
        self.fused = float(probe.fused.needed_bytes(0))
        self.weights, self.parts = probe.weights, probe.parts
        self.vocab, self.outside, self.rotary = probe.vocab, probe.outside, probe.rotary
        self.unpacked, self.unpacked_vocab = probe.unpacked, probe.unpacked_vocab
        self._cache()
        self._compute()

    @property
    def stages(self) -> tuple[Stage, Stage]:
        """Of the prompt, and of what is generated."""
        return self.prefill, self.decode

    def _units(self) -> None:
        shapes, devices = self.model.layers, len(self.mesh)
        heads, states = ([getattr(s, name) for s in shapes] for name in ("kv_heads", "states"))
        columns, beside = (
            [getattr(s, name) // max(32, s.mlp_block) for s in shapes]
            for name in ("mlp", "shared_mlp")
        )
        self.mixers = Groups(heads, states, devices)
        blocks = *columns, *beside
        self.mlps = Grid(max(blocks) or min(ROWS, self.model.vocab), blocks, devices)
        counts = zip(FOLLOWED, (heads, states, columns, beside), strict=True)
        grids = self.mixers, self.mixers, self.mlps, self.mlps
        self.follows = {
            name: np.array([grid.index(n) for n in own])
            for (name, own), grid in zip(counts, grids, strict=True)
        }
        sets: dict[tuple[frozenset[int], frozenset[int]], list[int]] = {}
        for i, shape in enumerate(shapes):
            has = shape.kv_heads, shape.states, shape.mlp, shape.shared_mlp
            some = [
                {int(self.follows[name][i])} if n else set()
                for name, n in zip(FOLLOWED, has, strict=True)
            ]
            key = frozenset(some[0] | some[1]), frozenset(some[2] | some[3])
            sets.setdefault(key, []).append(i)
        self.sets, self.set_of, self.everywhere = [], np.full(len(shapes), -1), (0, 0)
        for key, own in sets.items():
            found = LayerSet(*key, sum(shapes[i].exchanges for i in own), len(own))
            if self.mixers.leading <= found.mixers and 0 in found.mlps:
                exchanges, layers = self.everywhere
                self.everywhere = exchanges + found.exchanges, layers + found.layers
            else:
                self.set_of[own] = len(self.sets)
                self.sets.append(found)

    def _folding(self) -> list[LayerSet]:
        """The sets with the programs that fold pages, which are of every device with groups."""
        folds: dict[int, np.ndarray] = {}
        for i, shape in enumerate(self.model.layers):
            if shape.kv_heads:
                unit = int(self.follows["kv_group"][i])
                own = np.array([stage.folds[i] for stage in self.stages])
                folds[unit] = folds.get(unit, 0) + own
        found = []
        for each in self.sets:
            alone = not each.mlps and len(each.mixers) == 1
            own = folds.pop(next(iter(each.mixers)), None) if alone else None
            found.append(each if own is None else each._replace(folds=tuple(own)))
        none = frozenset[int]()
        more = (LayerSet(frozenset({u}), none, folds=tuple(own)) for u, own in folds.items())
        return [*found, *more]

    def _stage(self, count: float, tokens: int, rows: int, position: int, more: float) -> Stage:
        model, options, parts = self.model, self.options, self._probe.parts
        infos = self.mesh.devices
        read, flops = (
            rates_of(infos, range(len(infos)), name, unit)
            for name, unit in (("read_gbps", 1e9), ("tflops", 1e12))
        )
        work = self._probe.cost.work(tokens, rows, position + more)
        attn, mlp, head = (np.maximum(s / read, n / flops) for s, n in work)
        size, values = self._probe.vectors
        vectors = np.maximum(size / read, 2 * rows * values / flops)
        both = np.array([[1.0], [2.0 * tokens]])
        heads, states = (np.array([getattr(s, n) for s in model.layers]) for n in COUNTED)
        cache, scores, kept = attention_work(model, options, tokens, rows, position + more)
        touched = np.array(experts_work(model, tokens))
        own = {name: both * each for name, each in parts.items()}
        own["kv_group"] += heads * np.array((cache, scores))
        own["state_group"][0] += states * kept
        own["mlp"] += touched * own["expert"]
        everywhere = np.full_like(self.set_of, -1)  # who has no column of an MLP takes no time
        mixers = self._work(self.set_of, own["whole"], self.mixers, FOLLOWED[:2], own)
        mlps = self._work(everywhere, 0 * own["whole"], self.mlps, FOLLOWED[2:], own)
        folds = [
            groups_of(len(live_pages(options, position, s.window)), options.group_pages)
            if s.kv_heads
            else 0
            for s in model.layers
        ]
        payload = tokens * model.embed * options.itemsize
        steps = count, rows, position, read, flops
        return Stage(*steps, attn, mlp, mixers, mlps, head, vectors, payload, np.array(folds))

    def _work(
        self,
        sets: np.ndarray,
        whole: Floats,
        grid: Grid,
        names: tuple[str, ...],
        own: dict[str, Floats],
    ) -> Work:
        layers = np.arange(whole.shape[1])
        units = np.zeros((len(layers), len(grid.totals), 2))
        for name in names:
            units[layers, self.follows[name]] += own[name].T
        return Work.of(sets, whole.T, units)

    def each(self, name: str, values: Floats) -> Floats:
        """Of what follows one of `FOLLOWED` in each layer, [L], that of one unit of each total,
        [L, U]."""
        grid = self.mixers if name in FOLLOWED[:2] else self.mlps
        found = np.zeros((len(values), len(grid.totals)))
        found[np.arange(len(values)), self.follows[name]] = values
        return found / np.maximum(grid.totals, 1)

    def dispatch(self, stage: Stage, devices: int) -> float:
        """Seconds of the host thread for a step of whole layers over so many devices."""
        programs = devices + len(self.model.layers) + stage.folds.sum()
        return programs * self.mesh.fabric.dispatch_us * 1e-6

    def link_seconds(self, sent: Floats) -> Floats:
        """Of so many bytes to each device, [..., R]."""
        found = np.divide(sent, self.link, out=np.full_like(sent, np.inf), where=self.link > 0)
        return np.where(sent > 0, found, 0.0)

    def cut(
        self,
        shares: tuple[tuple[int, ...], tuple[tuple[int, ...], ...], bool],
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
        options, model = self.options, self.model
        layers = range(len(model.layers))
        slots = options.slots
        self.ring = {name: np.zeros(len(layers)) for name in FOLLOWED[:2]}
        owners = [model.cache_owner(i) for i in layers]
        kinds: dict[tuple[float, ...], list[int]] = {}
        for i, shape in enumerate(model.layers):
            self.ring["state_group"][i] = slots * shape.states * shape.state_bytes
            if not shape.kv_heads or not shape.owns_cache:
                continue
            position = shape.kv_heads * position_bytes(shape, options)
            tail = ring_positions("staged", options, shape.window)
            self.ring["kv_group"][i] = slots * position * tail
            full = full_pages(options, shape.window)
            size = options.page * position
            # In the order of a budget (`sharding.residency`); of layers alike those that are read
            # most first, so that no budget streams less than is told.
            key = -full * size, full, shape.kv_heads, -owners.count(i), size
            key += self.follows["kv_group"][i], shape.window or 0
            if full:
                kinds.setdefault(key, []).append(i)
        self.pages: list[Pages] = []
        self.of_kind = np.zeros((len(kinds), len(layers)))
        for c, (key, own) in enumerate(sorted(kinds.items())):
            self.of_kind[c, own] = 1.0
            window = int(key[-1]) or None
            live = [live_pages(options, stage.position, window) for stage in self.stages]
            steps = [(x, s.rows * -int(key[3])) for x, s in zip(live, self.stages, strict=True)]
            self.pages.append(Pages(int(key[1]), key[4], int(key[5]), slots, options, steps))
        self.copies = max(1, options.prefetch)

    def _compute(self) -> None:
        options, model, plan = self.options, self.model, self._probe.plan
        self.compute = {name: np.zeros(len(model.layers)) for name in FOLLOWED}
        self.handed_on, self.fixed = np.zeros((2, len(model.layers)))
        for i, shape in enumerate(model.layers):
            handed_on, attention, least = sizes.layer_compute(plan, i, shape.kv_heads, 0, 0)
            one = sizes.layer_compute(plan, i, 0, shape.mlp, 0)[2] - least
            beside = sizes.layer_compute(plan, i, 0, 0, shape.shared_mlp)[2] - least
            states = sizes.states_compute(plan, i, shape.states)
            for name, size in zip(FOLLOWED, (attention, states, one, beside), strict=True):
                self.compute[name][i] = size
            self.handed_on[i], self.fixed[i] = handed_on, least
        width = (model.embed + model.beside) * options.itemsize
        self.residual = float(max(options.ubatch, options.slots) * width)
        logit = 4 if options.itemsize == 4 else 4 + options.itemsize
        self.logits = float(max(options.slots, sizes.LOGIT_ROWS) * model.vocab * logit)
