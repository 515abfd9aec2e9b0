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


class FitError(ShardingError):
    """No plan fits the devices; `largest_ctx` is the largest context for which one does, if any."""

    def __init__(self, message: str, largest_ctx: int | None = None) -> None:
        self.largest_ctx = largest_ctx
        super().__init__(message)


class DoesNotFit(ShardingError):
    """A plan that needs more memory on a device than the device has free.

    `needed` is the bytes that the plan counts there and `free` what was free before, None where the
    device does not tell; `device` is the label of the first device that is too small. `failed` says
    that an allocation has failed: that the plan alone did not tell it.
    """

    def __init__(
        self, device: str, needed: int, free: int | None = None, failed: bool = False
    ) -> None:
        self.device = device
        self.needed = needed
        self.free = free
        self.failed = failed
        has = "" if free is None else f" and has {free} free"
        if failed:
            has = "" if free is None else f" of {free} free"
        what = (
            f"ran out of memory; the plan takes {needed} bytes there"
            if failed
            else (f"needs {needed} bytes")
        )
        super().__init__(
            f"device {device} {what}{has}: lower its share (-ts, -as),"
            " the context (-c) or move the cache to host memory (-nkvo)."
        )

    def bare(self) -> DoesNotFit:
        """The same error without what led to it."""
        return DoesNotFit(self.device, self.needed, self.free, self.failed)

    def __reduce__(self) -> tuple[type[DoesNotFit], tuple[str, int, int | None, bool]]:
        return type(self), (self.device, self.needed, self.free, self.failed)
