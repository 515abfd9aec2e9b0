"""The search of a fit: cuts by kind and settings, and plans of those that may be the fastest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from sharding.cost import CostModel
from sharding.errors import DoesNotFit, FitError, PlanError
from sharding.fit_layers import LayerCut, LayerCuts
from sharding.fit_tables import Probe, Tables, Workload
from sharding.fit_tensor import TensorCut, TensorCuts
from sharding.mesh import Mesh
from sharding.options import PlanOptions, SplitMode
from sharding.plan import Plan, make_plan
from sharding.shapes import ModelShape, TensorShape

LAYERS = "layer"
UBATCHES = (128, 256, 512, 1024, 2048)
PREFETCHES = (4, 2)
MARGIN = 1.01  # by which a plan may be faster than its cut's time tells

Tell = Callable[[str, int, int], None]  # what is looked at, how many steps are done, of how many


def silent(what: str, done: int, steps: int) -> None:
    """Tell nobody."""


@dataclass(frozen=True)
class Allowed:
    """What a fit may choose from; pairs of cache types are in order of preference."""

    cache_types: tuple[tuple[str, str], ...]
    split_modes: tuple[SplitMode, ...] = ("none", "layer", "tensor")
    ubatches: tuple[int, ...] = UBATCHES
    prefetches: tuple[int, ...] = PREFETCHES


@dataclass(frozen=True)
class Considered:
    """One way to run the model.

    Attributes:
        kind: what the search was for, such as "tensor over 3".
        options: as asked of `make_plan`; None where nothing fits.
        decode_rate, prefill_rate: tokens a second of all slots, predicted by the plan's cost where
            there is a plan, else what no such plan can exceed.
        seconds: of the whole request.
        plan: None where no plan was made, for it could not have won.
        limit: what its decode step waits for, in words.
        why: why it lost; empty for the one chosen.
    """

    kind: str
    options: PlanOptions | None
    decode_rate: float
    prefill_rate: float
    seconds: float
    plan: Plan | None = field(default=None, repr=False)
    limit: str = ""
    why: str = ""


@dataclass(frozen=True)
class Cut:
    """A cut that a search found, and what a request takes with it at least."""

    kind: str
    options: PlanOptions
    cut: LayerCut | TensorCut
    prefill_rate: float
    decode_rate: float
    seconds: float
    limit: str


class Search:
    """What `sharding.fit.fit` looks through; see its module."""

    def __init__(
        self,
        model: ModelShape,
        mesh: Mesh,
        options: PlanOptions,
        tensors: tuple[TensorShape, ...],
        allowed: Allowed,
        workload: Workload,
        cut_tensors: tuple[TensorShape, ...],
        tell: Tell = silent,
    ):
        self.model, self.mesh, self.options = model, mesh, options
        self.tensors, self.allowed, self.workload = tensors, allowed, workload
        self.cut_tensors = cut_tensors  # of -sm tensor
        self.spare_host = False  # look for cuts with little cache in host memory, too
        self.tell = tell

    def run(self) -> list[Considered]:
        """All kinds of split with every pair of cache types, each with its best settings."""
        found: dict[tuple[str, str], list[Cut]] = {}
        for cut in self.cuts():
            types = f"{cut.options.cache_type_k}/{cut.options.cache_type_v}"
            found.setdefault((cut.kind, types), []).append(cut)
        none = [Considered(k, None, 0.0, 0.0, float("inf"), why=why) for k, why in self._out()]
        considered = []
        best = float("inf")
        ways = [sorted(cuts, key=lambda c: c.seconds) for cuts in found.values()]
        for i, cuts in enumerate(sorted(ways, key=lambda cuts: cuts[0].seconds)):
            self.tell(f"plan of {cuts[0].kind}", i, len(ways))
            if self._alone(cuts[0]):
                continue
            if cuts[0].seconds > best * MARGIN:
                considered.append(self._bound(cuts[0]))
                continue
            plans = map(self.plan, cuts)
            refused = next(plans)
            one = refused if refused.plan else next((p for p in plans if p.plan), refused)
            considered.append(one)
            if one.plan is not None:
                best = min(best, one.seconds)
        kinds = {kind for kind, _ in found}
        return considered + [c for c in none if c.kind not in kinds]

    def _alone(self, cut: Cut) -> bool:
        """Whether the best cut of layers is one that a single device's row tells of."""
        counts = cut.cut.counts if isinstance(cut.cut, LayerCut) else ()
        none = "none" in self.allowed.split_modes
        return none and cut.kind == LAYERS and sum(n > 0 for n in counts) == 1

    def settings(self) -> Iterator[PlanOptions]:
        """Every allowed pair of cache types, chunk and prefetch."""
        base = replace(
            self.options,
            split_mode="layer",
            tensor_split=None,
            attn_split=None,
            kv="host",
            kv_gpu_layers=None,
            kv_device_bytes="auto",
            engine="auto",
            kv_replicate=False,
            dither=False,
            rounding="nearest",
        )
        chunks = self.allowed.ubatches
        useful = [n for n in chunks if n <= base.ctx] or [min(chunks)]
        for k, v in self.allowed.cache_types:
            for ubatch in useful:
                for prefetch in self.allowed.prefetches:
                    types: dict[str, Any] = {"cache_type_k": k, "cache_type_v": v}
                    yield replace(base, ubatch=ubatch, prefetch=prefetch, **types)

    def kinds(self) -> Iterator[tuple[str, Literal["layer", "tensor"], int]]:
        """What is searched for: a name, the way to cut, and a device or a number of devices."""
        devices = self.mesh.devices
        modes = self.allowed.split_modes
        if "none" in modes:
            for i, device in enumerate(devices):
                yield f"all on {device.label}", "layer", i
        if len(devices) > 1 and "layer" in modes:
            yield LAYERS, "layer", -1
            if self.spare_host:
                yield "layer, least on the host", "layer", -1
        if "tensor" in modes:
            for n in range(2, len(devices) + 1):
                yield f"tensor over {n}", "tensor", n

    def cuts(self) -> Iterator[Cut]:
        """The best cut of every kind with every setting."""
        probes: list[Probe] = []
        near: dict[int, float | None] = {}
        settings = list(self.settings())
        for i, options in enumerate(settings):
            types = f"{options.cache_type_k}/{options.cache_type_v}"
            self.tell(f"cuts with {types} -ub {options.ubatch}", i, len(settings))
            probes = probes or [
                Probe(self.model, self.mesh, options, tensors)
                for tensors in dict.fromkeys((self.tensors, self.cut_tensors))
            ]
            tables = [Tables(p.under(options), self.mesh, self.workload) for p in probes]
            yield from self._cuts_of(tables[0], tables[-1], options, near)

    def _cuts_of(
        self, tables: Tables, sliced: Tables, options: PlanOptions, near: dict[int, float | None]
    ) -> Iterator[Cut]:
        """The best cut of every kind that fits; `sliced` are the tables of -sm tensor."""
        layers, tensor = LayerCuts(tables), TensorCuts(sliced)
        for kind, mode, n in self.kinds():
            if mode == "tensor":
                cut = tensor.best(n, near.get(n))
                near[n] = near.get(n) if cut is None else cut.decode
            elif n >= 0:
                cut = layers.alone(n)
            else:
                cut = layers.best() if kind == LAYERS else layers.least_on_host()
            if cut is not None:
                yield self._with_dispatch(kind, tables, options, cut)

    def _with_dispatch(
        self, kind: str, tables: Tables, options: PlanOptions, cut: LayerCut | TensorCut
    ) -> Cut:
        decode, prefill = cut.decode, cut.prefill
        if cut.link is not None:
            limit = f"waits for the link of {self.mesh.devices[cut.link].label}"
        elif isinstance(cut, LayerCut):
            alone = sum(n > 0 for n in cut.counts) == 1
            limit = "computing" if alone else "devices compute one after another"
        else:
            limit = "computing and exchanges"
        if not cut.resident:  # else its plan may be one program
            if isinstance(cut, LayerCut):
                counts = sum(n > 0 for n in cut.counts), 1, 1
            else:
                used = sum(a + b > 0 for a, b in zip(cut.groups, cut.blocks, strict=True))
                counts = used, sum(a > 0 for a in cut.groups), 2 * used
            starting = tables.dispatch(tables.decode, *counts)
            if starting > decode:
                limit = "waits for the host thread that starts programs"
            decode = max(decode, starting)
            prefill = max(prefill, tables.dispatch(tables.prefill, *counts))
        rates = options.ubatch / prefill, options.slots / decode
        return Cut(kind, options, cut, *rates, self.workload.seconds(options.slots, *rates), limit)

    def plan(self, cut: Cut) -> Considered:
        """The cut as a plan; one that turns out not to fit has none."""
        best: Considered | None = None
        refused: Exception | None = None
        tensors = self.tensors if isinstance(cut.cut, LayerCut) else self.cut_tensors
        for options in self._as_options(cut):
            try:
                plan = make_plan(self.model, self.mesh, options, tensors).check_fit()
                _check_host(plan)
            except (DoesNotFit, FitError, PlanError) as error:
                refused = error
                continue
            found = self._measure(cut, plan)
            if best is None or found.seconds < best.seconds:
                best = found
        if best is None:
            return replace(self._bound(cut), why=f"does not fit: {refused}")
        return best

    def _measure(self, cut: Cut, plan: Plan) -> Considered:
        cost, options = CostModel(plan), plan.options
        decode = cost.decode_rate(self.workload.decode_at)
        prefill = cost.prefill_rate(self.workload.prefill_at(options.ubatch))
        seconds = self.workload.seconds(options.slots, prefill, decode)
        return Considered(cut.kind, options, decode, prefill, seconds, plan, cut.limit)

    def _bound(self, cut: Cut) -> Considered:
        options = next(self._as_options(cut))
        rates = cut.decode_rate, cut.prefill_rate, cut.seconds
        return Considered(cut.kind, options, *rates, limit=cut.limit)

    def _as_options(self, cut: Cut) -> Iterator[PlanOptions]:
        """With all of the cache on the devices where it fits, and in host memory as far as not."""
        options, found = cut.options, cut.cut
        if isinstance(found, LayerCut):
            shares: dict[str, Any] = {"tensor_split": found.counts}
            if len(self.mesh) == 1:
                shares = {"split_mode": "none"}
        else:
            shares = {
                "split_mode": "tensor",
                "tensor_split": found.blocks,
                "attn_split": found.groups,
            }
        if found.resident:
            yield replace(options, kv="device", kv_device_bytes=None, **shares)
            even = {"split_mode": "tensor", "tensor_split": None, "attn_split": None}
            if isinstance(found, TensorCut) and all(found.blocks) and self.mesh.alike:
                yield replace(options, kv="device", kv_device_bytes=None, **(shares | even))
        if all(d.free is None for d in self.mesh.devices):
            options = replace(options, kv_device_bytes=None)
        if any(d.link_gbps for d in self.mesh.devices):
            yield replace(options, **shares)

    def _out(self) -> Iterator[tuple[str, str]]:
        """Of every kind, what its weights lack; told of those of which no cut fits."""
        size = sum(t.nbytes for t in self.tensors)
        free = [d.free for d in self.mesh.devices]
        for kind, mode, n in self.kinds():
            if mode == "layer" and n >= 0:
                room = free[n]
            else:
                known = sorted((f for f in free if f is not None), reverse=True)
                room = sum(known[: n if mode == "tensor" else None])
            yield kind, f"does not fit: weights take {size} bytes of {room} free"


def _check_host(plan: Plan) -> None:
    room = plan.mesh.fabric.host_memory
    needed = sum(plan.cache_bytes(i)["host"] for i in range(len(plan.mesh)))
    if room is not None and needed > room:
        raise FitError(f"the cache takes {needed} bytes of host memory and {room} are free.")
