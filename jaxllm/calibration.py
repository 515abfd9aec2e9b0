"""The rates of this machine's devices, by a short measurement through the project's own forms.

A device's memory rate is that of one-row products, which is what a decode step does; its matmul
rate that of a chunk's products; exchanges are those of `sharding.exchange`, and the host thread's
time is that of one call of a compiled program. Rates are measured once and kept in a file beside
those of links, by device, dtype and jax version.

`measure_limits` tells what the first device can do at most, in any form. Measured speed is held
against that; predictions are made from the rates above.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.models.layers import linear
from jaxllm.progress import Tell, silent, telling
from jaxllm.runtime import links_file, rates_file
from sharding import Fabric, Mesh, exchange
from sharding.links import (
    Delivery,
    Place,
    host_place,
    measure_link,
    measured,
    read_rates,
    write_rates,
)
from sharding.memory import host_free

ROWS = 512  # of a chunk
SIZE = {"cpu": (4096, 8192)}  # of the weights that are multiplied with; 128 MiB of float32
LARGE = (8192, 16384)
CALLS = 16  # products of an accelerator in one program: the host starts it once
SMALL_BYTES, LARGE_BYTES = 1 << 12, 1 << 24  # of a partial


@dataclass(frozen=True)
class Limits:
    """Of the first device: 1e9 bytes a second that it reads from its memory, 1e9 operations a
    second of products in the model's type, and 1e9 bytes a second of its host link, where pages
    cross it."""

    read_gb_s: float
    matmul_gflop_s: float
    link_gb_s: float | None


def calibrated_mesh(mesh: Mesh, dtype: str, tell: Tell = silent) -> Mesh:
    """The mesh with rates of its devices, links and exchange, those that it tells kept; one without
    jax devices as it is. CPU devices get what memory the host has free, in equal parts, and all the
    same rates. `tell` is told of everything that is measured, before it is."""
    devices = mesh.jax_devices
    if devices is None:
        return mesh
    mesh = _with_memory(mesh)
    place = host_place(devices, None)
    mesh = measured(mesh, Delivery(place, LARGE_BYTES, 4), links_file(), telling(tell))
    labels = " ".join(f"{d.label} {d.kind}" for d in mesh.devices)
    key = f"{labels} {dtype} {jax.__version__}"
    known = read_rates(rates_file())
    names = _names(len(devices))
    if any(f"{key} {name}" not in known for name in names):
        found = measure_rates(mesh, dtype, tell)
        known = {**known, **{f"{key} {name}": float(found[name]) for name in names}}
        write_rates(rates_file(), known)
    rates = {name: known[f"{key} {name}"] for name in names}
    shared = len(devices) > 1 and all(d.platform == "cpu" for d in devices)
    if shared:  # one processor: what its devices differ by is how busy it was
        for kind in ("read_gbps", "tflops"):
            each = [f"{kind} {i}" for i in range(len(devices))]
            rates |= dict.fromkeys(each, median(rates[name] for name in each))
    infos = (
        replace(
            info,
            read_gbps=info.read_gbps or rates[f"read_gbps {i}"],
            tflops=info.tflops or rates[f"tflops {i}"],
        )
        for i, info in enumerate(mesh.devices)
    )
    fabric = replace(
        mesh.fabric,
        dispatch_us=rates["dispatch_us"],
        latency_us=rates.get("latency_us", 0.0),
        gbps=rates.get("gbps", float("inf")),
        shared=shared,
    )
    return replace(mesh, devices=tuple(infos), fabric=fabric)


def measure_rates(mesh: Mesh, dtype: str, tell: Tell = silent) -> dict[str, float]:
    """Rates of all devices of a mesh, one at a time, and of exchanges between the first two."""
    devices = list(mesh.jax_devices or ())
    tell("the call of a program")
    found = {"dispatch_us": 1e6 * _dispatch(devices[0])}
    for i, device in enumerate(devices):
        tell(f"products in {dtype} on {mesh.devices[i].label}")
        found[f"read_gbps {i}"], found[f"tflops {i}"] = _products(device, dtype)
    if len(devices) > 1:
        tell("an exchange between two devices")
        small, large = (_exchange(devices[:2], size) for size in (SMALL_BYTES, LARGE_BYTES))
        found["latency_us"] = 1e6 * small
        found["gbps"] = (LARGE_BYTES - SMALL_BYTES) / max(large - small, 1e-9) / 1e9
    return found


def _names(devices: int) -> list[str]:
    names = ["dispatch_us", *(["latency_us", "gbps"] if devices > 1 else [])]
    return names + [f"{kind} {i}" for i in range(devices) for kind in ("read_gbps", "tflops")]


def measure_limits(devices: Sequence[Any], dtype: str, place: Place | None) -> Limits:
    """The best of five each; links are measured from `place`, a kind of host memory, if given.

    Reading is the better of a sum and a matrix-vector product over an array no cache holds; which
    of them XLA makes fast differs by platform. An accelerator is given several calls at a time, so
    that it never waits for the host.
    """
    on_cpu = devices[0].platform == "cpu"
    calls = 1 if on_cpu else 8

    def best(fn: Callable[..., Any], *operands: Any) -> float:
        jitted = jax.jit(fn)
        return _seconds(lambda: [jitted(*operands) for _ in range(calls)], min) / calls

    with jax.default_device(devices[0]):
        rows = 1 << (13 if on_cpu else 16)
        large, vector = jnp.ones((rows, 1 << 13)), jnp.ones(1 << 13)
        read = large.nbytes / min(best(jnp.sum, large), best(jnp.matmul, large, vector))
        size = 2048 if on_cpu else 8192
        square = jnp.ones((size, size), dtype)
        with jax.default_matmul_precision("highest"):
            flops = 2 * size**3 / best(jnp.matmul, square, square)
    link = None if place is None else measure_link(devices[0], Delivery(place, 64 << 20, 4))
    return Limits(read / 1e9, flops / 1e9, link)


def _seconds(run: Callable[[], Any], pick: Callable[[list[float]], float] = median) -> float:
    """Of the median of five runs, after one to compile; `pick` chooses another."""
    jax.block_until_ready(run())
    spent = []
    for _ in range(5):
        began = time.perf_counter()
        jax.block_until_ready(run())
        spent.append(time.perf_counter() - began)
    return pick(spent)


def _products(device: Any, dtype: str) -> tuple[float, float]:
    """1e9 bytes a second of one-row products, 1e12 operations a second of a chunk's."""
    rows, columns = SIZE.get(device.platform, LARGE)
    calls = 1 if device.platform == "cpu" else CALLS

    @jax.jit
    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        y = linear(x, w)
        for _ in range(calls - 1):
            y = linear(x + y[..., :1], w)
        return y

    with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
        w = jax.device_put(np.ones((rows, columns), jnp.dtype(dtype)), device)
        one, many = (
            jax.device_put(np.ones((1, n, columns), jnp.dtype(dtype)), device) for n in (1, ROWS)
        )
        decode, chunk = _seconds(lambda: product(one, w)), _seconds(lambda: product(many, w))
    return calls * w.nbytes / decode / 1e9, 2 * calls * ROWS * rows * columns / chunk / 1e12


def _dispatch(device: Any) -> float:
    """Seconds of one call in a chain."""
    step = jax.jit(lambda x: x + 1)
    start = jax.device_put(np.zeros(8, np.float32), device)

    def chain() -> Any:
        x = start
        for _ in range(50):
            x = step(x)
        return x

    return _seconds(chain) / 50


def _exchange(devices: list[Any], size: int) -> float:
    """Seconds until both devices have both partials of so many bytes."""
    partials = {
        i: jax.device_put(np.zeros(size // 4, np.float32), d) for i, d in enumerate(devices)
    }
    return _seconds(lambda: exchange(partials, (0, 1), devices))


def _with_memory(mesh: Mesh) -> Mesh:
    """CPU devices with their part of the memory that the host has free."""
    free = host_free()
    if free is None:
        return mesh
    cpus = sum(d.platform == "cpu" for d in mesh.devices)
    infos = (
        replace(d, free=free // cpus) if d.platform == "cpu" and d.free is None else d
        for d in mesh.devices
    )
    fabric: Fabric = replace(mesh.fabric, host_memory=free)
    return replace(mesh, devices=tuple(infos), fabric=fabric)
