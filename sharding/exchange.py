"""Exchange: partials to full sums, by copies between single devices.

No collectives, so no rendezvous: it works across platforms and gives the same bits everywhere. The
order of the sum is device order, always. Up to three contributors send all to all and the consumer
adds; from four on the sum is made once, on the first contributor's device, and sent back.

jax is imported on first use, so that plans need none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, reduce
from operator import add
from typing import TYPE_CHECKING, Any

from sharding.errors import ShardingError

if TYPE_CHECKING:
    import jax

ALL_TO_ALL_LIMIT = 3


@cache
def _sum_in_order() -> Callable[[tuple[jax.Array, ...]], jax.Array]:
    """The one program that adds partials; made once a process."""
    import jax

    def sum_in_order(parts: tuple[jax.Array, ...]) -> jax.Array:
        return reduce(add, parts)

    return jax.jit(sum_in_order)


def _send(x: jax.Array, device: Any) -> jax.Array:
    import jax
    from jax.sharding import SingleDeviceSharding

    # An uncommitted array is already on the device but may be moved by the program that takes it.
    if x.committed and x.sharding == SingleDeviceSharding(device):
        return x
    return jax.device_put(x, SingleDeviceSharding(device))


def exchange(
    partials: Mapping[int, jax.Array], targets: Sequence[int], devices: Sequence[Any]
) -> dict[int, tuple[jax.Array, ...]]:
    """Give each target what it must add up, in order, to have the full sum.

    Args:
        partials: by device index, arrays of one shape, each on its own device.
        targets: indexes of the devices that need the sum.
        devices: the `jax.Device`s of the mesh.

    Returns:
        For each target the arrays, committed to it: all partials in device order for up to three
        contributors, else the one sum.

    Raises:
        ShardingError: when there is no partial.
    """
    if not partials:
        raise ShardingError("nothing to exchange: no device contributes a partial.")
    parts = [partials[i] for i in sorted(partials)]
    if len(parts) > ALL_TO_ALL_LIMIT:
        first = devices[min(partials)]
        parts = [_sum_in_order()(tuple(_send(x, first) for x in parts))]
    return {t: tuple(_send(x, devices[t]) for x in parts) for t in targets}
