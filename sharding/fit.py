"""Choosing how to split a model: the plan whose request takes the least time, under every device's
free memory.

For each cache type, chunk size and depth of prefetch that is allowed, two searches give the cut
with the shortest decode step: `sharding.fit_layers` for whole layers, `sharding.fit_tensor` for
every layer over 2, 3, ... devices. Both are exact over whole layers, KV groups and MLP blocks, for
links that work under computation and a cache that is divisible. A plan keeps whole layers' slices
first, so its time may differ from its cut's by what the link takes for part of one slice. Cuts are
made plans of in the order of their time, and plans are compared by the cost model. The search ends
where no cut that is left is faster than the best plan by more than that.

Not considered: replicated KV heads, dithered rounding, and attention shares finer than the KV
groups of the layers that have most. docs/fit.md says what they could win.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sharding.errors import FitError
from sharding.fit_search import Allowed, Considered, Search, Tell, silent
from sharding.fit_tables import Workload
from sharding.mesh import Mesh
from sharding.options import PlanOptions
from sharding.plan import Plan
from sharding.shapes import ModelShape, TensorShape

MOST_DEVICES = 32  # a search's time grows with the square of their number, here to 14 s


@dataclass(frozen=True)
class Fit:
    """The plan chosen and all that was considered, the best first."""

    chosen: Considered
    considered: tuple[Considered, ...]
    workload: Workload

    @property
    def plan(self) -> Plan:
        """The plan of the choice."""
        assert self.chosen.plan is not None
        return self.chosen.plan

    def arguments(self) -> dict[str, Any]:
        """What was chosen, as arguments of `LLM`."""
        from sharding.fit_report import arguments

        return arguments(self.plan.options)

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
        PlanError: when a rate is not known.
    """
    if len(mesh) > MOST_DEVICES:
        raise FitError(
            f"a fit compares plans for at most {MOST_DEVICES} devices and there are {len(mesh)};"
            " fit a part of them, and let several copies of the model share the requests."
        )
    workload = workload or Workload.filling(options.ctx)
    cut = tuple(tensors if cut_tensors is None else cut_tensors)
    search = Search(model, mesh, options, tuple(tensors), allowed, workload, cut, tell)
    considered = search.run()
    if mesh.fabric.host_memory is not None and not any(c.plan for c in considered):
        search.spare_host = True
        considered = search.run()
    best = min((c for c in considered if c.plan), key=lambda c: c.seconds, default=None)
    if best is None:
        raise _nothing_fits(search)
    ranked = sorted(considered, key=lambda c: (c is not best, c.options is None, c.seconds))
    judged = [c if c is best else replace(c, why=c.why or _why(c, best)) for c in ranked]
    return Fit(best, tuple(judged), workload)


def _why(lost: Considered, best: Considered) -> str:
    """Why a way that fits is not the best."""
    least = " at least" if lost.plan is None else ""
    return f"{lost.seconds / best.seconds:.2f} times the time{least}: {lost.limit}"


def _nothing_fits(search: Search) -> FitError:
    """The answer when no plan fits, with the largest context of which one does."""
    ctx = largest_context(search)
    if ctx:
        return FitError(
            f"no plan with a context of {search.options.ctx} fits these devices; the largest that"
            f" fits is {ctx} (-c {ctx}).",
            ctx,
        )
    size = sum(t.nbytes for t in search.tensors)
    free = sum(d.free or 0 for d in search.mesh.devices)
    return FitError(
        f"no plan fits these devices with any context: weights take {size} bytes and {free} are"
        " free in all; use a smaller model, a narrower --dtype or more devices."
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
    return any(small.plan(cut).plan is not None for cut in small.cuts())
