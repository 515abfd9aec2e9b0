"""The mesh: the ordered devices that take part, with what a plan needs to know of each.

A mesh may be virtual (labels and byte counts only), so plans can be made and tested for machines
that are not here. This is the only module that plans rest on which touches jax, and it does so
inside functions.
"""

from __future__ import annotations

import glob
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from sharding.errors import ShardingError
from sharding.fabric import Fabric

_CPU_HINT = (
    "set JAX_NUM_CPU_DEVICES (or jax.config's jax_num_cpu_devices) before JAX's backend starts"
)
_THREADS = 16
_MOST_VIRTUAL = 64


@dataclass(frozen=True)
class DeviceInfo:
    """One device. `memory` and `free` are bytes, `link_gbps` is 1e9 bytes a second from host,
    `read_gbps` those of its own memory, `tflops` 1e12 operations of a matrix product a second."""

    label: str
    platform: str = "cpu"
    kind: str = "cpu"
    memory: int | None = None
    free: int | None = None
    link_gbps: float | None = None
    read_gbps: float | None = None
    tflops: float | None = None


@dataclass(frozen=True)
class Mesh:
    """The devices in order, and the fabric between them; `jax_devices` is None for a mesh that
    exists on paper only."""

    devices: tuple[DeviceInfo, ...]
    jax_devices: tuple[Any, ...] | None = field(default=None, compare=False)
    fabric: Fabric = Fabric()

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", tuple(self.devices))
        if not self.devices:
            raise ShardingError("a mesh has no devices; give it at least one.")
        if self.jax_devices is not None:
            object.__setattr__(self, "jax_devices", tuple(self.jax_devices))
            if len(self.jax_devices) != len(self.devices):
                raise ShardingError(
                    f"a mesh of {len(self.devices)} devices was given {len(self.jax_devices)} jax"
                    " devices; give one each."
                )

    def __len__(self) -> int:
        return len(self.devices)

    @property
    def alike(self) -> bool:
        """Whether all devices have the same platform and kind."""
        return len({(d.platform, d.kind) for d in self.devices}) == 1

    @classmethod
    def virtual(cls, n: int, **kw: Any) -> Mesh:
        """A mesh of `n` equal devices on paper; `kw` are fields of `DeviceInfo`."""
        prefix = kw.pop("label", None) or kw.get("platform", "cpu")
        return cls(tuple(DeviceInfo(f"{prefix}:{i}", **kw) for i in range(_count(n))))

    @classmethod
    def from_jax(cls, devices: int | Sequence[Any] | None = None) -> Mesh:
        """The mesh of devices that JAX has. Starts JAX's backend.

        Args:
            devices: how many of the default platform, from the first; the `jax.Device`s
                themselves; or None for all of the default platform.

        Raises:
            ShardingError: when there are fewer devices, none, or one is named twice.
        """
        import jax

        if devices is None:
            chosen = tuple(jax.devices())
        elif not isinstance(devices, Sequence):
            count, there = _count(devices), jax.devices()
            if count > len(there):
                platform = there[0].platform
                hint = f"; {_CPU_HINT}" if platform == "cpu" else "; ask for fewer"
                raise ShardingError(
                    f"{count} devices were asked for and JAX has {len(there)} of platform"
                    f" {platform}{hint}."
                )
            chosen = tuple(there[:count])
        else:
            chosen = tuple(devices)
            if not chosen or not all(isinstance(d, jax.Device) for d in chosen):
                raise ShardingError(
                    f"devices is {devices!r}; give a number, a list of jax devices, or None."
                )
            if len(set(chosen)) != len(chosen):
                raise ShardingError(
                    f"devices {[str(d) for d in chosen]} name one twice; name each device once."
                )
        return cls(tuple(_describe(d) for d in chosen), chosen)


def host_rates(infos: Sequence[DeviceInfo]) -> list[float]:
    """1e9 bytes a second from host memory to each device, or all the same where any is unknown."""
    rates = [d.link_gbps for d in infos]
    known = [r for r in rates if r is not None and r > 0]
    return known if len(known) == len(rates) else [1.0] * len(rates)


def _count(n: Any) -> int:
    if isinstance(n, bool) or not isinstance(n, Integral) or int(n) < 1:
        raise ShardingError(f"{n!r} devices were asked for; ask for a whole number of at least 1.")
    return int(n)


def _describe(device: Any) -> DeviceInfo:
    stats = device.memory_stats() or {}
    limit, used = stats.get("bytes_limit"), stats.get("bytes_in_use")
    return DeviceInfo(
        label=f"{device.platform}:{device.id}",
        platform=device.platform,
        kind=device.device_kind,
        memory=limit,
        free=None if limit is None or used is None else max(0, limit - used),
    )


def backend_started() -> bool:
    """Whether JAX's backend has started, without starting it."""
    from jax._src import xla_bridge

    probe = getattr(xla_bridge, "backends_are_initialized", None)
    return bool(probe()) if probe is not None else bool(getattr(xla_bridge, "_backends", None))


def _accelerator_expected() -> bool:
    """Whether JAX would find an accelerator: a plugin for one is installed and a device file is
    there."""
    plugin = (
        any(importlib.metadata.entry_points(group="jax_plugins"))
        or importlib.util.find_spec("jax_plugins") is not None
        or importlib.util.find_spec("libtpu") is not None
    )
    files = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/accel[0-9]*", "/dev/vfio/[0-9]*")
    return plugin and any(glob.glob(pattern) for pattern in files)


def ensure_devices(n: int) -> None:
    """Make JAX start with `n` virtual CPU devices, when the CPU is what it will run on.

    Does nothing for one device or when an accelerator is the default platform. Before the backend
    starts it asks for `n` CPU devices and, when NPROC is unset, for a thread pool of at least 16:
    with fewer threads than devices, collectives in flight can dead-lock.

    Raises:
        ShardingError: for more than 64 virtual devices, and when the backend has started with fewer
            CPU devices, or XLA_FLAGS ask for fewer.
    """
    if _count(n) == 1:
        return
    import jax

    if backend_started():
        if jax.default_backend() == "cpu" and len(jax.devices()) < n:
            raise ShardingError(
                f"{n} CPU devices were asked for and JAX has started with {len(jax.devices())};"
                f" {_CPU_HINT}, and NPROC=16."
            )
        return
    platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    if platforms:
        if platforms.split(",")[0].strip() != "cpu":
            return
    elif _accelerator_expected():
        return
    if n > _MOST_VIRTUAL:
        raise ShardingError(
            f"{n} devices were asked for and there is no accelerator here; of a CPU at most"
            f" {_MOST_VIRTUAL} virtual devices are made."
        )
    flag = re.search(
        r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", "")
    )
    if flag:
        # JAX refuses to have both this flag and its own option.
        if int(flag[1]) < n:
            raise ShardingError(
                f"{n} CPU devices were asked for and XLA_FLAGS ask for {flag[1]}; remove"
                " --xla_force_host_platform_device_count from XLA_FLAGS."
            )
    elif jax.config.jax_num_cpu_devices < n:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_num_cpu_devices", n)
    os.environ.setdefault("NPROC", str(max(_THREADS, n)))
