"""Which groups of pages a stage folds itself, and which stages run together as one program.

Each program takes the host's thread some time to start, in a step for one token of each row as long
as a copy or longer. There a kernel, which rounds in every program as it does alone, folds the last
groups of a layer in the stage that ends it; and where nothing is left between the stages of some
layers, they run as one.

Programs must be few, as each is compiled: a stage folds groups of one size, and any number of them
by one program; stages run together only where all layers have groups alike.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Literal

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxllm.cache.stream import Arrived
from jaxllm.models.layers import Array, Device
from sharding import PlanOptions

if TYPE_CHECKING:
    from jaxllm.engine.staged import StagedEngine
    from jaxllm.engine.stages import Layer

# Groups are folded by programs of their own, by stages, or by stages that run together; the first
# two alone are what a warm-up asks for.
Stages = Literal["apart", "folding", "together"]
TOGETHER = 4  # stages of one program, at most
FOLDED = 3  # groups that a stage folds, at most: so many of one size precede one of the next


def folds_size(size: int, options: PlanOptions) -> bool:
    """Whether a stage folds groups of so many pages: as many as leave a tail together, or more."""
    return size >= min(options.tail_pages, options.group_pages)


def _most(size: int, options: PlanOptions) -> int:
    """How many groups of so many pages a stage folds: one of the largest."""
    return 1 if size == options.group_pages else FOLDED


class Folding:
    """See the module's docstring. Of one step, whose residual is `x` [N, T, D]."""

    def __init__(self, engine: StagedEngine, x: Array):
        self.engine, self.options = engine, engine.plan.options
        self.single, self.dtype = x.shape[1] == 1, x.dtype

    def left(self, device: int, layer: int) -> int:
        """How many groups, the last that a layer reads, are left to the stage that ends it: those
        that have room, all waiting to be folded, beside the copies behind them."""
        own, stream = self.engine.layers[device][layer], self.engine.streams[device]
        coming, count, room = stream.coming(layer), 0, stream.may_wait
        if not coming or not self._folds(own):
            return 0
        size = len(coming[-1].firsts)
        if not folds_size(size, self.options):
            return 0
        for group in reversed(coming[-_most(size, self.options) :]):
            room -= group.nbytes
            if len(group.firsts) != size or (room < 0 and count):
                break
            count += 1
        return count

    def filled(self, device: int, groups: list[Arrived]) -> tuple[Arrived, ...]:
        """The groups that were left to a stage; in the place of those that it could fold besides,
        the last of them once more with a table that no row has."""
        if not groups:
            return ()
        pages, table = groups[-1]
        missing = _most(len(pages[0]), self.options) - len(groups)
        nothing = pages, _no_rows(table.size, self.engine.devices[device])
        return (*groups, *[nothing] * missing)

    def may_wait(self, device: int, layer: int, waiting: int) -> bool:
        """Whether so many stages on a device, of which the last begins a layer, may run together
        with the one that will end it: which has to fold all groups of the layer."""
        engine, stream = self.engine, self.engine.streams[device]
        own, groups = engine.layers[device][layer], stream.coming(layer)
        alone = engine.plan.layers[layer].devices == (device,) and engine.owners[layer] == layer
        if waiting == TOGETHER or not alone or own.states or not own.kv_heads:
            return False
        if engine.stages != "together" or not stream.alike or not self._folds(own):
            return False
        size = sum(group.nbytes for group in groups)
        room = size * TOGETHER <= stream.may_wait and len(groups) * TOGETHER < stream.most
        return room and self.left(device, layer) == len(groups)

    def _folds(self, layer: Layer) -> bool:
        """Whether the stage that ends a layer may fold groups."""
        kernel = self.single and layer.flashes(1, self.dtype, self.options.page)
        return kernel and self.engine.stages != "apart"


@cache
def _no_rows(size: int, device: Device) -> Array:
    """A table of a group (`page_table`) that no row has."""
    return jax.device_put(np.zeros(size, np.int32), SingleDeviceSharding(device))
