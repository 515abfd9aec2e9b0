"""A model as devices hold it: definitions of slices, and the arrays that fill them.

`LocalModel` is what one device's slice looks like; `Leaves` its arrays. Arrays come from a source
(a GGUF file or random numbers) that is asked for one slice at a time, so that nothing larger than
a device's own slice is ever made.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxllm.models.block import Block, BlockDef, block_def, ends_def
from jaxllm.models.config import Columns, ModelConfig
from jaxllm.models.layers import Device
from jaxllm.models.memory import Arena
from sharding import Plan, TensorShape


class Leaves(NamedTuple):
    """One device's arrays; vocab is int32 [2], its first vocabulary row and how many it has."""

    layers: tuple[tuple[jax.Array, ...], ...]
    ends: tuple[jax.Array, ...]
    vocab: jax.Array


@dataclass(frozen=True, eq=False)
class LocalModel:
    """One device's slice without its values. Compared by identity: `local_model` gives the same
    object for the same arguments, and programs look it up in every step."""

    cfg: ModelConfig
    blocks: tuple[BlockDef, ...]
    ends: BlockDef
    kv_heads: tuple[int, ...]


@dataclass(frozen=True)
class Slot:
    """One parameter of the whole model: where it belongs and what it is made of."""

    path: str
    layer: int | None
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    source: tuple[str, ...]  # GGUF names in order
    form: str
    dtype: np.dtype

    @property
    def tensor(self) -> TensorShape:
        """The slot as a plan sees it."""
        return TensorShape(self.path, self.shape, self.axes, self.layer, self.dtype.itemsize)


class Source(Protocol):
    """Where values come from. `fill` writes the slice of `slot` that `index` names to `out`."""

    def fill(self, slot: Slot, index: tuple[slice, ...], out: np.ndarray) -> None: ...


def local_model(
    block: type[Block],
    cfg: ModelConfig,
    kv_heads: Sequence[int],
    columns: Sequence[Columns],
    rows: int,
    dtype: str,
) -> LocalModel:
    """The slice with these KV groups and MLP columns a layer, and vocabulary rows."""
    blocks = tuple(
        block_def(block, layer, k, f, cfg.embed, dtype)
        for layer, k, f in zip(cfg.layers, kv_heads, columns, strict=True)
    )
    return _interned(cfg, blocks, ends_def(cfg, rows, dtype), tuple(kv_heads))


_interned = cache(LocalModel)


def whole_model(block: type[Block], cfg: ModelConfig, dtype: str) -> LocalModel:
    """The model as one device that holds everything sees it."""
    kv_heads = [layer.kv_heads for layer in cfg.layers]
    columns = [layer.columns for layer in cfg.layers]
    return local_model(block, cfg, kv_heads, columns, cfg.vocab, dtype)


def _slots_of(definition: BlockDef, layer: int | None) -> Iterator[Slot]:
    for path in definition.paths:
        variable = definition.variables[path]
        meta = variable.get_metadata()
        prefix = "" if layer is None else f"blk.{layer}."
        source = tuple(s[1:] if s.startswith("/") else prefix + s for s in meta["source"])
        yield Slot(
            prefix + path,
            layer,
            tuple(variable.shape),
            tuple(meta["out_sharding"]),
            source,
            meta["form"],
            np.dtype(variable.dtype),
        )


def slots(model: LocalModel) -> list[Slot]:
    """Every parameter of a whole model, in the order of its leaves, the ends last."""
    layers = [s for i, b in enumerate(model.blocks) for s in _slots_of(b, i)]
    return layers + list(_slots_of(model.ends, None))


def _slice(
    plan: Plan, slot: Slot, shape: tuple[int, ...], device: int, source: Source, arena: Arena
) -> np.ndarray:
    """The slice of `slot` that `device` holds, in the leading corner of an array of `shape`."""
    out = arena.zeros(shape, slot.dtype)
    if slot.layer is not None and slot.form == "once":
        if device != plan.layers[slot.layer].mlp_devices[0]:
            return out  # what is added to a partial by one device, and by the others as zeros
    if plan.padded or plan.holds(slot.tensor, device):
        index = plan.slices(slot.tensor, device)
        own = tuple(
            slice(0, len(range(*i.indices(n)))) for i, n in zip(index, slot.shape, strict=True)
        )
        if all(s.stop for s in own):
            source.fill(slot, index, out[own])
    return out


