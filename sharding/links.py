"""Host links: how fast pages reach a device, measured through the path that delivers them.

A link carries a step's streamed pages, so its rate decides shares, residency and the step's time.
The rate depends on the kind of host memory and on the size of a copy (a small one never fills the
link); both are part of the question.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sharding.errors import PlanError
from sharding.mesh import Mesh
from sharding.units import parse_number

Place = Literal["device", "pinned", "pageable"]
Rates = Mapping[str, float]
_SECONDS = 0.25  # that a measurement takes, once its copies are large enough to time


@dataclass(frozen=True)
class Delivery:
    """How pages are sent: from which memory, in copies of how many bytes, how many at a time."""

    place: Place
    group_bytes: int
    in_flight: int


def places(devices: Sequence[Any]) -> tuple[Place, ...]:
    """Kinds of host memory that every device can be sent pages from, the fastest first."""
    kinds = [{m.kind for m in d.addressable_memories()} for d in devices]
    return ("pinned", "pageable") if all("pinned_host" in k for k in kinds) else ("pageable",)


def host_place(devices: Sequence[Any], pinned: bool | None) -> Place:
    """The kind of host memory to keep pages in: pinned unless refused, where every device has it.

    Raises:
        PlanError: for pinned memory that was asked for and is not there.
    """
    fastest = places(devices)[0]
    if pinned and fastest != "pinned":
        raise PlanError(
            "--kv-pinned needs pinned host memory, which not every device has; drop it."
        )
    return "pageable" if pinned is False else fastest


def host_array(values: Any, place: Place, device: Any) -> Any:
    """`values`, one array or a tree of them, in host memory of `device`: pinned memory that it can
    read itself, or numpy's."""
    import jax
    from jax.sharding import SingleDeviceSharding

    if place == "pinned":
        return jax.device_put(values, SingleDeviceSharding(device, memory_kind="pinned_host"))
    return jax.tree.map(np.array, values)


def deliver(pages: Sequence[Any], device: Any) -> tuple[Any, ...]:
    """Start copying host arrays to a device; the arrays there, ready at some later time."""
    import jax

    return tuple(jax.device_put(list(pages), _memory_of(device)))


@cache
def _memory_of(device: Any) -> Any:
    from jax.sharding import SingleDeviceSharding

    return SingleDeviceSharding(device, memory_kind="device")


class Link:
    """How groups of pages reach one device; a test may put a slower one in its place."""

    def __init__(self, device: Any):
        self.device = device

    def send(self, groups: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
        """Start copying groups of host arrays to the device; the arrays there, by group. Several at
        once take the host little longer than one."""
        there = iter(deliver([page for pages in groups for page in pages], self.device))
        return [tuple(islice(there, len(pages))) for pages in groups]

    def arrived(self, sent: tuple[Any, ...]) -> bool:
        """Whether what `send` gave may be passed to a program. On a real link always: a program
        that is given arrays waits for them on its device."""
        return True


def measure_link(device: Any, how: Delivery) -> float:
    """The rate of one device's link in 1e9 bytes a second, by sending groups of pages to it."""
    pages = host_array(np.zeros(how.group_bytes, np.uint8), how.place, device)
    busy: deque[Any] = deque()

    def send(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            if len(busy) >= max(1, how.in_flight):
                busy.popleft().block_until_ready()
            busy.extend(deliver([pages], device))
        while busy:
            busy.popleft().block_until_ready()
        return time.perf_counter() - began

    send(1)
    once = send(2) / 2
    count = max(4, min(1000, round(_SECONDS / max(once, 1e-6))))
    return how.group_bytes * count / send(count) / 1e9


def measured(
    mesh: Mesh,
    how: Delivery,
    store: Path | None = None,
    measure: Callable[[Any, Delivery], float] = measure_link,
) -> Mesh:
    """The mesh with the link rate of every device that does not tell one.

    Devices are measured one at a time, once: rates are kept in the JSON file `store`, by device,
    kind of memory and size of a copy.
    """
    import jax

    if mesh.jax_devices is None:
        return mesh
    known = dict(read_rates(store))
    devices = []
    for info, device in zip(mesh.devices, mesh.jax_devices, strict=True):
        if info.link_gbps is None:
            settings = (info.label, info.kind, how.place, how.group_bytes, how.in_flight)
            key = " ".join(map(str, (*settings, jax.__version__)))
            if key not in known:
                known[key] = measure(device, how)
                write_rates(store, known)
            info = replace(info, link_gbps=known[key])
        devices.append(info)
    return replace(mesh, devices=tuple(devices))


def with_links(mesh: Mesh, rates: str | Sequence[float]) -> Mesh:
    """The mesh with these link rates, one a device, in 1e9 bytes a second."""
    try:
        values = map(parse_number, rates.split(",")) if isinstance(rates, str) else rates
        numbers = [float(v) for v in values if not isinstance(v, bool)]
    except (TypeError, ValueError):
        numbers = []
    if len(numbers) != len(mesh) or not all(0 < n < float("inf") for n in numbers):
        raise PlanError(
            f"--link-gbps is {rates!r}; give one positive number of GB/s for each of the"
            f" {len(mesh)} devices."
        )
    pairs = zip(mesh.devices, numbers, strict=True)
    return replace(mesh, devices=tuple(replace(d, link_gbps=n) for d, n in pairs))


def read_rates(store: Path | None) -> Rates:
    """The rates that a file holds, none where it is missing or damaged."""
    if store is None:
        return {}
    try:
        known = json.loads(store.read_text("utf-8"))
        return {str(k): float(v) for k, v in known.items() if 0 < float(v) < float("inf")}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}  # missing or damaged: measure again


def write_rates(store: Path | None, known: Rates) -> None:
    """Keep rates in a file, whole or not at all."""
    if store is None:
        return
    try:
        store.parent.mkdir(parents=True, exist_ok=True)
        part = store.with_name(f"{store.name}.{os.getpid()}")
        part.write_text(json.dumps(known, indent=1), "utf-8")
        part.replace(store)
    except OSError:
        return  # a folder that cannot be written to only costs the next process a measurement
