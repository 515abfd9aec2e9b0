"""Distributions of groups against all that there are."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from sharding.fit_distribute import Distribution
from sharding.fit_joint import Groups
from sharding.fit_options import Options
from sharding.fit_terms import Effort
from sharding.fit_units import Grid, LayerSet

BOXES = 400
NONE = frozenset[int]()


def sets() -> list[LayerSet]:
    """Layers whose mixers have few groups, with MLPs, and the mixers of either kind alone."""
    few, many, mlps = frozenset({1}), frozenset({0}), frozenset({0})
    return [LayerSet(few, mlps), LayerSet(many, NONE), LayerSet(few, NONE)]


@pytest.mark.parametrize("counted", ["at once", "at last", "never"])
@pytest.mark.parametrize(("seed", "devices", "n"), [(0, 3, 2), (1, 3, 3), (2, 4, 3), (3, 4, 4)])
def test_a_distribution_is_found_where_there_is_one(
    seed: int, devices: int, n: int, counted: str, monkeypatch: pytest.MonkeyPatch
):
    """Also where units of the larger total are paid for. Where they are never counted, a box may be
    left open, with options that do not have all units."""
    if counted != "at once":
        monkeypatch.setattr("sharding.fit_sums.AT_ONCE", 0)
    if counted == "never":
        monkeypatch.setattr("sharding.fit_sums.AT_LAST", 0)
    random = np.random.default_rng(seed)
    mixers, mlps = Groups((4, 2), (), devices), Grid(6, (6,), devices)
    options = Options(mixers, mlps, sets())
    count = options.groups.shape[1]
    worth = random.integers(0, 5, (BOXES, devices, count)).astype(float)
    worth[random.random(worth.shape) < 0.3] = -np.inf
    most = random.integers(1, n + 1, (BOXES, len(sets())))
    best = np.full(BOXES, -np.inf)
    for taken in product(range(-1, count), repeat=devices):
        used = [(d, o) for d, o in enumerate(taken) if o >= 0]
        own = [o for _, o in used]
        if len(used) == n and (options.groups[:, own].sum(1) == mixers.totals).all():
            keeps = (options.takes[:, own].sum(1) <= most).all(1)
            total = sum(worth[:, d, o] for d, o in used)
            best = np.where(keeps, np.maximum(best, total), best)
    some = np.isfinite(best)
    least = np.where(some, best, 1) + random.integers(0, 2, BOXES)
    found, chosen = Distribution(options, mixers, n, Effort()).best(worth, most, least)
    assert some.any() and not some.all()
    assert found[best >= least].all()
    if counted == "never":
        assert (found & (best < least)).sum() < 0.1 * BOXES
        return
    assert not found[best < least].any()
    for box, own in zip(np.flatnonzero(found), chosen, strict=True):
        used = own[own >= 0]
        assert len(used) == n
        assert (options.groups[:, used].sum(1) == mixers.totals).all()
        assert (options.takes[:, used].sum(1) <= most[box]).all()
        assert worth[box, own >= 0, used].sum() == best[box]
