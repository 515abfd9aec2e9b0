"""A machine in a TOML file: the mesh of devices that may not be here, with their rates.

[[device]]              # one table a device, or several alike with count
name = "RTX 4070"
count = 1
platform = "cuda"       # cuda, rocm, tpu or cpu
memory_gib = 12
free_gib = 11.2         # what a plan may use (default: all memory)
read_gbps = 504         # 1e9 bytes a second from its own memory
tflops = 29             # 1e12 operations a second of matrix products in the compute type
link_gbps = 24.2        # 1e9 bytes a second from host memory

[exchange]              # between devices; see `sharding.Fabric`
latency_us = 30
gbps = 12
devices_per_host = 8    # of several hosts; the next two are between those
between_latency_us = 60
between_gbps = 25

[host]
dispatch_us = 40        # to start a program
memory_gib = 64         # for caches in host memory
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sharding.errors import PlanError
from sharding.fabric import Fabric
from sharding.mesh import DeviceInfo, Mesh

GIB = 1 << 30
MOST_DEVICES = 4096
MOST = 10**9  # of any figure: more are those of other units, such as bytes
_DEVICE = ("memory_gib", "free_gib", "read_gbps", "tflops", "link_gbps")
_EXCHANGE = ("latency_us", "gbps", "devices_per_host", "between_latency_us", "between_gbps")
_HOST = ("dispatch_us", "memory_gib")
_PLATFORMS = ("cuda", "rocm", "tpu", "cpu")
_UNITS = {
    "gib": "GiB",
    "gbps": "1e9 bytes a second",
    "tflops": "1e12 operations a second",
    "us": "microseconds",
}


def read_machine(path: str | Path) -> Mesh:
    """The mesh of a machine file.

    Raises:
        PlanError: for a file that cannot be read, and an entry that is unknown or out of range.
    """
    path = Path(path)
    try:
        found = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PlanError(f"the machine {str(path)!r} cannot be read: {reason}.") from error
    try:
        return machine(found)
    except PlanError as error:
        raise PlanError(f"the machine {str(path)!r}: {error}") from None


def machine(found: Mapping[str, Any]) -> Mesh:
    """The mesh of a machine as nested mappings; see the module's docstring."""
    tables = found.get("device", [])
    if not isinstance(tables, list) or not tables:
        raise PlanError("no devices; give a [[device]] table for each.")
    _known("the file", found, ("device", "exchange", "host"))
    devices: list[DeviceInfo] = []
    for table in tables:
        devices += _devices(table, len(devices))
    if len(devices) > MOST_DEVICES:
        raise PlanError(f"{len(devices)} devices; give at most {MOST_DEVICES}.")
    exchange, host = found.get("exchange", {}), found.get("host", {})
    _known("[exchange]", exchange, _EXCHANGE)
    _known("[host]", host, _HOST)
    wires = {
        name: _whole("[exchange]", name, value)
        if name == "devices_per_host"
        else _number("[exchange]", exchange, name)
        for name, value in exchange.items()
    }
    memory = _number("[host]", host, "memory_gib")
    fabric = Fabric(
        **wires,  # type: ignore[arg-type]
        dispatch_us=_number("[host]", host, "dispatch_us") or 0.0,
        host_memory=None if memory is None else int(memory * GIB),
    )
    return Mesh(tuple(devices), fabric=fabric)


def _devices(table: Any, first: int) -> list[DeviceInfo]:
    where = f"[[device]] {first}"
    _known(where, table, ("name", "count", "platform", *_DEVICE))
    values = {name: _number(where, table, name) for name in _DEVICE}
    memory, free = values["memory_gib"], values["free_gib"]
    if memory is not None and free is not None and free > memory:
        raise PlanError(f"{where} has free_gib {free} of memory_gib {memory}; give less.")
    count = _whole(where, "count", table.get("count", 1))
    platform = table.get("platform", "cuda")
    if platform not in _PLATFORMS:
        known = ", ".join(_PLATFORMS)
        raise PlanError(f"{where} has platform {platform!r}; it must be one of {known}.")
    name = table.get("name", platform)
    if not isinstance(name, str):
        raise PlanError(f"{where} has name {name!r}; it must be text in quotes.")
    most = memory if free is None else free
    return [
        DeviceInfo(
            label=f"{platform}:{first + i}",
            platform=platform,
            kind=name,
            memory=None if memory is None else int(memory * GIB),
            free=None if most is None else int(most * GIB),
            link_gbps=values["link_gbps"],
            read_gbps=values["read_gbps"],
            tflops=values["tflops"],
        )
        for i in range(count)
    ]


def _known(where: str, table: Any, names: tuple[str, ...]) -> None:
    if not isinstance(table, Mapping):
        raise PlanError(f"{where} is {table!r}; it must be a table.")
    for name in table:
        if name not in names:
            raise PlanError(f"{where} has {name!r}; it may have {', '.join(names)}.")


def _number(where: str, table: Mapping[str, Any], name: str) -> float | None:
    value = table.get(name)
    if value is None:
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    zero = name in ("latency_us", "between_latency_us", "dispatch_us", "free_gib")
    if not number or not (0 < value < float("inf") or (zero and value == 0)):
        least = "of at least 0" if zero else "above 0"
        raise PlanError(f"{where} has {name} {value!r}; it must be a number {least}.")
    if value >= MOST:
        unit = _UNITS[name.rpartition("_")[2]]
        raise PlanError(f"{where} has {name} {value!r}; it is in {unit}, give less than {MOST}.")
    return float(value)


def _whole(where: str, name: str, value: Any) -> int:
    whole = isinstance(value, int | float) and not isinstance(value, bool) and value % 1 == 0
    if not whole or not 1 <= value <= MOST_DEVICES:
        raise PlanError(f"{where} has {name} {value!r}; it must be from 1 to {MOST_DEVICES}.")
    return int(value)
