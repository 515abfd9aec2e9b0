"""Partials become the same sums everywhere, by either way."""

from typing import Any

import numpy as np
import pytest

from sharding import ShardingError, exchange

jax = pytest.importorskip("jax")
DEVICES = jax.devices()
needs_four = pytest.mark.skipif(len(DEVICES) < 4, reason="needs four devices")


def partials(contributors: tuple[int, ...]) -> dict[int, Any]:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((len(contributors), 3, 5)).astype(np.float32)
    return {i: jax.device_put(v, DEVICES[i]) for i, v in zip(contributors, values, strict=True)}


@needs_four
@pytest.mark.parametrize("contributors", [(0,), (2,), (1, 0), (3, 1, 2), (0, 1, 2, 3)])
@pytest.mark.parametrize("targets", [(0,), (0, 1, 2, 3), (3, 2)])
def test_sums(contributors, targets):
    made = partials(contributors)
    got = exchange(made, targets, DEVICES)
    assert set(got) == set(targets)
    order = sorted(contributors)
    want = np.asarray(made[order[0]])
    for i in order[1:]:
        want = want + np.asarray(made[i])
    for target, arrays in got.items():
        assert len(arrays) == (len(contributors) if len(contributors) <= 3 else 1)
        for array in arrays:
            assert array.committed
            assert array.devices() == {DEVICES[target]}
        total = np.asarray(arrays[0])
        for array in arrays[1:]:
            total = total + np.asarray(array)
        assert total.tobytes() == want.tobytes()


@needs_four
def test_what_is_already_there_is_not_copied():
    made = partials((0, 1))
    got = exchange(made, (0, 1), DEVICES)
    assert got[0][0] is made[0]
    assert got[1][1] is made[1]


@needs_four
def test_summing_compiles_once():
    from sharding.exchange import _sum_in_order

    program: Any = _sum_in_order()
    exchange(partials((0, 1, 2, 3)), (0,), DEVICES)
    before = program._cache_size()
    exchange(partials((0, 1, 2, 3)), (1, 2), DEVICES)
    assert program._cache_size() == before


def test_nothing_to_exchange():
    with pytest.raises(ShardingError):
        exchange({}, (0,), DEVICES)


def test_an_uncommitted_partial_is_committed():
    got = exchange({0: jax.numpy.ones(2)}, (0,), DEVICES)
    assert got[0][0].committed
