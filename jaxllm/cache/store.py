"""One device's full pages: where they live, and their delivery to attention steps.

    ring tail --add--> groups of pages, in the order in which they filled --visit--> attention

A page is immutable once added and knows its layer, row and first position (rule: identity is
data). Pages are kept in groups of a few fixed sizes, so that one copy is large and few programs
are compiled: equal neighbours merge, and a group that loses pages is cut into smaller ones.
A group is never padded: what crosses the link is pages in use and nothing else.

A group lives in one place: on the device, in pinned host memory or in pageable host memory. The
place decides only whether `visit` has to copy it; attention takes all places the same way.

A row whose sequence has ended may be parked: its pages are kept in groups of their own that no
step visits, until the row, or another one, begins with them again (`adopt`). Since pages never
change, rows share them: a group is given another table, and its arrays live until no row has them.

Copies are issued ahead, through the layers and round to the first for the next step, while at
most `prefetch` delivered groups exist at a time (in flight or in use). While one store waits, its
peers go on issuing, so that no device's link rests for another's. Only the thread that runs the
engine may call a store.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxllm.models.layers import Array, Device
from sharding.links import Link, Place, host_array
from sharding.memory import PINNED_LIMIT, exhausted

Pages = tuple[Array | np.ndarray, ...]
PINNED_NOTE = (
    "pinned host memory for the cache has run out, so further pages are in pageable memory, which"
    f" reaches a device more slowly: set {PINNED_LIMIT} (64 unless set) to as many GB as the cache"
    " takes."
)
PAUSE = 50e-6  # seconds between looks at what is waited for


@dataclass(frozen=True, eq=False)
class Group:
    """Pages [M, K, P, ...] with the row and first position of each; `table` on the device."""

    pages: Pages
    rows: tuple[int, ...]
    firsts: tuple[int, ...]
    place: Place
    table: Array

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self.pages)


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


def _is_ready(result: Any) -> bool:
    return result.is_ready()


def _join(pages: list[Array | np.ndarray], place: Place) -> Array | np.ndarray:
    if place == "device":
        return _concat(tuple(pages))
    return np.concatenate([np.asarray(p) for p in pages])


class PageStore:
    """See the module's docstring.

    place(layer, first position) says where a page goes; layers are numbered as the plan does.
    `owners` has the layer whose pages each layer reads: itself, or an earlier one.
    """

    def __init__(
        self,
        device: Device,
        owners: Sequence[int],
        group_pages: int,
        prefetch: int,
        place: Callable[[int, int], Place],
    ):
        self.device, self.prefetch, self.place = device, max(1, prefetch), place
        self.link = Link(device)
        self.peers: Sequence[PageStore] = [self]  # that issue copies while one of them waits
        self.sizes = group_sizes(group_pages)
        self.sent = 0  # bytes delivered to steps over the link
        self.notes: list[str] = []  # sentences that a user should read
        self._no_more_pinned = False
        self.discarded = 0  # bytes copied ahead for a step that then did not come
        self._owners = owners
        self._groups: list[list[Group]] = [[] for _ in owners]
        self._parked: dict[int, list[list[Group]]] = {}  # by row, then layer
        self._queue: list[Group] = []  # host groups of this step, in the order of use
        self._issued = 0  # of the queue, and past its end of the next step's
        self._ahead: deque[tuple[Group, tuple[Array, ...]]] = deque()
        self._busy: deque[Array] = deque()  # one small result of each step in progress
        self._coming: deque[Group] = deque()  # that the visit in progress has still to deliver
        self._again = False
        self._on_device = SingleDeviceSharding(device, memory_kind="device")

    # Holding pages

    def add(self, layer: int, row: int, first: int, pages: tuple[Array, ...]) -> None:
        """Take over full pages [M, K, P, ...] of one row from position `first` on."""
        size = pages[0].shape[2]
        for i, at in enumerate(range(first, first + size * len(pages[0]), size)):
            own = pages if len(pages[0]) == 1 else tuple(p[i : i + 1] for p in pages)
            place = self.place(layer, at)
            self._push(self._groups[layer], self._group(own, (row,), (at,), place))

    def release(self, row: int) -> None:
        """Drop a row's pages."""
        self._parked.pop(row, None)
        self._no_more_pinned = False  # what this frees may be enough
        for layer in range(len(self._groups)):
            self._keep(layer, lambda group, i: group.rows[i] != row)

    def park(self, row: int) -> None:
        """Set a row's pages aside: no step visits them."""
        layers = range(len(self._groups))
        own = [self._cut(layer, lambda group, i: group.rows[i] == row) for layer in layers]
        self.release(row)
        self._parked[row] = own

    def adopt(self, source: int, row: int, end: int) -> None:
        """Let a row consist of the pages of `source` (a row, maybe the same one) before position
        `end`. No byte is copied of groups that lie before it as a whole."""
        found = []
        for layer in range(len(self._groups)):
            pages = self._cut(layer, lambda g, i: g.rows[i] == source and g.firsts[i] < end, source)
            found.append([self._of_row(group, row) for group in pages])
        self.release(row)
        for groups, more in zip(self._groups, found, strict=True):
            for group in more:
                self._push(groups, group)

    def trim(self, layer: int, row: int, oldest: int) -> None:
        """Drop a row's pages that end before position `oldest`."""

        def alive(group: Group, i: int) -> bool:
            page = group.pages[0].shape[2]
            return group.rows[i] != row or group.firsts[i] + page > oldest

        self._keep(layer, alive)

    def groups(self, layer: int) -> list[Group]:
        """The groups of a layer, in the order of use."""
        return list(self._groups[layer])

    def row_pages(self, layer: int, row: int) -> Iterator[tuple[int, Pages]]:
        """First position and arrays [K, P, ...] in host memory of each page of a row, parked or
        not, in ascending order."""
        for group in self._with_parked(layer, row):
            pages = tuple(np.asarray(p) for p in group.pages)
            for i, (owner, first) in enumerate(zip(group.rows, group.firsts, strict=True)):
                if owner == row:
                    yield first, tuple(p[i] for p in pages)

    def held_bytes(self) -> dict[Place, int]:
        """Bytes of the pages held, by place; of those that rows share, once."""
        held: dict[Place, int] = {"device": 0, "pinned": 0, "pageable": 0}
        arrays = {}
        for layers in (self._groups, *self._parked.values()):
            for group in (g for groups in layers for g in groups):
                arrays |= {id(p): (group.place, p.nbytes) for p in group.pages}
        for place, size in arrays.values():
            held[place] += size
        return held

    def _keep(self, layer: int, alive: Callable[[Group, int], bool]) -> None:
        new: list[Group] = []
        for group in self._cut(layer, alive):
            self._push(new, group)
        self._groups[layer] = new

    def _cut(
        self, layer: int, wanted: Callable[[Group, int], bool], parked: int | None = None
    ) -> list[Group]:
        """The wanted pages of a layer, those of one parked row included, in the order of use:
        groups as they are, or cut to the sizes that there are."""
        found = []
        for group in self._with_parked(layer, parked):
            left = [i for i in range(len(group.rows)) if wanted(group, i)]
            if len(left) == len(group.rows):
                found.append(group)
                continue
            for size in reversed(self.sizes):
                while len(left) >= size:
                    found.append(self._select(group, left[:size]))
                    left = left[size:]
        return found

    def _with_parked(self, layer: int, row: int | None) -> list[Group]:
        parked = () if row is None else self._parked.get(row, ())
        return [*(parked[layer] if parked else ()), *self._groups[layer]]

    def _push(self, groups: list[Group], group: Group) -> None:
        """Append; then merge as long as the last groups fill one of the next size."""
        groups.append(group)
        for small, large in zip(self.sizes, self.sizes[1:], strict=False):
            last = groups[-(large // small) :]
            same = {(len(g.rows), g.place) for g in last} == {(small, group.place)}
            if len(last) * small < large or not same:
                continue
            parts = [[g.pages[i] for g in last] for i in range(len(group.pages))]
            merged = [_join(p, group.place) for p in parts]
            rows = tuple(r for g in last for r in g.rows)
            firsts = tuple(f for g in last for f in g.firsts)
            groups[-len(last) :] = [self._group(tuple(merged), rows, firsts, group.place)]

    def _select(self, group: Group, index: list[int]) -> Group:
        if group.place == "device":
            pages = tuple(_take(p, np.asarray(index, np.int32)) for p in group.pages)
        else:
            pages = tuple(np.asarray(p)[index] for p in group.pages)
        rows = tuple(group.rows[i] for i in index)
        return self._group(pages, rows, tuple(group.firsts[i] for i in index), group.place)

    def _group(
        self, pages: Pages, rows: tuple[int, ...], firsts: tuple[int, ...], place: Place
    ) -> Group:
        if place != "device":
            place, pages = self._on_host(pages, place)
        return Group(pages, rows, firsts, place, self._table(rows, firsts))

    def _of_row(self, group: Group, row: int) -> Group:
        """The same pages as those of another row."""
        rows = (row,) * len(group.rows)
        if rows == group.rows:
            return group
        return replace(group, rows=rows, table=self._table(rows, group.firsts))

    def _table(self, rows: tuple[int, ...], firsts: tuple[int, ...]) -> Array:
        table = np.asarray([*rows, *firsts, len(rows)], np.int32)
        return jax.device_put(table, self._on_device)

    def _on_host(self, pages: Pages, place: Place) -> tuple[Place, Pages]:
        """The pages in host memory: pageable where there is no more of the pinned."""
        if place == "pinned" and not self._no_more_pinned:
            try:
                return place, tuple(host_array(p, place, self.device) for p in pages)
            except RuntimeError as error:
                if not exhausted(error):
                    raise
            self._no_more_pinned = True
            if not any(store.notes for store in self.peers):
                self.notes.append(PINNED_NOTE)
                warnings.warn(PINNED_NOTE, stacklevel=2)
        return "pageable", tuple(host_array(p, "pageable", self.device) for p in pages)

    # Delivering pages

    def give_up(self) -> None:
        """Forget the step in progress and what has been copied for it."""
        self.discarded += sum(g.nbytes for g, _ in self._ahead)
        self._queue, self._issued, self._delivered = [], 0, False
        for waiting in (self._ahead, self._busy, self._coming):
            waiting.clear()

    def begin(self, row: int, rows: int, again: bool) -> None:
        """Start a step over rows row .. row + rows; `again` if the same rows come next."""
        wanted = [g for layer in self._owners for g in self._wanted(layer, row, rows)]
        self._queue = [g for g in wanted if g.place != "device"]
        self._again = again
        if [g for g, _ in self._ahead] != self._queue[: len(self._ahead)]:
            self.discarded += sum(g.nbytes for g, _ in self._ahead)
            self._ahead.clear()
        self._issued = len(self._ahead)
        self._top_up()

    def visit(self, layer: int, row: int, rows: int) -> Iterator[tuple[tuple[Array, ...], Array]]:
        """The layer's groups with pages of these rows: pages on the device, and their table.

        Layers are visited in the order of `owners`; `done` follows each step on a group.
        """
        self._coming = deque(self._wanted(layer, row, rows))
        return self._deliver(self._coming)

    def waits(self) -> bool:
        """Whether the next group of the visit in progress is not there yet."""
        if not self._coming or self._coming[0].place == "device":
            return False
        if self._ahead:
            return not self.link.arrived(self._ahead[0][1])
        self._forget_finished()
        return len(self._busy) >= self.prefetch

    def pause(self) -> None:
        """Let some time pass in which all peers issue what they may."""
        for store in self.peers:
            store._top_up()
        time.sleep(PAUSE)

    def _deliver(self, coming: deque[Group]) -> Iterator[tuple[tuple[Array, ...], Array]]:
        while coming:
            if coming[0].place == "device":
                group = coming.popleft()
                yield group.pages, group.table  # type: ignore[misc]
                continue
            if not self._ahead:
                self._wait_for_room()  # which may send it
            if not self._ahead:
                self._issue()
            while not self.link.arrived(self._ahead[0][1]):
                self.pause()
            group = coming.popleft()
            ahead, pages = self._ahead.popleft()
            assert ahead is group, "layers were visited out of order"
            self.sent += group.nbytes
            self._delivered = True
            yield pages, group.table
            del pages

    def _wait_for_room(self) -> None:
        if len(self.peers) > 1:
            while len(self._busy) >= self.prefetch and not self._ahead:
                self.pause()
        while len(self._busy) >= self.prefetch:
            self._busy.popleft().block_until_ready()

    def done(self, result: Array) -> None:
        """A step on the last visited group has been dispatched; `result` is ready when it ends."""
        if self._delivered:
            self._delivered = False
            self._busy.append(result)
            self._top_up()

    _delivered = False

    def _wanted(self, layer: int, row: int, rows: int) -> list[Group]:
        def touches(group: Group) -> bool:
            return any(row <= r < row + rows for r in group.rows)

        return [g for g in self._groups[layer] if touches(g)]

    def _forget_finished(self) -> None:
        while self._busy and _is_ready(self._busy[0]):
            self._busy.popleft()

    def _top_up(self) -> None:
        self._forget_finished()
        if self.prefetch == 1:
            return  # a copy is issued when it is needed
        limit = len(self._queue) * (2 if self._again else 1)
        while self._issued < limit and len(self._ahead) + len(self._busy) < self.prefetch:
            self._issue()

    def _issue(self) -> None:
        group = self._queue[self._issued % len(self._queue)]
        # A numpy page may be taken over without a copy; pages never change, so that is safe.
        self._ahead.append((group, self.link.send(group.pages)))
        self._issued += 1
