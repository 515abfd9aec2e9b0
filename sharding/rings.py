"""How many positions of cache are kept, and where. The engines allocate by these formulas too."""

from __future__ import annotations

from sharding.cache_types import row_bytes
from sharding.options import EngineName, PlanOptions
from sharding.shapes import LayerShape


def ring_positions(engine: EngineName, options: PlanOptions, window: int | None = None) -> int:
    """Positions a slot of a layer's ring on the device.

    With L = max(page, ubatch): the fused engine keeps the whole context rounded up to L, for a
    window layer min(ctx, window + ubatch) rounded up; the staged engine keeps a tail of
    page + ubatch rounded up, for every layer.
    """
    step = max(options.page, options.ubatch)
    if engine == "staged":
        wanted = options.page + options.ubatch
    elif window is None:
        wanted = options.ctx
    else:
        wanted = min(options.ctx, window + options.ubatch)
    return -(-wanted // step) * step


def full_pages(options: PlanOptions, window: int | None = None) -> int:
    """Full pages a slot that the staged engine keeps of a layer, at most."""
    pages = options.ctx // options.page
    return pages if window is None else min(pages, -(-window // options.page) + 1)


def pages_read(options: PlanOptions, position: int, window: int | None = None) -> int:
    """Full pages that the query at `position` (with as many earlier positions) reads.

    A query of a window layer sees keys k with position - k < window.
    """
    full = position // options.page
    if window is None:
        return full
    first = max(0, position - window + 1) // options.page
    return max(0, full - first)


def position_bytes(layer: LayerShape, options: PlanOptions) -> int:
    """Bytes of K and V of one position of one KV group."""
    k = row_bytes(options.cache_type_k, layer.k_dim)
    return k + row_bytes(options.cache_type_v, layer.v_dim)
