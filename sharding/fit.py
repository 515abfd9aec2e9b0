"""Choosing how to split a model: the plan whose request takes the least time, under every device's
free memory.

A way is a kind of cut (everything on one device, whole layers, every layer over 2, 3, ... devices)
with a cache type, chunk size and depth of prefetch that are allowed. `sharding.fit_layers` and
`sharding.fit_tensor` tell whether any cut of a way keeps a limit of the request's seconds; both are
exact over whole layers, KV groups and MLP blocks, for links that work under computation. Where a
search ends without a proof, a fit says by how much a plan may be faster. `sharding.fit_search`
finds the fastest cut with them, and makes plans, which the cost model compares. Of plans that are
nearly as fast, `sharding.fit_ties` takes the simplest.

Not considered: replicated KV heads, dithered rounding, and other orders of the devices. docs/fit.md
says what they could win.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sharding.errors import FitError
from sharding.fit_search import Allowed, Considered, Search, Tell, silent
from sharding.fit_tables import Workload
from sharding.fit_ties import choose
from sharding.mesh import Mesh
from sharding.options import PlanOptions
from sharding.plan import Plan
from sharding.shapes import ModelShape, TensorShape

MOST_DEVICES = 32  # a search takes seconds for as many


@dataclass(frozen=True)
class Fit:
    """The plan chosen and all that was considered, the chosen one first. `chosen.why` says what
    makes it simpler than a faster one, if there is any. `missed` is by which part a plan may be
    faster than the fastest found; 0 where that is proved to be the fastest. `given` are arguments
    of `LLM.from_gguf` that it was asked with; some of them are chosen among."""

    chosen: Considered
    considered: tuple[Considered, ...]
    workload: Workload
    missed: float = 0.0
    given: Mapping[str, Any] = field(default_factory=dict)

    @property
    def plan(self) -> Plan:
        """The plan of the choice."""
        assert self.chosen.plan is not None
        return self.chosen.plan

    def arguments(self) -> dict[str, Any]:
        """What was given and what was chosen: arguments of `LLM.from_gguf` for the plan."""
        from sharding.fit_report import arguments

        return {**self.given, **arguments(self.plan.options)}

    def to_dict(self) -> dict[str, Any]:
        """What JSON can hold."""
        from sharding.fit_report import to_dict

        return to_dict(self)

    def __str__(self) -> str:
        from sharding.fit_report import to_text

        return to_text(self)

    def _repr_html_(self) -> str:
        from sharding.fit_report import to_html

        return to_html(self)


def fit(
    model: ModelShape,
    mesh: Mesh,
    options: PlanOptions,
    tensors: Sequence[TensorShape],
    allowed: Allowed,
    workload: Workload | None = None,
    cut_tensors: Sequence[TensorShape] | None = None,
    tell: Tell = silent,
) -> Fit:
    """Choose a plan; see the module's docstring.

    Args:
        mesh: with the rates of every device, and the free memory of those that have any limit.
        options: context, slots, pages and whatever else is not chosen.
        tensors: every tensor of the model, no KV head replicated.
        cut_tensors: those of -sm tensor, where quantised weights are held otherwise to be cut.
        workload: the request whose time counts; by default one that fills the context.
        tell: is told of what the search is at, with the steps of that which are done and all.

    Raises:
        FitError: when nothing fits, with the largest context that does; for more than 32 devices.
        PlanError: when a rate is not known, and for a workload that the context does not hold.
    """
    if len(mesh) > MOST_DEVICES:
        raise FitError(
            f"a fit compares plans for at most {MOST_DEVICES} devices and there are {len(mesh)};"
            " fit a part of them, and let several copies of the model share the requests."
        )
    workload = workload or Workload.filling(options.ctx)
    workload.check(options.ctx)
    cut = tuple(tensors if cut_tensors is None else cut_tensors)
    search = Search(model, mesh, options, tuple(tensors), allowed, workload, cut, tell)
    considered = search.run()
    if mesh.fabric.host_memory is not None and not any(c.plan for c in considered):
        search.spare_host = True
        considered = search.run()
    fastest = min((c for c in considered if c.plan), key=lambda c: c.seconds, default=None)
    if fastest is None:
        raise _nothing_fits(search)
    missed = search.missed(fastest.seconds)
    chosen = choose(search, fastest)
    others = [c for c in considered if not _same_way(c, chosen) or c.seconds < chosen.seconds]
    ranked = sorted(others, key=lambda c: (c.options is None, c.seconds))
    judged = [replace(c, why=c.why or _why(c, chosen)) for c in ranked]
    return Fit(chosen, (chosen, *judged), workload, missed)


def _same_way(one: Considered, chosen: Considered) -> bool:
    """Whether one is of the chosen kind and cache types."""
    if one.options is None or chosen.options is None or one.kind != chosen.kind:
        return False
    both = [(o.cache_type_k, o.cache_type_v) for o in (one.options, chosen.options)]
    return both[0] == both[1]


def _why(lost: Considered, chosen: Considered) -> str:
    """Why a way that fits was not chosen."""
    if lost.seconds < chosen.seconds:
        return f"{100 * (1 - lost.seconds / chosen.seconds):.2g} % faster, less simple"
    return f"{lost.seconds / chosen.seconds:.2f} times the time: {lost.limit}"


def _nothing_fits(search: Search) -> FitError:
    """The answer when no plan fits, with the largest context of which one does."""
    ctx = largest_context(search)
    if ctx:
        return FitError(
            f"no plan with a context of {search.options.ctx} fits these devices; the largest that"
            f" fits is {ctx} (-c {ctx}).",
            ctx,
        )
    free = sum(d.free or 0 for d in search.mesh.devices)
    size, options = sum(t.nbytes for t in search.tensors), search.options
    fewer = "fewer sequences (-np), " if options.slots > 1 and size <= free else ""
    return FitError(
        f"no plan fits these devices with any context: {search.takes(free, options.page)} and"
        f" {free} are free in all; use {fewer}a smaller model, a narrower --dtype or more devices."
    )


def largest_context(search: Search) -> int:
    """The largest whole number of pages of context for which a plan fits; 0 for none."""
    page = search.options.page
    low, high = 0, search.options.ctx // page
    steps = high.bit_length()
    while low < high:
        search.tell("largest context", steps - (high - low).bit_length(), steps)
        middle = (low + high + 1) // 2
        if _fits(search, middle * page):
            low = middle
        else:
            high = middle - 1
    return low * page


def _fits(search: Search, ctx: int) -> bool:
    """Whether any plan does, with the settings that take least memory."""
    allowed = search.allowed
    least = replace(
        allowed, ubatches=(min(allowed.ubatches),), prefetches=(min(allowed.prefetches),)
    )
    small = Search(
        search.model,
        search.mesh,
        replace(search.options, ctx=ctx),
        search.tensors,
        least,
        Workload.filling(ctx),
        search.cut_tensors,
    )
    small.spare_host = True
    return small.fits()
