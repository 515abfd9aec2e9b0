"""The search of a fit: the fastest cut of every kind, and plans of those that may be the best."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import isfinite, isinf, log2
from typing import Any

from sharding.cost import CostModel
from sharding.errors import DoesNotFit, FitError, PlanError
from sharding.fit_joint import shares_of
from sharding.fit_kinds import LAYERS, Kind, KindCuts, Sized, evenly, kinds_of
from sharding.fit_room import taken
from sharding.fit_tables import Cut, Workload
from sharding.fit_tensor import MOST_BOXES
from sharding.mesh import Mesh
from sharding.options import PlanOptions, SplitMode
from sharding.plan import Plan, make_plan
from sharding.residency import reserve
from sharding.shapes import ModelShape, TensorShape

UBATCHES = (128, 256, 512, 1024, 2048)
PREFETCHES = (4, 2)
CLOSE = 1e-5  # the fastest cut of all is found to this part
ROUGHLY = 0.05  # and that of every other kind to this part,
ROUGH_BOXES = 128  # if so many boxes tell (`sharding.fit_tensor`), with the first chunk size,
FEWER_BOXES = 8  # and so many with others
PARTS = 1 - 2 * CLOSE, 0.999, 0.998, 0.995, 0.99, 0.98, 0.97, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5
DEFAULT = PlanOptions()

Tell = Callable[[str, int, int], None]  # what is looked at, how many steps are done, of how many


def silent(what: str, done: int, steps: int) -> None:
    """Tell nobody."""


@dataclass(frozen=True)
class Allowed:
    """What a fit may choose from; pairs of cache types are in order of preference.

    Raises:
        FitError: for a prefetch of less than 2, whose copies add to all else: what a fit counts
            copies while it computes.
    """

    cache_types: tuple[tuple[str, str], ...]
    split_modes: tuple[SplitMode, ...] = ("none", "layer", "tensor")
    ubatches: tuple[int, ...] = UBATCHES
    prefetches: tuple[int, ...] = PREFETCHES

    def __post_init__(self) -> None:
        if least := [n for n in self.prefetches if n < 2]:
            raise FitError(f"a fit may choose a prefetch of at least 2, not {least[0]}")


@dataclass(frozen=True)
class Considered:
    """One way to run the model.

    Attributes:
        kind: what the search was for, such as "tensor over 3".
        options: as asked of `make_plan`; None where nothing fits.
        decode_rate, prefill_rate: tokens a second of all slots, predicted.
        seconds: of the whole request.
        plan: None where no plan was made, for it could not have won.
        limit: what its decode step waits for, in words.
        why: why it lost; of the one chosen, what makes it simpler than the fastest.
    """

    kind: str
    options: PlanOptions | None
    decode_rate: float
    prefill_rate: float
    seconds: float
    plan: Plan | None = field(default=None, repr=False)
    limit: str = ""
    why: str = ""


@dataclass
class Way:
    """A kind of cut under some options: the fastest that was found so far, what none was found to
    take less seconds than, and what none takes less than, for that is proved. `resident`: only
    those without a host cache are looked for; `most`: of whole layers only those on so many devices
    at most."""

    kind: Kind
    options: PlanOptions
    cuts: KindCuts
    resident: bool = False
    most: int | None = None
    cut: Cut | None = None
    low: float = 0.0
    proved: float = 0.0

    @property
    def seconds(self) -> float:
        """Of the fastest; infinite where there is none."""
        return float("inf") if self.cut is None else self.cut.seconds

    def beats(self, limit: float, looks: int = MOST_BOXES) -> bool:
        """Whether a cut takes no more than so many seconds; it is kept."""
        cut, proved = self.cuts.within(self.kind, limit, self.resident, self.most, looks)
        if cut is None:
            self.low = max(self.low, limit)
            self.proved = max(self.proved, limit if proved else 0.0)
        elif cut.seconds < self.seconds:
            self.cut = cut
        return cut is not None

    def find(self, limit: float, close: float = CLOSE, looks: int = MOST_BOXES) -> None:
        """Look for the fastest that takes less than `limit`, to such a part of its time. What is
        a little faster is looked for first: most often there is none, and that is all to prove.
        Whether there is any at all is looked for without regard to `looks`."""
        found, part = self.beats(limit, looks if isfinite(limit) else MOST_BOXES), close
        while found and self.seconds - self.low > close * self.seconds:
            goal = max(self.seconds * (1 - part), (self.low + self.seconds) / 2)
            part = 4 * part if self.beats(goal, looks) else close


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
        self.ways: list[list[Way]] = []  # what `run` looked through
        first = next(self.settings(*allowed.cache_types[0]))
        self._sized = Sized(model, mesh, first, (tensors, cut_tensors), workload)

    def run(self) -> list[Considered]:
        """All kinds of split with every pair of cache types, each with its best settings."""
        self.ways = self._all_ways()
        self._find_fastest(self.ways)
        found = [sorted(ways, key=lambda way: way.seconds) for ways in self.ways]
        considered, best = [], float("inf")
        for ways in sorted(found, key=lambda ways: ways[0].seconds):
            ways = [way for way in ways if way.cut is not None]
            if not ways or self._alone(ways[0]):
                continue
            if ways[0].seconds >= best:
                considered.append(self._unplanned(ways[0]))
                continue
            one = self._planned(ways)
            considered.append(one)
            best = min(best, one.seconds if one.plan else best)
        fit = {way.kind.name for ways in found for way in ways if way.cut is not None}
        return considered + list(self._out([kind for kind in self._kinds if kind.name not in fit]))

    def _planned(self, ways: list[Way]) -> Considered:
        """The first of some ways that fits as a plan, else one that needs no host memory."""
        refused: Considered | None = None
        for way in ways:
            one = self.plan(way)
            if one.plan is not None:
                return one
            refused = refused or one
        assert refused is not None
        for way in (replace(way, resident=True, cut=None, low=0.0) for way in ways):
            way.find(float("inf"))
            one = refused if way.cut is None else self.plan(way)
            if one.plan is not None:
                return one
        return refused

    def _all_ways(self) -> list[list[Way]]:
        """Of every kind with every pair of cache types, all settings."""
        found = []
        for types in self.allowed.cache_types:
            settings, cuts = list(self.settings(*types)), dict[PlanOptions, KindCuts]()
            last = dict[int, KindCuts]()  # with a size of chunks
            for options in sorted(settings, key=lambda options: options.prefetch):
                leaner = last.get(options.ubatch)
                cuts[options] = last[options.ubatch] = KindCuts(self._sized, options, leaner)
            for kind in self._kinds:
                spare = self.spare_host and kind.mode == "tensor"
                found.append([Way(kind, each, cuts[each], spare) for each in settings])
        return found

    def _find_fastest(self, found: list[list[Way]]) -> None:
        """Find the fastest cut of every kind with every pair of cache types roughly, and that of
        all closely."""
        for i, ways in enumerate(found):
            types = f"{ways[0].options.cache_type_k}/{ways[0].options.cache_type_v}"
            self.tell(f"{ways[0].kind.name}, cache {types}", i, len(found))
            best = float("inf")
            for way in ways:
                looks = ROUGH_BOXES if isinf(best) else FEWER_BOXES
                way.find(best * (1 - ROUGHLY), ROUGHLY, looks)
                best = min(best, way.seconds)
        ordered = sorted((way for ways in found for way in ways), key=lambda way: way.seconds)
        fastest: Way | None = ordered[0]
        while fastest is not None:
            goal, fastest = fastest.seconds * (1 - CLOSE), None
            for i, way in enumerate(ordered):
                self.tell("the fastest of all", i, len(ordered))
                if way.proved < goal and way.beats(goal):
                    goal, fastest = way.seconds * (1 - CLOSE), way
            if fastest is not None:
                fastest.find(goal)

    def missed(self, seconds: float) -> float:
        """By which part a plan may be faster than one that takes so many, for all that `run` has
        proved; 0 where that is no more than what searches and predictions are rounded by."""
        # What was looked for without a host cache may be faster with one.
        ways = [
            replace(way, resident=False, proved=0.0) if way.resident else way
            for ways in self.ways
            for way in ways
        ]
        few, many = 0, len(PARTS)  # of the parts, which is not proved and which is
        if self._proves(ways, seconds * PARTS[few]):
            return 0.0
        while many - few > 1:
            self.tell("what is not proved", few, len(PARTS))
            middle = (few + many) // 2
            if self._proves(ways, seconds * PARTS[middle]):
                many = middle
            else:
                few = middle
        return 1 - PARTS[many] if many < len(PARTS) else 1.0

    def _proves(self, ways: list[Way], limit: float) -> bool:
        """Whether no cut of any way takes no more seconds; what is proved least is asked first."""
        for way in sorted(ways, key=lambda way: way.proved):
            if way.proved < limit:
                way.beats(limit)
            if way.proved < limit:
                return False
        return True

    def fits(self) -> bool:
        """Whether any plan does."""
        for way in (way for ways in self._all_ways() for way in ways):
            if way.beats(float("inf")) and self.plan(way).plan is not None:
                return True
        return False

    @property
    def _kinds(self) -> list[Kind]:
        return list(kinds_of(self.mesh, self.allowed.split_modes, self.spare_host))

    def _alone(self, way: Way) -> bool:
        """Whether the best cut of layers is one that a single device's row tells of."""
        none = "none" in self.allowed.split_modes
        shares = way.cut.shares if way.cut is not None and none else ()
        return way.kind == LAYERS and sum(n > 0 for n in shares) == 1

    def settings(self, cache_type_k: str, cache_type_v: str) -> Iterator[PlanOptions]:
        """Every allowed chunk and prefetch, those about as large as the default first."""
        base = replace(
            self.options,
            split_mode="layer",
            tensor_split=None,
            attn_split=None,
            kv="host",
            kv_gpu_layers=None,
            kv_device_bytes="auto",
            cache_type_k=cache_type_k,  # type: ignore[arg-type]
            cache_type_v=cache_type_v,  # type: ignore[arg-type]
            engine="auto",
            kv_replicate=False,
            dither=False,
            rounding="nearest",
        )
        chunks = sorted(self.allowed.ubatches, key=lambda n: abs(log2(n / DEFAULT.ubatch)))
        for ubatch in [n for n in chunks if n <= base.ctx] or [min(chunks)]:
            for prefetch in self.allowed.prefetches:
                yield replace(base, ubatch=ubatch, prefetch=prefetch)

    def plan(self, way: Way) -> Considered:
        """The fastest cut as a plan; one that turns out not to fit has none."""
        refused: Exception | None = None
        tensors = self.cut_tensors if way.kind.mode == "tensor" else self.tensors
        for options in self._as_options(way):
            try:
                plan = make_plan(self.model, self.mesh, options, tensors)
                _check_room(plan)
            except (DoesNotFit, FitError, PlanError) as error:
                refused = error
                continue
            return self._measure(way, plan)
        return replace(self._unplanned(way), why=f"does not fit: {refused}")

    def _measure(self, way: Way, plan: Plan) -> Considered:
        cost, options = CostModel(plan), plan.options
        decode = cost.decode_rate(self.workload.decode_at)
        prefill = cost.prefill_rate(self.workload.prefill_at(options.ubatch))
        seconds = self.workload.seconds(options.slots, prefill, decode)
        return Considered(way.kind.name, options, decode, prefill, seconds, plan, way.cut.limit)  # type: ignore[union-attr]

    def _unplanned(self, way: Way) -> Considered:
        cut, options = way.cut, next(self._as_options(way))
        assert cut is not None
        rates = options.slots / cut.decode, options.ubatch / cut.prefill
        return Considered(way.kind.name, options, *rates, cut.seconds, limit=cut.limit)

    def _as_options(self, way: Way) -> Iterator[PlanOptions]:
        """With all of the cache on the devices where it can be, then in host memory as far as it
        must."""
        options, cut = way.options, way.cut
        assert cut is not None
        if way.kind.mode == "tensor" and not cut.shares:
            yield evenly(options)
            return
        shares: dict[str, Any] = {"tensor_split": cut.shares}
        if way.kind.mode == "tensor":
            shares |= {"split_mode": "tensor", "attn_split": shares_of(cut.groups)}
        elif len(self.mesh) == 1:
            shares = {"split_mode": "none"}
        if cut.resident:
            yield replace(options, kv="device", kv_device_bytes=None, **shares)
        if all(d.free is None for d in self.mesh.devices):
            options = replace(options, kv_device_bytes=None)
        if any(d.link_gbps for d in self.mesh.devices):
            yield replace(options, **shares)

    def _out(self, kinds: Iterable[Kind]) -> Iterator[Considered]:
        """Kinds of which no cut fits, each with what it takes."""
        free = [d.free for d in self.mesh.devices]
        for kind in kinds:
            if kind.mode == "none":
                room = free[kind.n]
            else:
                known = sorted((f for f in free if f is not None), reverse=True)
                room = sum(known[: kind.n or None])
            why = self.takes(room or 0, self.options.ctx, alone=kind.mode == "none")
            why = f"does not fit: {why} of {room} free"
            yield Considered(kind.name, None, 0.0, 0.0, float("inf"), why=why)

    def takes(self, room: int, ctx: int, alone: bool = False) -> str:
        """What the model takes of so many bytes with a context, in words; see
        `sharding.fit_room.taken`."""
        size = sum(t.nbytes for t in self.tensors)
        found = (each for types in self.allowed.cache_types for each in self.settings(*types))
        settings = [replace(each, ctx=ctx) for each in found]
        return taken(self.model, size, room, settings, alone)


def _check_room(plan: Plan) -> None:
    """Raise where a device has not as much left as should stay free, or the host has too little."""
    for i, info in enumerate(plan.mesh.devices):
        needed, room = (
            plan.needed_bytes(i),
            None if info.free is None else info.free - reserve(info),
        )
        if room is not None and needed > room and needed:
            raise DoesNotFit(info.label, needed, room)
    host = plan.mesh.fabric.host_memory
    needed = sum(plan.cache_bytes(i)["host"] for i in range(len(plan.mesh)))
    if host is not None and needed > host:
        raise FitError(f"the cache takes {needed} bytes of host memory and {host} are free.")
