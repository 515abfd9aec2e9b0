"""Reading shares and every rounding rule, as properties and by worked examples."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharding import (
    ShareError,
    apportion,
    apportion_blocks,
    apportion_dithered,
    attention_granularity,
    llama_cpp_cut,
    llama_cpp_heads,
    mlp_granularity,
    parse_shares,
)

SHARE = st.one_of(st.just(0.0), st.integers(1, 9).map(float), st.floats(0.01, 100))
SHARES = st.lists(SHARE, min_size=1, max_size=8).filter(any)
UNITS = st.integers(0, 300)
NAME = "--tensor-split/-ts"


def quotas(units: int, shares: list[float]) -> list[Fraction]:
    exact = [Fraction(repr(s)) for s in shares]
    return [units * s / sum(exact) for s in exact]


@pytest.mark.parametrize(
    ("value", "devices", "expect"),
    [
        ("2,1,0", 3, (2.0, 1.0, 0.0)),
        (" 2 , 1 ", 2, (2.0, 1.0)),
        ("1e1,.5", 2, (10.0, 0.5)),
        ([3, 1], 2, (3.0, 1.0)),
        ((0.5,), 1, (0.5,)),
        (np.array([1, 2]), 2, (1.0, 2.0)),
        ("1,1,1,1", 4, (1.0,) * 4),
        (None, 4, None),
    ],
)
def test_shares_are_read(value, devices, expect):
    assert parse_shares(value, devices, NAME) == expect


@pytest.mark.parametrize(
    "value",
    [
        "1,1,1",
        "1,1,1,1,1",
        "1,nan,1,1",
        "-1,2,1,1",
        "1x,1,1,1",
        "0,0,0,0",
        "",
        "1,,1,1",
        "inf,1,1,1",
    ]
    + ["1,1,1,", "1_0,1,1,1", "1 2,1,1,1", "1e999,1,1,1", "0x1,1,1,1", "1;1;1;1"]
    + [[1, 1, 1], [1] * 5, [True, 1, 1, 1], [np.True_, 1, 1, 1], [None, 1, 1, 1], [], 4, [0.0] * 4]
    + [
        [float("nan"), 1, 1, 1],
        [float("inf"), 1, 1, 1],
        [-1, 2, 1, 1],
        [1j, 1, 1, 1],
        [[1], 1, 1, 1],
    ]
    + [[10**400, 1, 1, 1]],
)
def test_bad_shares_are_errors_that_name_the_argument_and_the_value(value):
    with pytest.raises(ShareError) as error:
        parse_shares(value, 4, NAME)
    message = str(error.value)
    assert NAME in message
    assert repr(value) in message
    assert "\n" not in message


@settings(deadline=None)
@given(UNITS, SHARES)
def test_apportion(units, shares):
    counts = apportion(units, shares)
    assert sum(counts) == units
    for n, quota, share in zip(counts, quotas(units, shares), shares, strict=True):
        assert math.floor(quota) <= n <= math.ceil(quota)
        assert share > 0 or n == 0


@settings(deadline=None)
@given(UNITS, SHARES)
def test_apportion_gives_spare_units_to_the_largest_remainders_ties_to_the_lower(units, shares):
    counts = apportion(units, shares)
    rest = [
        (q - math.floor(q), n - math.floor(q))
        for q, n in zip(quotas(units, shares), counts, strict=True)
    ]
    for i, (a, got_a) in enumerate(rest):
        for j, (b, got_b) in enumerate(rest):
            if a > b or (a == b and i < j):
                assert got_a >= got_b


@settings(deadline=None)
@given(UNITS, SHARES, st.randoms(use_true_random=False))
def test_apportion_follows_the_devices_when_remainders_differ(units, shares, random):
    remainders = [q - math.floor(q) for q in quotas(units, shares)]
    if len(set(remainders)) < len(remainders):
        return
    order = list(range(len(shares)))
    random.shuffle(order)
    moved = apportion(units, [shares[i] for i in order])
    counts = apportion(units, shares)
    assert moved == tuple(counts[i] for i in order)


@settings(deadline=None)
@given(UNITS, SHARES, st.integers(1, 1000))
def test_apportion_does_not_depend_on_the_scale_of_shares(units, shares, factor):
    whole = [float(math.ceil(s)) for s in shares]
    assert apportion(units, whole) == apportion(units, [s * factor for s in whole])


@pytest.mark.parametrize(
    ("units", "shares", "expect"),
    [
        (4, (0.1, 0.1, 0.1), (2, 1, 1)),
        (2, (0.1, 0.3), (1, 1)),
        (2, (0.3, 0.1), (2, 0)),
        (130, (1, 1, 1), (44, 43, 43)),
        (8, (55, 45), (4, 4)),
        (4, (1, 1, 1), (2, 1, 1)),
        (4, (1,) * 5, (1, 1, 1, 1, 0)),
        (1, (1, 1), (1, 0)),
        (0, (1, 1), (0, 0)),
        (3, (0, 1, 0), (0, 3, 0)),
    ],
)
def test_apportion_by_hand(units, shares, expect):
    assert apportion(units, shares) == expect


@settings(deadline=None)
@given(st.integers(0, 5000), st.sampled_from([1, 32, 64, 256]), SHARES)
def test_apportion_blocks(size, block, shares):
    counts = apportion_blocks(size, block, shares)
    assert sum(counts) == size
    largest = shares.index(max(shares))
    for i, n in enumerate(counts):
        assert shares[i] > 0 or n == 0
        assert (n - size % block if i == largest else n) % block == 0


def test_apportion_blocks_by_hand():
    assert apportion_blocks(704, 32, (1, 1)) == (352, 352)
    assert apportion_blocks(100, 32, (1, 2)) == (32, 68)
    assert apportion_blocks(100, 32, (1, 1)) == (68, 32)
    assert apportion_blocks(20, 32, (0, 1, 1)) == (0, 20, 0)


@settings(deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=24), SHARES)
def test_dithering_follows_the_request_over_the_model(units, shares):
    rows = apportion_dithered(units, shares)
    for n, row in zip(units, rows, strict=True):
        assert sum(row) == n
        for count, quota, share in zip(row, quotas(n, shares), shares, strict=True):
            assert math.floor(quota) <= count <= math.ceil(quota)
            assert share > 0 or count == 0
    for i, quota in enumerate(quotas(sum(units), shares)):
        assert abs(sum(row[i] for row in rows) - quota) < 1


def test_dithering_repairs_sums_that_rounding_in_order_leaves_a_unit_off():
    from sharding import shares as module

    half = [Fraction(1, 2)] * 2
    rows, behind = [[1, 0], [1, 0]], [Fraction(-1), Fraction(1)]
    module._settle(rows, [half, half], behind)
    assert [sum(column) for column in zip(*rows, strict=True)] == [1, 1]
    assert behind == [0, 0]


@pytest.mark.parametrize("shares", [(0.49, 0.51), (55, 45)])
def test_dithering_of_sixteen_layers_of_four(shares):
    rows = apportion_dithered([4] * 16, shares)
    for i, share in enumerate(shares):
        mean = sum(row[i] for row in rows) / 64
        assert abs(mean - share / sum(shares)) <= 1 / 64
    assert len(set(rows)) == 2


@pytest.mark.parametrize(
    ("heads", "q_per_kv", "gated", "shares", "expect"),
    [
        (8, 4, False, (55, 45), [(4, 4), (5, 3)]),
        (8, 4, False, (60, 40), [(4, 4), (5, 3)]),
        (8, 4, False, (1, 1, 1), [(2, 3, 3), (3, 2, 3)]),
        (8, 4, False, (0.9, 0.1), [(7, 1), (8, 0)]),
        (4, 6, True, (0.75, 0.25), [(3, 1), (3, 1)]),
        (4, 6, True, (0.70, 0.30), [(2, 2), (3, 1)]),
        (4, 6, True, (0.49, 0.51), [(1, 3), (2, 2)]),
        (3, 3, False, (0.33, 0.67), [(0, 3), (1, 2)]),
    ],
)
def test_llama_cpp_heads(heads, q_per_kv, gated, shares, expect):
    k_dim = 64 if heads == 3 else 128
    for layer, counts in enumerate(expect):
        rotation = layer % len(shares)
        cut = llama_cpp_heads(heads, q_per_kv, k_dim, shares, rotation, 32, gated)
        assert cut == counts
        assert llama_cpp_cut(heads, 1, shares, rotation) == counts


def test_llama_cpp_mlp():
    assert mlp_granularity(32) == 128
    assert mlp_granularity(256) == 256
    assert mlp_granularity(1) == 128
    assert llama_cpp_cut(704, mlp_granularity(32), (1, 1), 0) == (256, 448)
    assert llama_cpp_cut(704, mlp_granularity(32), (1, 1), 1) == (448, 256)


def test_llama_cpp_attention_granularity():
    assert attention_granularity(4, 128, 2, 32) == 1
    assert attention_granularity(3, 64, 2, 32) == 2  # lcm(192, 128) = 2 * 192
    assert attention_granularity(3, 64, 8, 1) == 1  # 32 * 8 reaches 192: lcm(192, 32)
    assert attention_granularity(3, 64, 1, 256) == 4  # lcm(192, 256)
    assert attention_granularity(3, 64, 2, 32, gated_q=True) == 1


@settings(deadline=None)
@given(UNITS, st.integers(1, 40), SHARES, st.integers(0, 20))
def test_llama_cpp_cut(units, granularity, shares, rotation):
    counts = llama_cpp_cut(units, granularity, shares, rotation)
    assert sum(counts) == units
    assert min(counts) >= 0
    assert all(n == 0 for n, s in zip(counts, shares, strict=True) if s == 0)
    assert sum(n % granularity > 0 for n in counts) <= 1
    assert counts == llama_cpp_cut(units, granularity, shares, rotation + len(shares))
