"""What a warm-up of the staged engine has to run once: each way in which pages are grouped.

Between the steps that a warm-up runs, row 0 is given pages of no meaning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING

from jaxllm.cache.groups import group_sizes
from jaxllm.engine.base import frees_on_failure
from jaxllm.engine.folding import folds_size
from sharding import Role

if TYPE_CHECKING:
    from jaxllm.engine.staged import StagedEngine


def rehearse(engine: StagedEngine, chunk: int) -> Iterator[int]:
    """`Engine.rehearse`: the positions at which steps of so many tokens a row are to run."""
    yield 0
    try:
        yield from _groups(engine, chunk)
    finally:
        engine.stages = "together"
    options = engine.plan.options
    if chunk == 1 and 1 < options.tail_pages <= options.ctx // options.page:
        _prefixes(engine)
    engine.release(0)


def _groups(engine: StagedEngine, chunk: int) -> Iterator[int]:
    """Groups of every size, folded in every way."""
    engine.stages, options = "apart", engine.plan.options
    most = options.ubatch + options.tail_pages * options.page
    for small, size in pairwise((1, *group_sizes(options.group_pages))):
        if size * options.page > options.ctx:
            continue
        at_once = size if size * options.page <= most else small  # of those that a chunk fills
        if 1 < at_once < options.ctx // options.page:
            _hold_pages(engine, (1, at_once))  # after a smaller group, one by one
        for part in dict.fromkeys((small, at_once)):
            _hold_pages(engine, (part,) * (size // part))
        yield 0
        for store in engine.stores:  # a group that loses a page is cut
            for layer in range(len(engine.plan.layers)):
                store.trim(layer, 0, options.page)
    if chunk == 1 and engine.kernels:
        every = [size for size in group_sizes(options.group_pages) if folds_size(size, options)]
        sizes = [size for size in every if size * options.page < options.ctx]
        for size in (0, *sizes):
            _hold_pages(engine, sizes[:1] * (size // sizes[0]) if size else (), everywhere=True)
            for engine.stages in ("folding", "together"):
                yield 0


def _prefixes(engine: StagedEngine) -> None:
    """Prefixes that end within the pages that leave a tail together."""
    options = engine.plan.options
    _hold_pages(engine, (1,) * options.tail_pages, everywhere=True)
    engine.floor[0] = options.tail_pages * options.page
    engine.reuse(0, 0, options.page)
    if options.slots > 1:
        engine.reuse(0, 1, options.page)
        engine.release(1)


@frees_on_failure
def _hold_pages(engine: StagedEngine, counts: Sequence[int], everywhere: bool = False) -> None:
    """Let row 0 have so many pages in every layer, or in one of each kind, taken from the tail so
    many at a time, and nothing else; they are joined as for a step."""
    engine.release(0)
    roles: tuple[Role, ...] = ("decoder", "memory")
    for device, (store, model) in enumerate(zip(engine.stores, engine.models, strict=True)):
        for layers in chain.from_iterable(engine.paged(device, r).values() for r in roles):
            kinds = {(model.cfg.layers[i], model.kv_heads[i]): i for i in layers}
            kept = layers if everywhere else kinds.values()
            for before, count in zip(accumulate(counts, initial=0), counts, strict=False):
                first = before * engine.page
                pages = engine.cut(device, layers, 0, first, count)
                store.add(0, first, {i: pages[i] for i in kept})
        store.arrange(0, 1)
