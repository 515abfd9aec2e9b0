"""Delivery of a store's pages to attention steps.

Groups that are on the device are passed on, others are copied there first; attention takes both the
same way. Copies are issued ahead, through the layers and round to the first for the next step,
while no more is delivered at a time (in flight or in use) than `prefetch` groups of the largest
size. While one stream waits, its peers go on issuing, so that no device's link rests for another's.
Only the thread that runs the engine may call a stream.

A copy gets its room on the device when it is issued, and there waits for all programs that were
issued before it, as one of them may have used that room. So a group is passed on only when the
copies behind it have been issued, half as many as may exist: else each would wait for the step on
the one before, and the link with it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from jaxllm.cache.groups import Group
from jaxllm.cache.store import PageStore
from jaxllm.models.layers import Array
from sharding.links import Link

Arrived = tuple[tuple[Array, ...], Array]  # pages on the device, and their table
PAUSE = 50e-6  # seconds between looks at what is waited for
SMALLER = 4  # so many times as many groups may exist where they are smaller


class PageStream:
    """See the module's docstring. `owners` has the layer whose pages each layer reads: itself, or
    an earlier one; None for a layer that reads none."""

    def __init__(self, store: PageStore, owners: Sequence[int | None], prefetch: int):
        self.store, self.prefetch = store, max(1, prefetch)
        self.behind = self.prefetch // 2  # copies issued before a group is passed on
        self.most = self.prefetch * (SMALLER if self.prefetch > 1 else 1)  # groups, of any size
        self.link = Link(store.device)
        self.peers: Sequence[PageStream] = [self]  # that issue copies while one of them waits
        self.sent = 0  # bytes delivered to steps over the link
        self.discarded = 0  # bytes copied ahead for a step that then did not come
        self._owners = {i: owner for i, owner in enumerate(owners) if owner is not None}
        self._wanted: dict[int, list[tuple[Group, Array]]] = {}  # by layers still to be visited
        self._largest = 0  # bytes of a group of the largest size
        self._queue: list[Group] = []  # host groups of this step, in the order of use
        self._issued = 0  # of the queue, and past its end of the next step's
        self._ahead: deque[tuple[Group, tuple[Array, ...]]] = deque()
        self._passed: list[int] = []  # bytes of groups that were passed on, no step on them begun
        self._busy: deque[tuple[Any, list[int]]] = deque()  # the same of each step in progress
        self._coming: deque[tuple[Group, Array]] = deque()  # that a visit has still to deliver
        self._again = False
        self.alike = True  # whether all layers of the step read groups of the same sizes

    def give_up(self) -> None:
        """Forget the step in progress and what has been copied for it."""
        self.discarded += sum(g.nbytes for g, _ in self._ahead)
        self._wanted, self._queue, self._issued, self._passed = {}, [], 0, []
        for waiting in (self._ahead, self._busy, self._coming):
            waiting.clear()

    def begin(self, row: int, rows: int, again: bool) -> None:
        """Start a step over rows row .. row + rows; `again` if the same rows come next."""
        self.store.arrange(row, rows)
        kept = {own: self.store.wanted(own, row, rows) for own in set(self._owners.values())}
        self._wanted = {layer: kept[owner] for layer, owner in self._owners.items()}
        wanted = [group for groups in self._wanted.values() for group, _ in groups]
        self._queue = [g for g in wanted if g.place != "device"]
        page = max((g.nbytes // len(g.firsts) for g in wanted), default=0)
        self._largest = page * self.store.group_pages
        sizes = {tuple(len(g.firsts) for g, _ in groups) for groups in self._wanted.values()}
        self.alike = len(sizes) < 2
        self._again = again
        if [g for g, _ in self._ahead] != self._queue[: len(self._ahead)]:
            self.discarded += sum(g.nbytes for g, _ in self._ahead)
            self._ahead.clear()
        self._issued = len(self._ahead)
        self._top_up()

    def coming(self, layer: int) -> list[Group]:
        """What a visit to a layer will pass on."""
        return [group for group, _ in self._wanted.get(layer, ())]

    @property
    def outstanding(self) -> int:
        """How many groups the visit in progress has still to pass on."""
        return len(self._coming)

    @property
    def may_wait(self) -> int:
        """Bytes of groups that may be passed on before the step on the first of them is begun."""
        return self.prefetch * self._largest // 2 if self.prefetch > 1 else 0

    def visit(self, layer: int) -> Iterator[Arrived]:
        """The groups that a layer reads, with pages of the step's rows.

        Layers are visited once each, in ascending order; `done` follows each step on groups.
        """
        self._coming = deque(self._wanted.pop(layer))
        return self._deliver(self._coming)

    def waits(self) -> bool:
        """Whether the next group of the visit in progress cannot be passed on yet."""
        if not self._coming or self._coming[0][0].place == "device":
            return False
        self._forget_finished()
        if self._short():
            return not self._next()
        return not self.link.arrived(self._ahead[0][1])

    def pause(self) -> None:
        """Let some time pass in which all peers issue what they may."""
        for stream in self.peers:
            stream._top_up()
        time.sleep(PAUSE)

    def done(self, result: Array) -> None:
        """A step on all groups that were passed on has been dispatched; `result` is ready when it
        ends. By the next group nobody else may keep those."""
        if self._passed:
            self._busy.append((result, self._passed))
            self._passed = []

    def _deliver(self, coming: deque[tuple[Group, Array]]) -> Iterator[Arrived]:
        while coming:
            if coming[0][0].place == "device":
                group, table = coming.popleft()
                yield group.pages, table  # type: ignore[misc]
                continue
            self._fetch()
            while not self.link.arrived(self._ahead[0][1]):
                self.pause()
            group, table = coming.popleft()
            assert self._ahead[0][0] is group, "layers were visited out of order"
            self.sent += group.nbytes
            self._passed.append(group.nbytes)
            yield self._ahead.popleft()[1], table  # nothing here keeps them
            self._top_up()

    def _fetch(self) -> None:
        """Issue what must have been before the next group is passed on, its own copy included."""
        while self._short():
            if groups := self._next():
                self._issue(groups)
            elif len(self.peers) > 1:
                self.pause()
            else:
                self._busy.popleft()[0].block_until_ready()

    def _short(self) -> bool:
        """Whether a copy that the next group waits for has not been issued. Those behind it are not
        waited for if there will be room for them only when the groups passed on are folded."""
        if self._issued == self._limit() or len(self._ahead) > self.behind:
            return False
        return not self._ahead or bool(self._busy) or bool(self._next())

    def _limit(self) -> int:
        """Copies that may be issued: this step's, and the next one's if the same rows come."""
        return len(self._queue) * (2 if self._again else 1)

    def _next(self) -> list[Group]:
        """The groups whose copies come next, as many as there is room for."""
        alive = [group.nbytes for group, _ in self._ahead] + self._passed
        alive += chain.from_iterable(sizes for _, sizes in self._busy)
        room = self.prefetch * self._largest - sum(alive)
        found = []
        for i in range(self._issued, min(self._limit(), self._issued + self.most - len(alive))):
            group = self._queue[i % len(self._queue)]
            room -= group.nbytes
            if room < 0:
                break
            found.append(group)
        return found

    def _forget_finished(self) -> None:
        while self._busy and self._busy[0][0].is_ready():
            self._busy.popleft()

    def _top_up(self) -> None:
        """Issue copies: those of small groups several at once, which takes the host little longer
        than one."""
        self._forget_finished()
        if self.prefetch == 1:
            return  # a copy is issued when it is needed
        groups = self._next()
        several = len(groups) >= min(SMALLER, self._limit() - self._issued)
        if several or sum(g.nbytes for g in groups) * 4 >= self._largest * self.prefetch:
            self._issue(groups)

    def _issue(self, groups: Sequence[Group]) -> None:
        # A numpy page may be taken over without a copy; pages never change, so that is safe.
        if groups:
            sent = self.link.send([group.pages for group in groups])
            self._ahead.extend(zip(groups, sent, strict=True))
            self._issued += len(groups)
