"""Groups of pages: what is kept, copied and folded as one.

A page is immutable once made. Groups have a few fixed sizes, so that one copy is large and few
programs are compiled: equal groups are joined, and one that loses pages is cut into smaller ones.
A group is never padded: what crosses the link is pages in use and nothing else.

A group lives in one place: on the device, in pinned host memory or in pageable host memory.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxllm.cache.attention import page_table
from jaxllm.models.layers import Array, Device
from sharding.links import Place, deliver, host_array
from sharding.memory import PINNED_LIMIT, exhausted

Pages = tuple[Array | np.ndarray, ...]
Rows = tuple[int, ...]
PINNED_NOTE = (
    "pinned host memory for the cache has run out, so further pages are in pageable memory, which"
    f" reaches a device more slowly: set {PINNED_LIMIT} (64 unless set) to as many GB as the cache"
    " takes."
)


@dataclass(frozen=True, eq=False)
class Group:
    """Pages [M, K, P, ...] with the first position of each.

    All of `rows` have every page; or, of a mixed group, each page has the row of its own there.
    """

    pages: Pages
    firsts: tuple[int, ...]
    rows: Rows
    place: Place
    mixed: bool = False
    tables: dict[tuple[Rows, int], Array] = field(default_factory=dict)  # see `GroupMaker.table`

    @cached_property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self.pages)

    @property
    def page(self) -> int:
        """Positions of a page."""
        return self.pages[0].shape[2]

    @property
    def end(self) -> int:
        """Where the last page ends."""
        return self.firsts[-1] + self.page

    @cached_property
    def owners(self) -> frozenset[int]:
        """All rows that have a page of it."""
        return frozenset(self.rows)

    def rows_of(self, page: int) -> Rows:
        """The rows that have a page."""
        return self.rows[page : page + 1] if self.mixed else self.rows

    def given_to(self, rows: Rows, mixed: bool = False) -> Group:
        """The same pages as those of other rows."""
        if (rows, mixed) == (self.rows, self.mixed):
            return self
        return replace(self, rows=rows, mixed=mixed, tables={})


class NewGroup(NamedTuple):
    """What becomes a group: pages, the first position of each, and where they go."""

    pages: Pages
    firsts: tuple[int, ...]
    place: Place


def group_sizes(largest: int) -> tuple[int, ...]:
    """The sizes of groups: powers of four up to `largest` (a power of two), and that."""
    sizes = [1]
    while sizes[-1] * 4 <= largest:
        sizes.append(sizes[-1] * 4)
    return tuple(sizes) if sizes[-1] == largest else (*sizes, largest)


@jax.jit
def _concat(pages: tuple[Array, ...]) -> Array:
    return jnp.concatenate(pages)


@jax.jit
def _take(pages: Array, index: Array) -> Array:
    return pages[index]


def take(pages: Pages, index: Sequence[int]) -> Pages:
    """Some of the pages of arrays on a device."""
    return tuple(_take(p, np.asarray(index, np.int32)) for p in pages)


class HostMemory:
    """Host memory for the pages of all devices: pinned as long as there is some of it."""

    def __init__(self) -> None:
        self._exhausted = self._told = False

    def freed(self) -> None:
        """Some pages are gone, which may be enough for others."""
        self._exhausted = False

    def hold(
        self, groups: Sequence[Pages], place: Place, device: Device
    ) -> tuple[Place, Sequence[Pages]]:
        """The pages in host memory, and in which: pageable where there is no more of the pinned."""
        if place == "pinned" and not self._exhausted:
            try:
                return place, host_array(groups, place, device)
            except RuntimeError as error:
                if not exhausted(error):
                    raise
            self._exhausted = True
            if not self._told:
                self._told = True
                warnings.warn(PINNED_NOTE, stacklevel=2)
        return "pageable", host_array(groups, "pageable", device)


class GroupMaker:
    """Makes the groups of one device, of up to `largest` pages.

    An accelerator joins groups of pinned memory, whose link is faster than a thread that copies: as
    many at a time as make two of the largest, so that one comes while another goes, in the room
    that steps take for computing.
    """

    def __init__(self, device: Device, largest: int, host: HostMemory):
        self.device, self.host = device, host
        self.sizes = group_sizes(largest)
        self._on_device = SingleDeviceSharding(device, memory_kind="device")
        self._joins = device.platform != "cpu"
        self._joined: deque[Group] = deque()  # that may still be on their way
        self._tables: WeakValueDictionary[Any, Array] = WeakValueDictionary()  # by what they say

    def make(
        self, pages: Pages, firsts: tuple[int, ...], rows: Rows, place: Place, mixed: bool = False
    ) -> Group:
        """A group in a place, of pages that may still be in another."""
        [group] = self.make_all([NewGroup(pages, firsts, place)], rows, mixed)
        return group

    def make_all(self, groups: Sequence[NewGroup], rows: Rows, mixed: bool = False) -> list[Group]:
        """Groups of the same rows in their places; pages that go to the same are sent together."""
        there = list(groups)
        places: set[Place] = {each.place for each in groups if each.place != "device"}
        for place in places:
            index = [i for i, each in enumerate(groups) if each.place == place]
            found, held = self.host.hold([groups[i].pages for i in index], place, self.device)
            for i, pages in zip(index, held, strict=True):
                there[i] = groups[i]._replace(pages=pages, place=found)
        return [Group(each.pages, each.firsts, rows, each.place, mixed) for each in there]

    def join(self, groups: Sequence[Group]) -> Group:
        """Groups of one kind and place as one, in this order."""
        first = groups[0]
        parts = [tuple(g.pages[i] for g in groups) for i in range(len(first.pages))]
        firsts = tuple(f for g in groups for f in g.firsts)
        rows = tuple(r for g in groups for r in g.rows) if first.mixed else first.rows
        here = self._joins and first.place == "pinned"
        if here:
            self._wait_for_joins(len(firsts))
            parts = [deliver(part, self.device) for part in parts]
        if here or first.place == "device":
            pages = tuple(map(_concat, parts))
        else:
            pages = tuple(np.concatenate([np.asarray(p) for p in part]) for part in parts)
        joined = self.make(pages, firsts, rows, first.place, first.mixed)
        if here:
            self._joined.append(joined)
        return joined

    def _wait_for_joins(self, pages: int) -> None:
        """Until so many more pages may be joined on the device."""
        while sum(len(group.firsts) for group in self._joined) > 2 * self.sizes[-1] - pages:
            jax.block_until_ready(self._joined.popleft().pages)

    def cut(self, group: Group, index: Sequence[int]) -> Iterator[Group]:
        """Some of a group's pages, or all, in groups of the sizes that there are. A stretch of
        pages is cut where groups of each size would end, so that its parts can be joined again."""
        if len(index) == len(group.firsts):
            yield group
            return
        stretch = index[-1] - index[0] == len(index) - 1
        at, start = 0, index[0] if stretch else 0
        while at < len(index):
            fitting = [n for n in self.sizes if n <= len(index) - at and (start + at) % n == 0]
            yield self._select(group, index[at : at + fitting[-1]])
            at += fitting[-1]

    def _select(self, group: Group, index: Sequence[int]) -> Group:
        if group.place == "device":
            pages = take(group.pages, index)
        else:
            pages = tuple(np.asarray(p)[index] for p in group.pages)
        firsts = tuple(group.firsts[i] for i in index)
        rows = tuple(group.rows[i] for i in index) if group.mixed else group.rows
        return self.make(pages, firsts, rows, group.place, group.mixed)

    def table(self, group: Group, rows: Rows, slots: int) -> Array:
        """A group's table on the device (`page_table`), for a step of so many slots; only `rows` of
        its rows take part."""
        key = rows, slots
        if key not in group.tables:
            given = group.rows if group.mixed else rows
            said = group.firsts, given, slots, group.mixed  # the same of most layers' groups
            table = self._tables.get(said)
            if table is None:
                table = jax.device_put(page_table(*said), self._on_device)
                self._tables[said] = table
            group.tables[key] = table
        return group.tables[key]
