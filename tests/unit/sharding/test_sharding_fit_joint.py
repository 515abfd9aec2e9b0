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


def test_states_that_are_many_go_along_with_kv_groups():
    options = Options(Groups((8,), (64,), 3), Grid(1, (1,), 3), [])
    assert (options.groups[0] == 8 * options.groups[1]).all()
    assert set(options.groups[1]) == set(range(9))
    few = Groups((8,), (16,), 3)
    assert not few.tied and few.free == [0, 1]


def test_thresholds_of_fewer_blocks_than_there_are():
    """A search may look at such a cut, which it then finds unfit."""
    assert Grid(12, {9, 8}, 2).thresholds(np.array([[2, 1], [7, 5]])).shape == (2, 2)
