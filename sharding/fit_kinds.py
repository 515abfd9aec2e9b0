"""The kinds of cuts that a fit considers, and the cuts of each under one set of options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from sharding.cost import CostModel
from sharding.fit_layers import LayerCuts
from sharding.fit_probe import Probe
from sharding.fit_tables import Cut, Tables, Workload
from sharding.fit_tensor import MOST_BOXES, Answer, TensorCuts
from sharding.fit_terms import Effort, TensorParts
from sharding.mesh import Mesh
from sharding.options import PlanOptions, SplitMode
from sharding.plan import make_plan
from sharding.shapes import ModelShape, TensorShape


class Kind(NamedTuple):
    """A name; the way to cut; the device that does all, or how many devices all layers are cut
    over."""

    name: str
    mode: SplitMode
    n: int = 0


LAYERS = Kind("layer", "layer")
SPARE_LAYERS = Kind("layer, least on the host", "layer")


def kinds_of(mesh: Mesh, modes: tuple[SplitMode, ...], spare_host: bool) -> Iterator[Kind]:
    """All that there are; `spare_host` adds cuts with the least of their cache in host memory."""
    if "none" in modes:
        for i, device in enumerate(mesh.devices):
            yield Kind(f"all on {device.label}", "none", i)
    if len(mesh) > 1 and "layer" in modes:
        yield LAYERS
        if spare_host:
            yield SPARE_LAYERS
    if "tensor" in modes:
        for n in range(2, len(mesh) + 1):
            yield Kind(f"tensor over {n}", "tensor", n)


class Sized:
    """What cuts under all options have in common; `tensors` are those of whole layers, and of cut
    ones."""

    def __init__(
        self,
        model: ModelShape,
        mesh: Mesh,
        options: PlanOptions,
        tensors: tuple[tuple[TensorShape, ...], tuple[TensorShape, ...]],
        workload: Workload,
    ):
        self.mesh, self.workload, self.effort = mesh, workload, Effort()
        made = {each: Probe(model, mesh, options, each) for each in dict.fromkeys(tensors)}
        self.whole, self.sliced = (made[each] for each in tensors)
        self.even = self._even(model, options, tensors[1])

    def _even(
        self, model: ModelShape, options: PlanOptions, tensors: tuple[TensorShape, ...]
    ) -> CostModel | None:
        """Of equal parts on devices that are alike, as one program; None where there are none."""
        if len(self.mesh) < 2 or not self.mesh.alike:
            return None
        plan = make_plan(model, self.mesh, evenly(options), tensors)
        return CostModel(plan) if plan.engine == "fused" else None


def evenly(options: PlanOptions) -> PlanOptions:
    """Every layer cut in equal parts, with the cache on the devices."""
    place = {"kv": "device", "kv_device_bytes": None}
    return replace(options, split_mode="tensor", tensor_split=None, attn_split=None, **place)


class KindCuts:
    """The cuts of every kind under some options; `leaner` are those under options with less
    prefetch, and the same else."""

    def __init__(self, sized: Sized, options: PlanOptions, leaner: KindCuts | None = None):
        self._sized, self._options = sized, options
        self._tensor: dict[int, TensorCuts] = {}
        self._leaner = leaner

    def within(
        self,
        kind: Kind,
        limit: float,
        resident: bool = False,
        most: int | None = None,
        looks: int = MOST_BOXES,
    ) -> Answer:
        """A cut whose request takes no more seconds than `limit`. `resident`: all of the cache
        stays on the devices; `most`: of layers, on so many devices at most; `looks`: see
        `TensorCuts.within`."""
        if kind.mode == "tensor":
            if self._even is not None and kind.n == len(self._sized.mesh):
                if self._even.seconds <= limit:
                    return Answer(self._even)
            return self._over(kind.n).within(limit, resident, looks)
        if kind == SPARE_LAYERS:
            found = self._layers.least_on_host()
            cuts = [] if found is None else [found]
        elif kind == LAYERS:
            cuts = [cut for d in range(len(self._sized.mesh)) for cut in self._layers.alone(d)]
        else:
            cuts = self._layers.alone(kind.n)
        cuts = [c for c in cuts if c.seconds <= limit and (c.resident or not resident)]
        if kind == LAYERS and not cuts:
            return Answer(self._layers.within(limit, resident, most))
        return Answer(min(cuts, key=lambda cut: cut.seconds, default=None))

    def _over(self, n: int) -> TensorCuts:
        if n not in self._tensor:
            leaner = None if self._leaner is None else self._leaner._over(n)
            self._tensor[n] = TensorCuts(self._parts, n, leaner)
        return self._tensor[n]

    @cached_property
    def _parts(self) -> TensorParts:
        return TensorParts(self._tables[self._sized.sliced], self._sized.effort)

    @cached_property
    def _layers(self) -> LayerCuts:
        return LayerCuts(self._tables[self._sized.whole])

    @cached_property
    def _tables(self) -> dict[Probe, Tables]:
        probes = dict.fromkeys((self._sized.whole, self._sized.sliced))
        mesh, load = self._sized.mesh, self._sized.workload
        return {probe: Tables(probe.under(self._options), mesh, load) for probe in probes}

    @cached_property
    def _even(self) -> Cut | None:
        """Equal parts on devices that are alike, as one program, where it fits."""
        cost = self._sized.even
        if cost is None:
            return None
        options = self._options
        plan = replace(cost.plan, options=evenly(options))
        if plan.needed_bytes(0) > self._tables[self._sized.sliced].cap.min():
            return None
        cost, load = cost.under(plan), self._sized.workload
        steps = cost.prefill(load.prefill_at(options.ubatch)), cost.decode(load.decode_at)
        chunk, step = (cost.seconds(each) for each in steps)
        seconds = sum(n * x for n, x in zip(load.steps(options), (chunk, step), strict=True))
        return Cut((), (), True, chunk, step, seconds, "computing and exchanges")
