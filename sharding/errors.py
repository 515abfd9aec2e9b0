"""Errors of the sharding package.

Every message is one sentence that names the argument or value at fault and the way out. All are
`ValueError`s, so a caller that knows nothing of this package still catches them sensibly.
"""

from __future__ import annotations


class ShardingError(ValueError):
    """Base of every error that this package raises on purpose."""


class ShareError(ShardingError):
    """A list of shares that cannot be used."""


class PlanError(ShardingError):
    """A plan that cannot be made from what was asked."""


class DoesNotFit(ShardingError):
    """A plan that needs more memory on a device than the device has free.

    `needed` and `free` are bytes; `device` is the label of the first device that is too small.
    """

    def __init__(self, device: str, needed: int, free: int) -> None:
        self.device = device
        self.needed = needed
        self.free = free
        super().__init__(
            f"device {device} needs {needed} bytes and has {free} free: lower its share (-ts, -as),"
            " the context (-c) or move the cache to host memory (-nkvo)."
        )

    def __reduce__(self) -> tuple[type[DoesNotFit], tuple[str, int, int]]:
        return type(self), (self.device, self.needed, self.free)
