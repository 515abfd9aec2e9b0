"""Memory that a plan could not know of: the host's, which a CPU shares with host caches, and
allocations that fail nevertheless, as a `DoesNotFit`: other processes, fragmentation, devices that
tell no free bytes, pinned memory that has run out.
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sharding.errors import DoesNotFit, PlanError

if TYPE_CHECKING:
    from sharding.plan import Plan

PINNED_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
PINNED_DEFAULT = 64 << 30  # bytes, where that variable is not set


def exhausted(error: BaseException) -> bool:
    """Whether an exception is the backend's word for memory that it could not get."""
    # `jax.errors.JaxRuntimeError` has a message and no code.
    return isinstance(error, RuntimeError) and str(error).startswith("RESOURCE_EXHAUSTED")


def host_free() -> int | None:
    """Bytes of host memory that are free or can be freed; None where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def check_host(plan: Plan) -> None:
    """`PlanError` when host memory has less than a plan needs of it: host caches, and all that
    devices take that are the host's own processor. A machine on paper has no host to ask."""
    if plan.mesh.jax_devices is None:
        return
    free, devices = host_free(), range(len(plan.mesh))
    needed = sum(plan.cache_bytes(i)["host"] for i in devices)
    needed += sum(plan.needed_bytes(i) for i in devices if plan.mesh.devices[i].platform == "cpu")
    if free is not None and needed > free:
        raise PlanError(
            f"the plan takes {needed} bytes of host memory and {free} are free; lower the context"
            " (-c), the sequences (-np), -ub, --page or --tail-pages."
        )


@contextmanager
def memory_of(plan: Plan, device: int | Callable[[], int | None] | None = None) -> Iterator[None]:
    """Turn a failed allocation within into `DoesNotFit` of a device, which may be told when it has
    failed; of None: of the device that the backend names, or else that with the least free."""
    refused = None
    try:
        yield
    except RuntimeError as error:
        if not exhausted(error):
            raise
        found = device() if callable(device) else device
        refused = _does_not_fit(plan, _device_of(plan, str(error)) if found is None else found)
    if refused is not None:
        raise refused


def free_frames() -> None:
    """Free what only the frames of a failure held. To be called when no one refers to its exception
    any more: frames and exceptions refer to each other, so arrays in them would live on."""
    gc.collect()


def _does_not_fit(plan: Plan, device: int) -> DoesNotFit:
    info = plan.mesh.devices[device]
    return DoesNotFit(info.label, plan.needed_bytes(device), info.free, failed=True)


def _device_of(plan: Plan, message: str) -> int:
    used = plan.used_devices
    devices = plan.mesh.jax_devices or ()
    named = re.search(r"device ordinal (\d+)", message)
    for i in used if named and devices else ():
        if devices[i].platform != "cpu" and devices[i].local_hardware_id == int(named[1]):  # type: ignore[index]
            return i
    return min(used, key=lambda i: _free(devices[i]) if devices else 0.0)


def _free(device: Any) -> float:
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats or "bytes_in_use" not in stats:
        return float("inf")
    return stats["bytes_limit"] - stats["bytes_in_use"]
