"""Which of nearly equal plans a fit chooses: the simplest of those that are as fast as makes no
difference, for predictions are not that good."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

from sharding.fit_kinds import LAYERS
from sharding.fit_search import CLOSE, DEFAULT, Considered, Search, Way
from sharding.options import PlanOptions

TIE = 0.005  # plans that take longer than the fastest by less than this are as good
_MODES = "none", "layer", "tensor"
_WORDS = (
    "the cache is on the devices",
    "fewer devices",
    "fewer exchanges",
    "cache types that come first",
    "the default -ub",
    "the default --prefetch",
)
Key = tuple[int, ...]


def choose(search: Search, fastest: Considered) -> Considered:
    """The simplest plan that takes no longer than the fastest but for a tie, with what makes it
    simpler."""
    limit = fastest.seconds * (1 + TIE)
    plan = fastest.plan
    assert plan is not None
    device = plan.options.kv == "device"
    own = _key(search, plan.options, device, len(plan.used_devices))
    variants = sorted(_variants(search, limit), key=lambda pair: pair[0])
    simpler = [pair for pair in variants if pair[0] < own]
    for key, ways in groupby(enumerate(simpler), lambda pair: pair[1][0]):
        goal, best = limit, None
        for i, (_, way) in ways:
            search.tell("simpler plans", i, len(simpler))
            way.find(goal)
            if way.cut is not None:
                goal, best = way.seconds * (1 - CLOSE), way
        found = None if best is None else search.plan(best)
        if found is None or found.plan is None or found.seconds > limit:
            continue
        # As one program, with all of its cache, a model on one device may not fit.
        if found.plan.options.kv == "device" or key[0]:
            first = next(i for i, (a, b) in enumerate(zip(key, own, strict=True)) if a != b)
            why = f"within {100 * TIE:g} % of the fastest, simpler: {_WORDS[first]}"
            return replace(found, why=why)
    return fastest


def _key(search: Search, options: PlanOptions, device: bool, devices: int) -> Key:
    """What is simpler has a smaller one."""
    types = options.cache_type_k, options.cache_type_v
    return (
        not device,
        devices,
        _MODES.index(options.split_mode),
        search.allowed.cache_types.index(types),
        options.ubatch != DEFAULT.ubatch,
        options.prefetch != DEFAULT.prefetch,
    )


def _variants(search: Search, limit: float) -> Iterator[tuple[Key, Way]]:
    """All ways that may keep the limit, with all of the cache on the devices and without that."""
    for way in (way for ways in search.ways for way in ways if way.proved <= limit):
        counts = [1] if way.kind.mode == "none" else [way.kind.n]
        if way.kind == LAYERS:
            counts = list(range(2, len(search.mesh) + 1))
        for devices in counts:
            for device in (True, False):
                options = replace(way.options, split_mode=way.kind.mode)
                fresh = replace(way, resident=device, most=devices, cut=None)
                yield _key(search, options, device, devices), fresh
