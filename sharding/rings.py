"""How many positions of cache are kept, and where. The engines allocate by these formulas too."""

from __future__ import annotations

from sharding.cache_types import row_bytes
from sharding.options import EngineName, PlanOptions
from sharding.shapes import LayerShape, Role


def ring_positions(
    engine: EngineName, options: PlanOptions, window: int | None = None, role: Role = "decoder"
) -> int:
    """Positions a slot of a layer's ring on the device.

    With L = max(page, ubatch): the fused engine keeps the whole context rounded up to L, for a
    window layer min(ctx, window + ubatch) rounded up; the staged engine keeps a tail of
    min(ctx, as many pages as leave it together + ubatch) rounded up, for every layer. Both keep L
    of a layer of an encoder.
    """
    step = max(options.page, options.ubatch)
    if role == "encoder":
        return step
    if engine == "staged":
        wanted = min(options.ctx, options.page * options.tail_pages + options.ubatch)
    elif window is None:
        wanted = options.ctx
    else:
        wanted = min(options.ctx, window + options.ubatch)
    return -(-wanted // step) * step


def full_pages(options: PlanOptions, window: int | None = None) -> int:
    """Full pages a slot that the staged engine keeps of a layer, at most."""
    pages = pages_left(options, options.ctx)
    return pages if window is None else min(pages, -(-window // options.page) + 1)


def pages_left(options: PlanOptions, position: int) -> int:
    """How many pages of so many positions have left the tail."""
    together = options.page * options.tail_pages
    return position // together * options.tail_pages


def live_pages(options: PlanOptions, position: int, window: int | None = None) -> range:
    """Indexes of the full pages that the query at `position` (with as many earlier ones) reads.

    A query of a window layer sees keys k with position - k < window.
    """
    first = 0 if window is None else max(0, position - window + 1) // options.page
    return range(first, max(first, pages_left(options, position)))


def pages_read(options: PlanOptions, position: int, window: int | None = None) -> int:
    """How many full pages the query at `position` reads."""
    return len(live_pages(options, position, window))


def is_resident(page: int, kept: int, full: int) -> bool:
    """Whether the page of an index stays on the device, `kept` of `full` pages staying.

    Indexes count modulo `full`: of the live pages of a window layer, which are at most that many
    and follow each other, no more than `kept` stay.
    """
    return full > 0 and page % full < kept


def resident_pages(pages: range, kept: int, full: int) -> int:
    """How many of the pages `is_resident` says yes to."""

    def below(stop: int) -> int:
        return stop // full * kept + min(stop % full, kept)

    return below(pages.stop) - below(pages.start) if full and pages else 0


def position_bytes(layer: LayerShape, options: PlanOptions) -> int:
    """Bytes of K and V of one position of one KV group."""
    k = row_bytes(options.cache_type_k, layer.k_dim)
    return k if layer.k_only else k + row_bytes(options.cache_type_v, layer.v_dim)
