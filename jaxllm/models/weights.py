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
from itertools import groupby
from math import prod
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxllm.gguf.blocks import BlockType
from jaxllm.models.block import Block, BlockDef, DraftEnds, Ends, Kinds, block_def, ends_def
from jaxllm.models.config import Columns, ModelConfig
from jaxllm.models.layers import Device
from jaxllm.models.memory import Arena
from jaxllm.models.quantised import Quantised
from jaxllm.models.sections import Section
from sharding import Context, Plan, TensorShape

LOADERS = 8  # tensors that are read at a time, at most: each waits in host memory to be copied


class Leaves(NamedTuple):
    """One device's arrays; vocab is int32 [2], its first vocabulary row and how many it has."""

    layers: tuple[tuple[jax.Array, ...], ...]
    ends: tuple[jax.Array, ...]
    vocab: jax.Array

    def of(self, model: LocalModel) -> Leaves:
        """The arrays of one part of a model, which `LocalModel.of_context` gave."""
        own = self.layers[model.first : model.first + len(model.blocks)]
        return self._replace(layers=own)


@dataclass(frozen=True, eq=False)
class LocalModel:
    """One device's slice without its values. Compared by identity: `local_model` gives the same
    object for the same arguments, and programs look it up in every step.

    `draft_ends` are the ends of a context of layers that predict tokens ahead, over the same
    leaves; `first` is the number of a part's first layer in the whole."""

    cfg: ModelConfig
    blocks: tuple[BlockDef, ...]
    ends: BlockDef
    kv_heads: tuple[int, ...]
    states: tuple[int, ...]  # groups of a recurrent state
    draft_ends: BlockDef | None = None
    first: int = 0

    def of_context(self, context: Context) -> LocalModel:
        """The layers of one context alone, with its ends."""
        cut = len(self.blocks) - self.cfg.ahead
        own, ends = slice(0, cut), self.ends
        if context == "draft":
            assert self.draft_ends is not None
            own, ends = slice(cut, None), self.draft_ends
        blocks, kv_heads, states = self.blocks[own], self.kv_heads[own], self.states[own]
        return _interned(
            self.cfg.of_context(context), blocks, ends, kv_heads, states, None, own.start
        )


class Stored(NamedTuple):
    """One array of a parameter; an element covers `packs` values of its last dim."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    packs: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Slot:
    """One parameter of the whole model: where it belongs, what it is made of and how it is held.

    Shape and dtype are those of its values; `arrays` hold them, several if it is quantised.
    """

    path: str
    layer: int | None
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    source: tuple[str, ...]  # GGUF names in order
    form: str
    dtype: np.dtype
    matrix: bool
    kind: BlockType | None
    arrays: tuple[Stored, ...]
    sections: tuple[Section, ...] = ()  # of the form that has them

    @property
    def tensor(self) -> TensorShape:
        """The whole of the slot's values, as a plan cuts them."""
        return TensorShape(self.path, self.shape, self.axes, self.layer, self.dtype.itemsize)

    @property
    def tensors(self) -> tuple[TensorShape, ...]:
        """The arrays as a plan sees them."""
        return tuple(
            TensorShape(a.path, a.shape, self.axes, self.layer, a.dtype.itemsize, a.packs)
            for a in self.arrays
        )

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


Buffer: TypeAlias = Any  # np.ndarray, or a Quantised of them: both are cut and filled alike


class Source(Protocol):
    """Where values come from. `fill` writes the slice of `slot` that `index` names to `out`;
    `digest` tells the values from those of another model of the same sizes."""

    def fill(self, slot: Slot, index: tuple[slice, ...], out: Buffer) -> None: ...

    def digest(self) -> str: ...


def local_model(
    block: type[Block],
    cfg: ModelConfig,
    kv_heads: Sequence[int],
    columns: Sequence[Columns],
    rows: int,
    dtype: str,
    kinds: Sequence[Kinds] = (),
) -> LocalModel:
    """The slice with these KV groups and MLP columns a layer, and vocabulary rows.

    `kinds` says what is held quantised, for each layer and, last, the ends; nothing by default.
    """
    *own, ends = kinds or [()] * (len(cfg.layers) + 1)
    blocks = tuple(
        block_def(block, layer, k, f, cfg.embed, dtype, kind)
        for layer, k, f, kind in zip(cfg.layers, kv_heads, columns, own, strict=True)
    )
    states = tuple(own.states for own in columns)
    own_ends = ends_def(Ends, cfg, rows, dtype, ends)
    draft_ends = ends_def(DraftEnds, cfg, rows, dtype, ends) if cfg.ahead else None
    return _interned(cfg, blocks, own_ends, tuple(kv_heads), states, draft_ends)


_interned = cache(LocalModel)


def whole_model(
    block: type[Block], cfg: ModelConfig, dtype: str, kinds: Sequence[Kinds] = ()
) -> LocalModel:
    """The model as one device that holds everything sees it."""
    kv_heads = [layer.kv_heads for layer in cfg.layers]
    columns = [layer.columns for layer in cfg.layers]
    return local_model(block, cfg, kv_heads, columns, cfg.vocab, dtype, kinds)


