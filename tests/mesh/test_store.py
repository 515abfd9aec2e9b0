"""The page store and its stream alone: what is added is delivered, in order, byte for byte, from
every place, and nothing else is sent."""

from __future__ import annotations

import itertools
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxllm.cache.attention import empty_ring, join_page, ring_block, split_page, write_ring
from jaxllm.cache.groups import HostMemory, group_sizes
from jaxllm.cache.store import PageStore
from jaxllm.cache.stream import PageStream
from jaxllm.cache.types import CACHE_TYPES, CacheFormat
from support import PLACES, layer_config

PAGE, HEADS, DIM, LAYERS, ROWS = 4, 2, 3, 2, 3
SIZE = HEADS * PAGE * 2 * DIM * 4  # bytes of a page
MIXES = {
    "device": lambda layer, first: "device",
    "pinned": lambda layer, first: "pinned",
    "pageable": lambda layer, first: "pageable",
    "by layer": lambda layer, first: PLACES[layer % 3],
    "by page": lambda layer, first: PLACES[first // PAGE % 3],
    "scattered": lambda layer, first: PLACES[random.Random(7 * layer + first).randrange(3)],
}


def _page(layer: int, serial: int, arrays: int) -> tuple[np.ndarray, ...]:
    """One page that no other layer and serial number have."""
    whole = np.random.default_rng([layer, serial]).standard_normal(
        (HEADS, PAGE, 2 * DIM), np.float32
    )
    return (whole,) if arrays == 1 else (whole[..., :DIM], whole[..., DIM:])


def _store(group: int, place: Any, layers: int = 1, mixes: bool = True) -> PageStore:
    return PageStore(jax.devices()[0], layers, group, place, HostMemory(), mixes)


class Model:
    """A store beside what it must hold: the serial number of each page of a layer and row."""

    def __init__(self, place: str, group: int, prefetch: int, arrays: int, mixes: bool = True):
        self.group, self.prefetch, self.arrays = group, prefetch, arrays
        self.place = MIXES[place]
        self.store = _store(group, self.place, LAYERS, mixes)
        self.stream = PageStream(self.store, range(LAYERS), prefetch)
        self.held: dict[tuple[int, int], dict[int, int]] = {}  # serial number by first position
        self.parked: set[int] = set()
        self.next: dict[int, int] = dict.fromkeys(range(ROWS), 0)
        self.serials = itertools.count()

    def add(self, row: int, count: int) -> None:
        if row in self.parked:
            self.adopt(row, row, self.next[row] // PAGE)
        first, serials = self.next[row], [next(self.serials) for _ in range(count)]
        for layer in range(LAYERS):
            made = [_page(layer, serial, self.arrays) for serial in serials]
            pages = tuple(
                jax.device_put(np.stack(p), self.store.device) for p in zip(*made, strict=True)
            )
            self.store.add(row, first, {layer: pages})
            firsts = range(first, first + count * PAGE, PAGE)
            self.held.setdefault((layer, row), {}).update(zip(firsts, serials, strict=True))
        self.next[row] = first + count * PAGE

    def park(self, row: int) -> None:
        if row not in self.parked:
            self.store.park(row)
            self.parked.add(row)

    def unpark(self, row: int) -> None:
        self.store.unpark(row)
        self.parked.discard(row)

    def adopt(self, source: int, row: int, pages: int) -> None:
        end = min(pages * PAGE, self.next[source])
        self.store.adopt(source, row, end)
        for layer in range(LAYERS):
            had = self.held.get((layer, source), {})
            self.held[layer, row] = {first: own for first, own in had.items() if first < end}
        self.next[row] = end
        self.parked.discard(row)

    def release(self, row: int) -> None:
        self.store.release(row)
        self.next[row] = 0
        self.parked.discard(row)
        for layer in range(LAYERS):
            self.held.pop((layer, row), None)

    def trim(self, layer: int, row: int, oldest: int) -> None:
        if row in self.parked:
            return
        self.store.trim(layer, row, oldest)
        had = self.held.get((layer, row), {})
        self.held[layer, row] = {f: own for f, own in had.items() if f + PAGE > oldest}

    def visit(self, row: int, rows: int, again: bool) -> None:
        """One step: every page that its rows see arrives once and no other, with its own bytes,
        and is folded into each of those rows, in the order of positions."""
        sent, expected = self.stream.sent, 0
        self.stream.begin(row, rows, again)
        for layer in range(LAYERS):
            seen: dict[int, list[int]] = {}
            arrived: list[int] = []
            for pages, table in self.stream.visit(layer):
                alive = [group.nbytes for group, _ in self.stream._ahead] + self.stream._passed
                alive += itertools.chain(*(sizes for _, sizes in self.stream._busy))
                largest = sum(p.nbytes // len(p) for p in pages) * self.group
                assert sum(alive) <= max(1, self.prefetch) * largest
                assert len(alive) <= self.stream.most
                table, size = np.asarray(table).tolist(), len(pages[0])
                assert size in group_sizes(self.group)
                assert all(p.devices() == {self.store.device} for p in pages)
                *_, turn, folds = table
                assert len(table) == size + max(size, rows) + 2 and turn in (1, size)
                serials: dict[int, int] = {}  # by the page's place in the group
                for i in range(folds):
                    owner, first = table[size + i // turn], table[i % size]
                    own = self.held[layer, owner][first]
                    assert serials.setdefault(i % size, own) == own
                    seen.setdefault(owner, []).append(first)
                for i, serial in serials.items():
                    for page, whole in zip(pages, _page(layer, serial, self.arrays), strict=True):
                        assert np.asarray(page[i]).tobytes() == whole.tobytes()
                assert len(serials) == size
                arrived += serials.values()
                self.stream.done(pages[0][:1, :1, :1, :1])
            wanted = {
                owner: {} if owner in self.parked else self.held.get((layer, owner), {})
                for owner in range(row, row + rows)
            }
            assert seen == {owner: list(own) for owner, own in wanted.items() if own}
            places = {n: self.place(layer, f) for own in wanted.values() for f, n in own.items()}
            assert sorted(arrived) == sorted(places)
            expected += SIZE * sum(place != "device" for place in places.values())
        assert self.stream.sent - sent == expected

    def check_held(self) -> None:
        """The pages of all rows, of shared ones one."""
        made = {(layer, n) for (layer, _), own in self.held.items() for n in own.values()}
        assert sum(self.store.held_bytes().values()) == SIZE * len(made)
        for (layer, row), own in self.held.items():
            found = dict(self.store.row_pages(layer, row))
            some = dict(self.store.row_pages(layer, row, PAGE, 3 * PAGE))
            assert list(some) == [first for first in found if PAGE <= first < 3 * PAGE]
            assert list(found) == list(own)
            for first, arrays in found.items():
                for page, whole in zip(arrays, _page(layer, own[first], self.arrays), strict=True):
                    assert page.tobytes() == whole.tobytes()

    def groups(self, row: int, rows: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """First positions and rows of the groups of a step."""
        self.store.arrange(row, rows)
        return [(g.firsts, g.rows) for g, _ in self.store.wanted(0, row, rows)]


@pytest.mark.smoke
@pytest.mark.parametrize("arrays", [1, 2])
@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("place", MIXES)
def test_every_mix_of_places(place: str, group: int, arrays: int):
    """Counts of pages that no group size divides, one row and several, several steps in a row."""
    model = Model(place, group, 2, arrays)
    for row, count in [(0, 1), (1, 3), (0, 5), (2, 7), (0, 1), (1, 11)]:
        model.add(row, count)
        model.visit(row, 1, again=False)
        for _ in range(2):
            model.visit(0, ROWS, again=True)
    model.check_held()


ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(0, ROWS - 1), st.integers(1, 6)),
    st.tuples(st.just("release"), st.integers(0, ROWS - 1), st.just(0)),
    st.tuples(st.just("trim"), st.integers(0, ROWS - 1), st.integers(0, 60)),
    st.tuples(st.just("park"), st.integers(0, ROWS - 1), st.just(0)),
    st.tuples(st.just("unpark"), st.integers(0, ROWS - 1), st.just(0)),
    st.tuples(st.just("adopt"), st.integers(0, ROWS - 1), st.integers(0, 10 * ROWS)),
    st.tuples(st.just("row"), st.integers(0, ROWS - 1), st.booleans()),
    st.tuples(st.just("all"), st.just(0), st.booleans()),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    place=st.sampled_from(list(MIXES)),
    group=st.sampled_from([1, 2, 4, 8]),
    prefetch=st.sampled_from([1, 2, 4, 9]),
    arrays=st.sampled_from([1, 2]),
    mixes=st.booleans(),
    joins=st.booleans(),
    actions=st.lists(ACTIONS, max_size=12),
)
def test_random_lives(
    place: str, group: int, prefetch: int, arrays: int, mixes: bool, joins: bool, actions: list
):
    """Rows grow, shrink from the front, are set aside, begin as others do and go, in any order,
    between steps of one row or all. `joins`: on the device, as accelerators do."""
    model = Model(place, group, prefetch, arrays, mixes)
    model.store._groups._joins = joins
    for action, row, value in actions:
        if action == "add":
            model.add(row, value)
        elif action == "release":
            model.release(row)
        elif action == "trim":
            for layer in range(value % LAYERS, LAYERS):
                model.trim(layer, row, value)
        elif action == "park":
            model.park(row)
        elif action == "unpark":
            model.unpark(row)
        elif action == "adopt":
            model.adopt(row, value % ROWS, value // ROWS)
        elif action == "row":
            model.visit(row, 1, again=bool(value))
        else:
            model.visit(0, ROWS, again=bool(value))
        model.check_held()
        under_way = model.store._groups._joined  # on the device, whose room is bounded
        assert sum(len(each.firsts) for each in under_way) <= 2 * group
    model.visit(0, ROWS, again=False)


def test_new_groups_are_joined_when_a_step_begins():
    """Whoever is given a token before does not wait for it."""
    model = Model("pinned", 4, 2, 1)
    for _ in range(9):
        model.add(0, 1)
    assert [len(g.firsts) for g in model.store._in_order(0, {0})] == [1] * 9
    assert [len(firsts) for firsts, _ in model.groups(0, 1)] == [4, 4, 1]


def test_rows_that_step_together_send_large_groups():
    """Small groups of several rows are sent as one, and as the row's own to a row alone."""
    model = Model("pinned", 4, 2, 1)
    for row, count in enumerate((6, 3, 1)):
        model.add(row, count)
    firsts = [[0, 4, 8, 12], [16], [20]]
    assert model.groups(0, 1) == [(tuple(f), (0,)) for f in firsts]
    together = [((0, 4, 8, 12), (0,)), ((16, 20, 0, 4), (0, 0, 1, 1)), ((8,), (1,)), ((0,), (2,))]
    assert model.groups(0, ROWS) == together
    model.add(1, 1)
    model.add(0, 1)
    assert model.groups(0, ROWS) == [*together[:2], ((8, 0, 12, 24), (1, 2, 1, 0))]
    assert model.groups(0, 1) == [(tuple(f), (0,)) for f in (*firsts, [24])]
    assert model.groups(1, 1) == [((0, 4, 8, 12), (1,))]
    model = Model("pinned", 8, 2, 1)
    for row, count in enumerate((13, 5, 6)):
        model.add(row, count)
    sizes = [len(firsts) for firsts, _ in model.groups(0, ROWS)]
    assert sizes == [8, 8, 8]  # of 8 + 4 + 1, 4 + 1 and 4 + 1 + 1


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_join_that_fails_loses_no_page(failing: int, monkeypatch: pytest.MonkeyPatch):
    """New pages of a row that rests are still there when a step of another cannot join them."""
    model = Model("pinned", 4, 2, 1)
    for _ in range(9):
        model.add(0, 1)
    model.park(0)
    join, left = model.store._groups.join, iter(range(1, 9))

    def interrupted(groups: Any) -> Any:
        if next(left) == failing:
            raise KeyboardInterrupt
        return join(groups)

    monkeypatch.setattr(model.store._groups, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.visit(1, 1, False)
    model.check_held()
    model.visit(1, 1, False)
    model.check_held()
    model.adopt(0, 0, 9)
    assert model.groups(0, 1) == [((0, 4, 8, 12), (0,)), ((16, 20, 24, 28), (0,)), ((32,), (0,))]


def test_shared_pages_are_groups_of_their_own():
    """They are cut where what is shared ends, and joined again when no longer shared."""
    model = Model("pinned", 4, 2, 1)
    model.add(0, 13)
    whole = [((f, f + 4, f + 8, f + 12), (0,)) for f in (0, 16, 32)] + [((48,), (0,))]
    assert model.groups(0, 1) == whole
    model.adopt(0, 1, 6)
    model.add(1, 2)
    shared = [((0, 4, 8, 12), (0, 1)), ((16,), (0, 1)), ((20,), (0, 1))]
    assert model.groups(1, 1) == [*shared, ((24,), (1,)), ((28,), (1,))]
    assert model.groups(0, 1) == [*shared, ((24,), (0,)), ((28,), (0,)), *whole[2:]]
    model.release(1)
    assert model.groups(0, 1) == whole
    model.adopt(0, 1, 6)
    model.add(1, 3)
    rows = [((24,), (0,)), ((28,), (0,)), whole[2], ((48, 24, 28, 32), (0, 1, 1, 1))]
    assert model.groups(0, ROWS) == [*shared, *rows]


@pytest.mark.parametrize("mixes", [True, False])
def test_neither_place_nor_prefetch_moves_a_boundary(mixes: bool):
    """Of a step's groups."""

    def boundaries(place: str, prefetch: int) -> list[Any]:
        model, found = Model(place, 4, prefetch, 1, mixes), []
        for row, count in [(0, 7), (1, 3), (2, 9), (0, 4), (1, 1), (0, 2)]:
            model.add(row, count)
            model.visit(row, 1, again=False)
            found.append(model.groups(row, 1))
            model.visit(0, ROWS, again=True)
            found.append(model.groups(0, ROWS))
        model.adopt(0, 1, 5)
        model.add(1, 2)
        model.trim(0, 0, 9)
        return [*found, model.groups(1, 1), model.groups(0, ROWS)]

    expected = boundaries("device", 1)
    assert all(
        boundaries(place, prefetch) == expected
        for place, prefetch in itertools.product(("device", "pinned", "pageable"), (1, 2, 4))
    )


class _Later:
    """What a step gives that goes on until somebody waits for it."""

    over = False

    def is_ready(self) -> bool:
        return self.over

    def block_until_ready(self) -> None:
        self.over = True


@pytest.mark.parametrize("prefetch", [1, 2, 3, 4, 7, 9])
def test_copies_are_issued_before_the_step_that_they_would_wait_for(prefetch: int):
    model = Model("pinned", 1, prefetch, 1)
    model.add(0, 9)
    model.stream.begin(0, 1, again=False)
    for i, _ in enumerate(model.stream.visit(0)):
        assert len(model.stream._ahead) >= min(prefetch // 2, 8 - i)
        assert len(model.stream._ahead) + len(model.stream._busy) < prefetch  # and this one
        later: Any = _Later()
        model.stream.done(later)


def test_pages_are_not_changed_by_their_maker():
    """Memory that the maker writes to again is not the store's."""
    for place in PLACES:
        store = _store(2, lambda layer, first, place=place: place)
        [mine] = _page(0, 0, 1)
        kept = mine.copy()
        store.add(0, 0, {0: (jax.device_put(mine.copy()[None], jax.devices()[0]),)})
        mine[:] = 0
        stream = PageStream(store, range(1), 1)
        stream.begin(0, 1, again=False)
        [(pages, _)] = stream.visit(0)
        assert np.asarray(pages[0]).tobytes() == kept.tobytes()


@pytest.mark.parametrize("types", [("q8_0", "q8_0"), ("q4_0", "q4_0"), ("q8_0", "q4_0")])
def test_quantised_pages_keep_their_scales(types: tuple[str, str]):
    """From a ring through each place and back: codes with the scales of their own position."""
    cache = CacheFormat(*(CACHE_TYPES[name] for name in types))
    cfg = layer_config(HEADS, 1, 64, v_dim=32, cache=cache)
    positions = 5 * PAGE
    ones = np.ones((1, positions, HEADS, 64), np.float32)
    # The scales of a head's row at a position are those of no other row.
    ones *= np.arange(1, 1 + positions * HEADS).reshape(1, positions, HEADS, 1)
    k, v = ones * np.linspace(-8, 7, 64, dtype=np.float32), 0.5 * ones[..., :32]
    zero = jnp.int32(0)
    ring = empty_ring(cfg, (1, HEADS, positions), None)
    ring = write_ring(cfg, ring, jnp.asarray(k), jnp.asarray(v), zero, zero[None])
    for place in PLACES:
        store = _store(4, lambda layer, first, place=place: place)
        for first in range(0, positions, PAGE):
            page = join_page(*ring_block(ring, zero, 1, zero[None] + first, PAGE))
            store.add(0, first, {0: page})
        stream = PageStream(store, range(1), 2)
        stream.begin(0, 1, again=False)
        pages = []
        for group, table in stream.visit(0):
            assert len(group) == 1 and group[0].dtype == jnp.uint8
            pages += [split_page(cfg, (page[None],)) for page in group[0]]
            stream.done(table)
        found = [jnp.concatenate(part, axis=2) for part in zip(*pages, strict=True)]
        for moved, own, name, values in zip(found, ring, types, (k, v), strict=True):
            assert np.asarray(moved).tobytes() == np.asarray(own).tobytes()
            blocks = np.asarray(moved).reshape(HEADS, positions, -1, CACHE_TYPES[name].row(32))
            scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]
            largest = values[0].reshape(positions, HEADS, -1, 32)
            at = np.abs(largest).argmax(-1, keepdims=True)
            largest = np.take_along_axis(largest, at, -1)[..., 0].swapaxes(0, 1)
            expected = np.abs(largest) / np.float32(127) if name == "q8_0" else largest / -8
            np.testing.assert_array_equal(scales, expected.astype(np.float16))


def test_copies_ahead_go_round_to_the_next_step():
    """With copies ahead, the next step's first groups are under way when a step ends."""
    model = Model("pinned", 1, 4, 1)
    model.add(0, 6)
    model.visit(0, ROWS, again=True)
    assert model.stream._ahead
    model.visit(0, ROWS, again=True)
    assert model.stream.discarded == 0
    model.visit(0, ROWS, again=False)
    model.release(0)
    model.visit(0, ROWS, again=False)
