"""What one vector of shares gives of unlike totals, against all shares of small whole numbers."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from fit_models import parts

from sharding.fit_joint import Groups, shares_of
from sharding.fit_options import Options
from sharding.fit_units import Grid
from sharding.shares import apportion


@pytest.mark.parametrize(
    ("totals", "devices", "largest"),
    [
        ((4, 2), 3, 10),
        ((4, 3), 3, 14),
        ((5, 4), 4, 14),  # a device without groups of the larger total may have one of the other
        ((16, 4), 2, 24),
        ((4, 3, 2), 3, 14),
        ((6, 4, 3), 3, 24),
        ((8, 6, 4), 2, 24),
        ((5, 4, 3, 2), 2, 24),
    ],
)
def test_roundings_that_shares_give_are_told_from_others(
    totals: tuple[int, ...], devices: int, largest: int
):
    given = {
        tuple(apportion(n, shares) for n in totals)
        for total in range(1, largest + 1)
        for shares in parts(total, devices)
    }
    every = list(product(*[parts(n, devices) for n in totals]))
    groups = Groups(totals, (), devices)
    first, last = groups.cells_of(np.array(every).swapaxes(0, 1))
    told = (first <= last).all(0)
    assert {own for own, possible in zip(every, told, strict=True) if possible} == given
    inside = (last >= groups.first[:, None]) & (first <= groups.last[:, None])
    assert inside[:, told].all()
    options = Options(groups, Grid(1, (1,), devices), [])
    own = {tuple(each) for each in options.groups.T}
    for rows in given:
        assert tuple(apportion(n, shares_of(rows)) for n in totals) == rows
        assert all(tuple(each) in own for each in zip(*rows, strict=True))
        have = [each for each in zip(*rows, strict=True) if any(each)]
        assert all(any(each[u] for u in groups.leading) for each in have)


def test_simple_shares_of_what_is_given():
    assert shares_of([(8, 8), (2, 2)]) == (2, 2)
    assert shares_of([(5, 11), (1, 3)]) == (5, 11)
    assert shares_of([(6, 10), (1, 3)]) == (4, 7)
    assert shares_of([(3, 0, 1)]) == (3, 0, 1)
    assert shares_of([(0, 3, 2), (0, 2, 2)]) == (0, 2, 2)


def test_thresholds_of_blocks():
    """Under them blocks are rounded as they are; fewer than there are, which a search may look at
    and then finds unfit, have some, too."""
    grid = Grid(12, {9, 8}, 2)
    found = grid.thresholds(np.array([[7, 5], [2, 1]]))
    rounded = grid.rounded(np.array([[7, 5]]), grid.offsets(found[:1]))
    assert rounded.tolist() == grid.counts(np.array([[7, 5]])).tolist()
    assert (found[1] >= 0).all()


@pytest.mark.parametrize("totals", [(6, 4), (7, 3), (9, 6, 4), (12, 9, 8)])
@pytest.mark.parametrize("seed", range(5))
def test_most_units_are_those_of_some_thresholds(totals: tuple[int, ...], seed: int):
    """Against all primary units under all offsets between two."""
    rng, grid = np.random.default_rng(seed), Grid(totals[0], totals, 2)
    ends = rng.integers(0, grid.last_thresholds + 1, (2, 4, len(totals) - 1))
    least, largest = (grid.offsets(each)[..., None] for each in (ends.min(0), ends.max(0)))
    units = rng.uniform(0.1, 3, (3, len(totals), 1, 2, 1))  # of limits and totals
    rooms = rng.uniform(-0.1, 1, (3, 4, 2, 5)) * units.sum(1) * totals[0]
    within = rng.integers(-1, totals[0] + 1, (4, 2, 5)).astype(float)
    expected = np.full((len(totals), *within.shape), -1)
    for n, d, o in np.ndindex(within.shape):
        between = zip(least[:, n, d, 0], largest[:, n, d, 0], strict=True)
        for offsets in product(*(range(low, high + 1) for low, high in between)):
            for primary in range(int(within[n, d, o]) + 1):
                counts = grid.rounded(np.array(primary), np.array(offsets))
                if (units[:, :, 0, d, 0] @ counts <= rooms[:, n, d, o]).all():
                    expected[:, n, d, o] = np.maximum(expected[:, n, d, o], counts)
    np.testing.assert_array_equal(grid.most(rooms, units, least, largest, within), expected)