Progress = Callable[[int], Any]  # called with bytes as they are done


def _gather(
    work: list[tuple[Any, Callable[[], Any], int]], progress: Progress | None
) -> dict[Any, Any]:
    """Run jobs (key, job, bytes) on a few threads; the results by key."""
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        futures = [(key, pool.submit(job), size) for key, job, size in work]
        done = {}
        try:
            for key, future, size in futures:
                done[key] = future.result()
                if progress is not None:
                    progress(size)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return done


def _assemble(model: LocalModel, done: dict[str, Any], vocab: Any) -> Leaves:
    own = [s for s in slots(model) if s.path in done]
    layers = tuple(
        tuple(done[s.path] for s in own if s.layer == i) for i in range(len(model.blocks))
    )
    return Leaves(layers, tuple(done[s.path] for s in own if s.layer is None), vocab)


def load_device(
    plan: Plan,
    whole: LocalModel,
    local: LocalModel,
    source: Source,
    device: int,
    target: Device,
    progress: Progress | None = None,
) -> Leaves:
    """The leaves of one device of the plan, committed to `target`: none of a layer, or of the
    ends, that it takes no part in."""
    placement = SingleDeviceSharding(target)

    def job(slot: Slot, part: Slot) -> Callable[[], jax.Array]:
        def run() -> jax.Array:
            values = _slice(plan, slot, part.shape, device, source, arena)
            return jax.device_put(values, placement)

        return run

    start, stop = plan.vocab[device]
    here = {i for i, layer in enumerate(plan.layers) if device in layer.devices}
    here |= {None} if stop > start else set()
    pairs = zip(slots(whole), slots(local), strict=True)
    work = [(s.path, job(s, part), _bytes(part)) for s, part in pairs if s.layer in here]
    arena = Arena(target, sum(size for _, _, size in work), len(work))
    vocab = jax.device_put(np.asarray([start, stop - start], np.int32), placement)
    return _assemble(local, _gather(work, progress), vocab)


def load_stacked(
    plan: Plan,
    whole: LocalModel,
    local: LocalModel,
    source: Source,
    mesh: JaxMesh,
    progress: Progress | None = None,
) -> Leaves:
    """The leaves of all devices of a mesh of like devices, each padded to `local`'s sizes, with a
    leading device axis."""
    axis = mesh.axis_names[0]
    sharding = NamedSharding(mesh, PartitionSpec(axis))
    devices = list(mesh.devices.flat)

    def stack(shape: tuple[int, ...], parts: list[jax.Array]) -> jax.Array:
        return jax.make_array_from_single_device_arrays((len(devices), *shape), sharding, parts)

    def job(slot: Slot, part: Slot) -> Callable[[], jax.Array]:
        def run() -> jax.Array:
            own = [
                jax.device_put(
                    _slice(plan, slot, part.shape, i, source, arenas[i])[None],
                    SingleDeviceSharding(d),
                )
                for i, d in enumerate(devices)
            ]
            return stack(part.shape, own)

        return run

    pairs = zip(slots(whole), slots(local), strict=True)
    work = [(s.path, job(s, part), _bytes(part) * len(devices)) for s, part in pairs]
    each = sum(size for _, _, size in work) // len(devices)
    arenas = [Arena(d, each, len(work)) for d in devices]
    vocab = [
        jax.device_put(np.asarray([[a, b - a]], np.int32), SingleDeviceSharding(d))
        for (a, b), d in zip(plan.vocab, devices, strict=True)
    ]
    return _assemble(local, _gather(work, progress), stack((2,), vocab))


def _bytes(slot: Slot) -> int:
    return int(np.prod(slot.shape)) * slot.dtype.itemsize
