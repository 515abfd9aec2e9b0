"""What a model takes where no cut fits, in words."""

from __future__ import annotations

from collections.abc import Sequence

from sharding.options import EngineName, PlanOptions
from sharding.rings import position_bytes, ring_positions
from sharding.shapes import ModelShape


def taken(
    model: ModelShape, weights: int, room: int, settings: Sequence[PlanOptions], alone: bool = False
) -> str:
    """Of so many bytes of `room`: the weights and, where these alone are not too much, what the
    cache takes beside them at least under any of the `settings`: the tails of all layers or, with
    the model `alone` on a device, the whole cache where that is less."""
    said = f"weights take {weights} bytes"
    if weights > room:
        return said
    tails, pages = min((_rings(model, each, "staged"), each.tail_pages) for each in settings)
    whole = min(_rings(model, each, "fused") for each in settings)
    if alone and whole <= tails:
        least, cache = whole, f"the cache {whole}"
    else:
        least, cache = tails, f"tails of the cache {tails} (--tail-pages {pages})"
    rest = ", beside what steps compute with," if weights + least <= room else ""
    return f"{said} and {cache}{rest}"


def _rings(model: ModelShape, options: PlanOptions, engine: EngineName) -> int:
    """Bytes of the rings of all layers, of all slots."""
    return options.slots * sum(
        ring_positions(engine, options, shape.window, shape.role)
        * shape.kv_heads
        * position_bytes(shape, options)
        for shape in model.layers
        if shape.has_pages
    )
