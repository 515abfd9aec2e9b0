"""One device's full pages: which rows have them, and in which groups they are kept.

    ring tail --add--> groups of pages --wanted--> `PageStream` --> attention

A page knows its layer, first position and rows (rule: identity is data). Since pages never change,
rows that begin alike share them (`adopt`): a page is kept once and goes over the link once a step.

A step is of one row or of all, and sends no page that its rows do not see. So groups are of pages
that have the same rows, apart from these: rows that step together find the last, small groups of
each mixed into larger ones (`arrange`). A row that steps alone gets its pages back from there, and
so does one whose sequence has ended or rests. Such a row may be parked: no step wants its pages,
until it goes on, or it or another one begins with them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain, pairwise
from typing import Final

import numpy as np

from jaxllm.cache.groups import Group, GroupMaker, HostMemory, NewGroup, Pages, Rows, take
from jaxllm.models.layers import Array, Device
from sharding.links import Place

MIXED: Final = None  # in the place of the rows of a run
Run = Rows | None
NewRows = Callable[[Rows, range], Rows]  # of a page, from those that it has and its positions


class PageStore:
    """See the module's docstring. Only the thread that runs the engine may call a store.

    place(layer, first position) says where a page goes; layers are numbered as the plan does. With
    `mixes` off no groups are mixed, for engines in whose steps one row and all take turns.

    For each layer there are runs of groups. A row's pages are in ascending order if the groups of
    all its runs are taken by their first positions, and then the mixed ones.
    """

    def __init__(
        self,
        device: Device,
        layers: int,
        group_pages: int,
        place: Callable[[int, int], Place],
        host: HostMemory,
        mixes: bool = True,
    ):
        self.device, self.place, self.mixes = device, place, mixes
        self.group_pages = group_pages  # of the largest groups
        self._groups = GroupMaker(device, group_pages, host)
        self._runs: list[dict[Run, list[Group]]] = [{} for _ in range(layers)]
        self._unjoined: dict[tuple[int, Run], None] = {}  # runs of layers with new groups, in order
        self._together: set[int] = set()  # rows that step together
        self._parked: set[int] = set()

    def add(self, row: int, first: int, layers: Mapping[int, tuple[Array, ...]]) -> None:
        """Take over full pages [M, K, P, ...] of one row from position `first` on, by layer. They
        are joined at the beginning of the next step (`arrange`), which alone has to wait for it."""
        mixed = row in self._together
        run = MIXED if mixed else (row,)
        new = []
        for layer, pages in layers.items():
            groups = self._runs[layer].setdefault(run, [])
            new += [(groups, each) for each in self._new(layer, first, pages, groups, mixed)]
        made = self._groups.make_all([each for _, each in new], (row,), mixed)
        for (groups, _), group in zip(new, made, strict=True):
            if mixed:
                self._push(groups, group)
            else:
                groups.append(group)
        if not mixed:
            self._unjoined |= dict.fromkeys((layer, run) for layer in layers)

    def _new(
        self, layer: int, first: int, pages: Pages, groups: list[Group], mixed: bool
    ) -> list[NewGroup]:
        """New pages of a run as one group, if that is what joining them would make; else each as
        one."""
        count, size = len(pages[0]), pages[0].shape[2]
        firsts = tuple(range(first, first + size * count, size))
        places: list[Place] = [self.place(layer, at) for at in firsts]
        smallest = len(groups[-1].firsts) if groups else count
        fits = count in self._groups.sizes and count <= smallest and len({*places}) == 1
        if fits and not mixed:
            return [NewGroup(pages, firsts, places[0])]
        own = (take(pages, [i]) for i in range(count)) if count > 1 else [pages]
        return [NewGroup(*each) for each in zip(own, zip(firsts), places, strict=True)]

    def release(self, row: int) -> None:
        """Drop a row's pages."""
        for layer in range(len(self._runs)):
            self._change(layer, {row}, lambda rows, _: _without(rows, row))
        self._parked.discard(row)
        self._together.discard(row)
        self._groups.host.freed()

    def park(self, row: int) -> None:
        """Set a row's pages aside: no step wants them."""
        self._set_apart(row)
        self._parked.add(row)

    def unpark(self, row: int) -> None:
        """Let steps want a row's pages again."""
        self._parked.discard(row)

    def adopt(self, source: int, row: int, end: int) -> None:
        """Let a row consist of the pages of `source` (a row, maybe the same one) before position
        `end`. No byte is copied of groups that lie before it as a whole."""

        def begun(rows: Rows, positions: range) -> Rows:
            shared = source in rows and positions.start < end
            return tuple(sorted({*rows, row})) if shared else _without(rows, row)

        for layer in range(len(self._runs)):
            self._change(layer, {source, row}, begun, apart=row)
        self._parked.discard(row)
        self._together.discard(row)
        self._groups.host.freed()

    def trim(self, layer: int, row: int, oldest: int) -> None:
        """Drop a row's pages that end before position `oldest`."""

        def left(rows: Rows, positions: range) -> Rows:
            return _without(rows, row) if positions.stop <= oldest else rows

        self._change(layer, {row}, left)

    def arrange(self, row: int, rows: int) -> None:
        """Make ready for a step of rows row .. row + rows: join new groups, mix small ones of those
        that step together, and take those of one that steps alone out again."""
        for layer, run in self._unjoined:
            if joined := self._joined(self._runs[layer].get(run, [])):
                self._runs[layer][run] = joined  # all or none: a join may fail, or be interrupted
        self._unjoined.clear()
        if rows == 1:
            self._set_apart(row)
        elif self.mixes:
            for each in set(range(row, row + rows)) - self._together - self._parked:
                self._mix(each)

    def wanted(self, layer: int, row: int, rows: int) -> list[tuple[Group, Array]]:
        """The groups with pages that a step of these rows sees, in the order of use, and their
        tables."""
        active = set(range(row, row + rows)) - self._parked
        found = []
        for group in self._in_order(layer, active):
            seen_by = tuple(sorted(active & group.owners))
            found.append((group, self._groups.table(group, seen_by, rows)))
        return found

    def row_pages(
        self, layer: int, row: int, start: int = 0, stop: int | None = None
    ) -> Iterator[tuple[int, Pages]]:
        """First position and arrays [K, P, ...] in host memory of each page of a row, parked or
        not, in ascending order: of those that begin at `start` or later, and before `stop`."""
        for group in self._in_order(layer, {row}):
            own = [(i, first) for i, first in enumerate(group.firsts) if row in group.rows_of(i)]
            own = [(i, n) for i, n in own if n >= start and (stop is None or n < stop)]
            pages = tuple(np.asarray(p) for p in group.pages) if own else ()
            for i, first in own:
                yield first, tuple(p[i] for p in pages)

    def held_bytes(self) -> dict[Place, int]:
        """Bytes of the pages held, by place; of those that rows share, once."""
        held: dict[Place, int] = {"device": 0, "pinned": 0, "pageable": 0}
        for layer in range(len(self._runs)):
            for group in self._all(layer):
                held[group.place] += group.nbytes
        return held

    def _all(self, layer: int) -> Iterator[Group]:
        return chain.from_iterable(self._runs[layer].values())

    def _in_order(self, layer: int, rows: set[int]) -> list[Group]:
        """The groups with pages of these rows, each row's in the order of positions."""
        found = (group for group in self._all(layer) if not rows.isdisjoint(group.owners))
        return sorted(found, key=lambda g: (g.mixed, 0 if g.mixed else g.firsts[0]))

    def _mix(self, row: int) -> None:
        """Put the last groups of a row that are not of the largest size among the mixed ones."""
        self._together.add(row)
        for runs in self._runs:
            own = runs.get((row,), [])
            others = [groups for run, groups in runs.items() if run and len(run) > 1 and row in run]
            shared = max((groups[-1].end for groups in others), default=0)
            at, largest = len(own), self._groups.sizes[-1]
            while at and own[at - 1].firsts[0] >= shared and len(own[at - 1].firsts) < largest:
                at -= 1
            moved, own[at:] = own[at:], []
            for group in moved:
                rows = (row,) * len(group.firsts)
                self._push(runs.setdefault(MIXED, []), group.given_to(rows, mixed=True))

    def _set_apart(self, row: int) -> None:
        """Take a row's pages out of mixed groups."""
        if row in self._together:
            for layer in range(len(self._runs)):
                self._change(layer, {row}, lambda rows, _: rows, apart=row)
            self._together.discard(row)

    def _change(
        self, layer: int, touched: set[int], new_rows: NewRows, apart: int | None = None
    ) -> None:
        """Give each page of the rows `touched` its new rows; one without any is dropped. None of
        the row `apart` stays in a mixed group, nor one whose rows have changed."""
        if all(touched.isdisjoint(group.owners) for group in self._all(layer)):
            return
        runs: dict[Run, list[Group]] = {}
        for group in self._all(layer):
            if touched.isdisjoint(group.owners):
                runs.setdefault(MIXED if group.mixed else group.rows, []).append(group)
                continue
            for run, index in _by_run(group, new_rows, apart).items():
                for part in self._groups.cut(group, index):
                    runs.setdefault(run, []).append(part.given_to(run) if run else part)
        for run, groups in runs.items():
            if run is not MIXED:
                groups.sort(key=lambda group: group.firsts[0])
            runs[run] = self._joined(groups)
        self._runs[layer] = runs

    def _joined(self, groups: list[Group]) -> list[Group]:
        """The groups of a run, those joined that fill a larger one."""
        found: list[Group] = []
        for group in groups:
            self._push(found, group)
        return found

    def _push(self, groups: list[Group], group: Group) -> None:
        """Add to a run; then join as long as the groups up to there fill one of the next size.

        A mixed group goes before smaller ones of other rows, which would keep it from its like.
        Others are joined only without a gap between them, in which shared pages might be.
        """
        end, sizes = len(groups), self._groups.sizes
        while group.mixed and end and _goes_before(group, groups[end - 1]):
            end -= 1
        groups.insert(end, group)
        end += 1
        for small, large in pairwise(sizes):
            start = end - large // small
            last = groups[max(0, start) : end]
            same = {(len(g.firsts), g.place) for g in last} == {(small, group.place)}
            if start < 0 or not same:
                continue
            if group.mixed or all(a.end == b.firsts[0] for a, b in pairwise(last)):
                groups[start:end] = [self._groups.join(last)]
                end = start + 1


def _goes_before(group: Group, other: Group) -> bool:
    return len(group.firsts) > len(other.firsts) and group.owners.isdisjoint(other.owners)


def _by_run(group: Group, new_rows: NewRows, apart: int | None) -> dict[Run, list[int]]:
    """The indices of a group's pages by the run that they go to (`PageStore._change`)."""
    found: dict[Run, list[int]] = {}
    for i, first in enumerate(group.firsts):
        old = group.rows_of(i)
        new = new_rows(old, range(first, first + group.page))
        stays = group.mixed and new == old and apart not in old
        if new:
            found.setdefault(MIXED if stays else new, []).append(i)
    return found


def _without(rows: Rows, row: int) -> Rows:
    return tuple(r for r in rows if r != row)
