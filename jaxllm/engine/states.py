"""Recurrent states of an engine's rows: arrays beside the rings, and where each row's stand.

A state is that of one position alone, the end of what a row has run: nothing before it can be had
back. A row begins with zeros at position zero (`jaxllm.engine.local.run_recurrent`), so that
releasing one takes no work on a device.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxllm.cache.groups import HostMemory
from jaxllm.engine.local import State
from jaxllm.models.config import LayerConfig
from jaxllm.models.layers import Device
from sharding.links import Link, Place

StateRow = tuple[np.ndarray, ...]  # one row's state of a layer, [groups, ...] each


def empty_state(cfg: LayerConfig, lead: Sequence[int], sharding: Any) -> State:
    """Zeroed arrays of a layer's state, lead [..., rows, groups]."""
    assert cfg.recurrent is not None
    shapes = cfg.recurrent.state_shapes
    return tuple(jnp.zeros((*lead, *s), jnp.float32, device=sharding) for s in shapes)


class HostStates(MutableMapping[int, State]):
    """States of a device's layers, of all rows, that are in host memory between steps: what is
    looked up is a copy on the device, and what is set is copied back."""

    def __init__(self, device: Device, place: Place, memory: HostMemory):
        self._device, self._memory = device, memory
        self._place: Place = place
        self._link = Link(device)
        self._kept: dict[int, tuple[Any, ...]] = {}
        self.sent = 0  # bytes copied to the device

    def __getitem__(self, layer: int) -> State:
        kept = self._kept[layer]
        self.sent += sum(a.nbytes for a in kept)
        [sent] = self._link.send([kept])
        return sent

    def __setitem__(self, layer: int, state: State) -> None:
        _, [self._kept[layer]] = self._memory.hold([state], self._place, self._device)

    def __delitem__(self, layer: int) -> None:
        del self._kept[layer]

    def __contains__(self, layer: object) -> bool:
        return layer in self._kept

    def __iter__(self) -> Iterator[int]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)


class StateEnds:
    """After how many positions each row's states stand; of no interest without layers that have
    any."""

    def __init__(self, slots: int, stateful: bool):
        self.stateful = stateful
        self._at = np.zeros(slots, np.int64)

    def advance(self, row: int, starts: np.ndarray, count: int) -> None:
        """A step of `count` real tokens of rows row .. row + N, those at -1 left out."""
        own = slice(row, row + len(starts))
        self._at[own] = np.where(starts < 0, self._at[own], starts + count)

    def set(self, row: int, length: int) -> None:
        self._at[row] = length

    def copy(self, source: int, row: int) -> None:
        self._at[row] = self._at[source]

    def at(self, row: int, length: int) -> bool:
        """Whether a row can go on at position `length` as far as states are concerned."""
        return not self.stateful or int(self._at[row]) == length
