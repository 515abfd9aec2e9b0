"""What lies between devices: the wires of an exchange, and the host thread that starts programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from sharding.errors import PlanError


@dataclass(frozen=True)
class Fabric:
    """Rates that belong to no single device; times are in microseconds.

    Attributes:
        latency_us, gbps: of an exchange between devices of one host; 1e9 bytes a second that a
            device sends or receives.
        devices_per_host: how many devices in mesh order share a host; None: all of them.
        between_latency_us, between_gbps: the same between hosts; unset as inside one.
        dispatch_us: time of the host thread for starting one program.
        shared: the devices are virtual ones of one processor: their computations take turns.
        host_memory: bytes free for caches in host memory; None: not known, no limit.
    """

    latency_us: float = 0.0
    gbps: float = math.inf
    devices_per_host: int | None = None
    between_latency_us: float | None = None
    between_gbps: float | None = None
    dispatch_us: float = 0.0
    shared: bool = False
    host_memory: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), 0.0
            if field.name == "shared" or value is None:
                continue
            if field.name in ("gbps", "between_gbps", "devices_per_host"):
                least = 1e-9
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= least:
                raise PlanError(
                    f"{field.name} of the machine is {value!r}; it must be a number"
                    f" {'above' if least else 'of at least'} 0."
                )

    def hosts(self, devices: Sequence[int]) -> int:
        """How many hosts the devices are in."""
        return len({self.host(i) for i in devices})

    def host(self, device: int) -> int:
        """Which host a device is in."""
        return 0 if self.devices_per_host is None else device // int(self.devices_per_host)

    def copy_seconds(self, devices: Sequence[int], size: float) -> float:
        """Of one copy between two of the devices, over the slowest wire among them."""
        latency, gbps = self._wire(self.hosts(devices) > 1)
        return latency * 1e-6 + size / (gbps * 1e9)

    def exchange_seconds(self, devices: Sequence[int], size: float, collective: bool) -> float:
        """Until every device has the sum of one partial of `size` bytes from each.

        A collective is a ring whose latency grows as a tree's, inside each host first and then
        between hosts. Copies (`sharding.exchange`) go all to all up to three devices, and from four
        on to one of them and back.
        """
        n, hosts = len(devices), self.hosts(devices)
        if n < 2:
            return 0.0
        if not collective:
            latency, gbps = self._wire(hosts > 1)
            turns = 1 if n <= 3 else 2
            return turns * (latency * 1e-6 + (n - 1) * size / (gbps * 1e9))
        return self._ring(-(-n // hosts), size, False) + self._ring(hosts, size, True)

    def _ring(self, n: int, size: float, between: bool) -> float:
        if n < 2:
            return 0.0
        latency, gbps = self._wire(between)
        return 2 * math.ceil(math.log2(n)) * latency * 1e-6 + 2 * (n - 1) / n * size / (gbps * 1e9)

    def _wire(self, between: bool) -> tuple[float, float]:
        latency, gbps = self.latency_us, self.gbps
        if between:
            latency = latency if self.between_latency_us is None else self.between_latency_us
            gbps = gbps if self.between_gbps is None else self.between_gbps
        return latency, gbps
