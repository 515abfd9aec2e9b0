"""Shares: reading them, and turning them into whole units a device.

Invariants of every function that apportions: one count a device, counts are non-negative and sum to
what was asked exactly, and a device whose share is zero gets nothing. Quotas are computed in exact
rational arithmetic on the decimal value of each share, so a tie is a tie.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

from sharding.errors import ShareError
from sharding.units import parse_number


def parse_shares(
    value: str | Sequence[float] | None, devices: int, argument: str
) -> tuple[float, ...] | None:
    """Read shares, exactly one a device.

    Args:
        value: text such as "2,1,0", a sequence of numbers, or None for "not given".
        devices: how many devices there are.
        argument: what the user called it, for the message, such as "--tensor-split/-ts".

    Returns:
        One float a device, or None for None.

    Raises:
        ShareError: for a share that is not a finite non-negative number, for shares that are all
            zero and for any other count than one a device.
    """
    if value is None:
        return None
    fields: list[object]
    if isinstance(value, str):
        fields = list(value.split(","))
    else:
        try:
            fields = list(() if isinstance(value, bytes) else value)
        except TypeError:
            raise ShareError(
                f"{argument}: {value!r} is not a list of shares; give one number a device, such as"
                " 2,1."
            ) from None
    shares = tuple(_one_share(field, value, argument) for field in fields)
    if len(shares) != devices:
        raise ShareError(
            f"{argument}: {value!r} has {len(shares)} shares for {devices} devices; give exactly"
            " one a device, 0 for a device that is to take no part."
        )
    if not any(shares):
        raise ShareError(f"{argument}: {value!r} is zero everywhere; give one device at least > 0.")
    return shares


def _one_share(field: object, value: object, argument: str) -> float:
    number: float
    try:
        if isinstance(field, str):
            number = parse_number(field)
        elif type(field).__name__ in ("bool", "bool_"):
            raise ValueError(field)
        else:
            number = float(field)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError, OverflowError):
        raise ShareError(
            f"{argument}: {field!r} in {value!r} is not a number; give one number a device, such as"
            " 2,1."
        ) from None
    if not math.isfinite(number) or number < 0:
        raise ShareError(
            f"{argument}: {field!r} in {value!r} is not a finite number of at least 0; give one"
            " such number a device."
        )
    return number + 0.0


@lru_cache(1024)
def _whole(shares: tuple[float, ...]) -> tuple[int, ...]:
    """Whole numbers in the same proportions. The shortest decimal form is what was typed: .1 is
    1/10."""
    exact = [Fraction(repr(float(s))) for s in shares]
    if sum(exact) <= 0 or min(exact) < 0:
        raise ShareError(f"shares {shares!r} must be non-negative and not all zero.")
    common = math.lcm(*(s.denominator for s in exact))
    return tuple(int(s * common) for s in exact)


def _check_count(name: str, n: int) -> None:
    if n < 0:
        raise ShareError(f"{name} is {n}; it counts units and must be at least 0.")


def apportion(units: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Split `units` whole units by largest remainder (Hamilton's method).

    Every device gets the floor of its quota; the units left go to the largest remainders, ties to
    the lower device index.
    """
    _check_count("units", units)
    whole = _whole(tuple(shares))
    total = sum(whole)
    counts = [units * n // total for n in whole]
    order = sorted(range(len(whole)), key=lambda i: (-(units * whole[i] % total), i))
    for i in order[: units - sum(counts)]:
        counts[i] += 1
    return tuple(counts)


def apportion_blocks(size: int, block: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Split `size` columns in whole blocks of `block`; `size % block` goes to the largest share."""
    _check_count("size", size)
    if block < 1:
        raise ShareError(f"block is {block}; it must be at least 1.")
    counts = [block * n for n in apportion(size // block, shares)]
    whole = _whole(tuple(shares))
    counts[whole.index(max(whole))] += size % block
    return tuple(counts)


def apportion_dithered(
    units_per_layer: Sequence[int], shares: Sequence[float]
) -> list[tuple[int, ...]]:
    """Split each layer's units so that the whole model follows the request.

    A layer's count is the floor or the ceiling of its quota, and a device's sum over layers is
    within one unit of its quota over all layers: the model-wide mean share is within
    1 / (layers * units) of the request. Layers are rounded in order, each giving its spare units
    to the devices that are furthest behind; ties go to the lower device index.
    """
    whole = _whole(tuple(shares))
    parts = [Fraction(n, sum(whole)) for n in whole]
    rows: list[list[int]] = []
    quotas: list[list[Fraction]] = []
    behind = [Fraction(0)] * len(parts)
    for units in units_per_layer:
        _check_count("units", units)
        quota = [units * p for p in parts]
        count = [math.floor(q) for q in quota]
        behind = [b + q - n for b, q, n in zip(behind, quota, count, strict=True)]
        may_round_up = [i for i in range(len(parts)) if count[i] < quota[i]]
        may_round_up.sort(key=lambda i: (-behind[i], i))
        for i in may_round_up[: units - sum(count)]:
            count[i] += 1
            behind[i] -= 1
        rows.append(count)
        quotas.append(quota)
    _settle(rows, quotas, behind)
    return [tuple(row) for row in rows]


def _settle(rows: list[list[int]], quotas: list[list[Fraction]], behind: list[Fraction]) -> None:
    """Move roundings between devices until each device's sum is within one unit of its quota.

    Rounding in order can leave a device a full unit off when layers differ. A rounding that meets
    both the layers and the sums always exists (a flow with integer capacities), so a chain of
    swaps, each inside one layer, from a device ahead to one behind is found by breadth-first
    search.
    """
    devices = range(len(behind))

    def layer_to_swap(a: int, b: int) -> int | None:
        for layer, (row, quota) in enumerate(zip(rows, quotas, strict=True)):
            if row[a] > quota[a] and row[b] < quota[b]:
                return layer
        return None

    while max(map(abs, behind), default=Fraction(0)) >= 1:
        worst = max(devices, key=lambda i: (abs(behind[i]), -i))
        sign = 1 if behind[worst] > 0 else -1
        came: dict[int, tuple[int, int]] = {worst: (worst, -1)}
        queue = [worst]
        end = None
        while queue and end is None:
            here = queue.pop(0)
            for there in devices:
                if there in came:
                    continue
                pair = (there, here) if sign > 0 else (here, there)
                layer = layer_to_swap(*pair)
                if layer is None:
                    continue
                came[there] = (here, layer)
                queue.append(there)
                if sign * behind[there] < 0:
                    end = there
                    break
        if end is None:
            return
        behind[worst] -= sign
        behind[end] += sign
        while end != worst:
            here, layer = came[end]
            rows[layer][end] -= sign
            rows[layer][here] += sign
            end = here