def _slots_of(definition: BlockDef, layer: int | None, stored: str = "") -> Iterator[Slot]:
    """Those of a layer, whose tensors' names begin with `stored` in a file, or of the ends."""
    prefix = "" if layer is None else f"blk.{layer}."

    def owner(path: str) -> str:
        """The parameter that an array belongs to: of a quantised one, what holds its parts."""
        kind = definition.variables[path].get_metadata()["kind"]
        return path if kind is None else path.rpartition(".")[0]

    for path, own in groupby(definition.paths, owner):
        parts = {part: definition.variables[part] for part in own}
        arrays = tuple(
            Stored(prefix + part, tuple(v.shape), np.dtype(v.dtype), v.get_metadata()["packs"])
            for part, v in parts.items()
        )
        *lead, last = arrays[0].shape
        meta = definition.variables[arrays[0].path.removeprefix(prefix)].get_metadata()
        yield Slot(
            prefix + path,
            layer,
            (*lead, last * arrays[0].packs),
            tuple(meta["out_sharding"]),
            tuple(s[1:] if s.startswith("/") else stored + s for s in meta["source"]),
            meta["form"],
            np.dtype(meta["values"]),
            meta["matrix"],
            meta["kind"],
            arrays,
            meta["sections"],
        )


def slots(model: LocalModel) -> list[Slot]:
    """Every parameter of a whole model, in the order of its leaves, the ends last."""
    stored = model.cfg.stored
    layers = [s for i, b in enumerate(model.blocks) for s in _slots_of(b, i, stored(i))]
    return layers + list(_slots_of(model.ends, None))


def _slice(
    plan: Plan, slot: Slot, part: Slot, device: int, source: Source, arena: Arena
) -> list[np.ndarray]:
    """The slice of `slot` that `device` holds, in the leading corners of arrays as `part` has."""
    arrays = [arena.zeros(array.shape, array.dtype) for array in part.arrays]
    if slot.layer is not None and slot.form == "once":
        if device != plan.layers[slot.layer].mlp_devices[0]:
            return arrays  # what is added to a partial by one device, and by the others as zeros
    if plan.padded or plan.holds(slot.tensor, device):
        index = plan.slices(slot.tensor, device)
        own = tuple(len(range(*i.indices(n))) for i, n in zip(index, slot.shape, strict=True))
        if all(own):
            source.fill(slot, index, _corner(slot, arrays, own))
    return arrays


def _corner(slot: Slot, arrays: list[np.ndarray], shape: tuple[int, ...]) -> Buffer:
    if slot.kind is None:
        return arrays[0][tuple(slice(0, n) for n in shape)]
    names = [array.path.rpartition(".")[-1] for array in slot.arrays]
    parts = dict(zip(names, arrays, strict=True))
    return Quantised(slot.kind, slot.dtype, parts).corner(shape)


Progress = Callable[[int], Any]  # called with bytes as they are done


def _gather(
    work: list[tuple[Any, Callable[[], Any], int]], progress: Progress | None
) -> dict[Any, Any]:
    """Run jobs (key, job, bytes) on a thread a core, some at most; the results by key."""
    with ThreadPoolExecutor(min(LOADERS, os.cpu_count() or 1)) as pool:
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


def _assemble(model: LocalModel, done: dict[str, list[Any]], vocab: Any) -> Leaves:
    layers: dict[int | None, list[Any]] = {i: [] for i in (*range(len(model.blocks)), None)}
    for slot in slots(model):
        layers[slot.layer] += done.get(slot.path, [])
    *own, ends = (tuple(arrays) for arrays in layers.values())
    return Leaves(tuple(own), ends, vocab)


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

    def job(slot: Slot, part: Slot) -> Callable[[], list[jax.Array]]:
        def run() -> list[jax.Array]:
            return jax.device_put(_slice(plan, slot, part, device, source, arena), placement)

        return run

    start, stop = plan.vocab[device]
    here = {i for i, layer in enumerate(plan.layers) if device in layer.devices}
    here |= {None} if stop > start else set()
    pairs = zip(slots(whole), slots(local), strict=True)
    pairs = [(s, part) for s, part in pairs if s.layer in here]
    work = [(s.path, job(s, part), part.nbytes) for s, part in pairs]
    arena = _arena(target, [part for _, part in pairs])
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

    def job(slot: Slot, part: Slot) -> Callable[[], list[jax.Array]]:
        def run() -> list[jax.Array]:
            own = [
                jax.device_put(
                    [array[None] for array in _slice(plan, slot, part, i, source, arenas[i])],
                    SingleDeviceSharding(d),
                )
                for i, d in enumerate(devices)
            ]
            arrays = zip(part.arrays, *own, strict=True)
            return [stack(array.shape, list(parts)) for array, *parts in arrays]

        return run

    pairs = list(zip(slots(whole), slots(local), strict=True))
    work = [(s.path, job(s, part), part.nbytes * len(devices)) for s, part in pairs]
    arenas = [_arena(d, [part for _, part in pairs]) for d in devices]
    vocab = [
        jax.device_put(np.asarray([[a, b - a]], np.int32), SingleDeviceSharding(d))
        for (a, b), d in zip(plan.vocab, devices, strict=True)
    ]
    return _assemble(local, _gather(work, progress), stack((2,), vocab))


def _arena(target: Device, parts: list[Slot]) -> Arena:
    arrays = sum(len(part.arrays) for part in parts)
    return Arena(target, sum(part.nbytes for part in parts), arrays)
