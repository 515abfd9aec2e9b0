"""The page store alone: what is added is delivered, in order, byte for byte, from every place."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxllm.cache.attention import empty_ring, join_page, ring_block, split_page, write_ring
from jaxllm.cache.store import PageStore
from jaxllm.cache.types import CACHE_TYPES, CacheFormat
from support import PLACES, layer_config

PAGE, HEADS, DIM, LAYERS, ROWS = 4, 2, 3, 2, 3
MIXES = {
    "device": lambda layer, first: "device",
    "pinned": lambda layer, first: "pinned",
    "pageable": lambda layer, first: "pageable",
    "by layer": lambda layer, first: PLACES[layer % 3],
    "by page": lambda layer, first: PLACES[first // PAGE % 3],
    "scattered": lambda layer, first: PLACES[random.Random(7 * layer + first).randrange(3)],
}


def _pages(layer: int, row: int, first: int, count: int, arrays: int) -> tuple[np.ndarray, ...]:
    """Pages that no other call makes."""
    seeds = [[layer, row, first + i * PAGE] for i in range(count)]
    whole = [
        np.random.default_rng(s).standard_normal((HEADS, PAGE, 2 * DIM), np.float32) for s in seeds
    ]
    stacked = np.stack(whole)
    return (stacked,) if arrays == 1 else (stacked[..., :DIM], stacked[..., DIM:])


class Model:
    """A store beside what it must hold: the first positions of each layer and row."""

    def __init__(self, place: str, group: int, prefetch: int, arrays: int):
        self.device = jax.devices()[0]
        self.prefetch, self.arrays, self.place = prefetch, arrays, MIXES[place]
        self.store = PageStore(self.device, range(LAYERS), group, prefetch, self.place)
        self.group = group
        self.held: dict[tuple[int, int], dict[int, int]] = {}  # first position: maker
        self.parked: set[int] = set()
        self.next: dict[int, int] = dict.fromkeys(range(ROWS), 0)

    def add(self, row: int, count: int) -> None:
        if row in self.parked:
            self.adopt(row, row, self.next[row] // PAGE)
        first = self.next[row]
        for layer in range(LAYERS):
            pages = _pages(layer, row, first, count, self.arrays)
            self.store.add(layer, row, first, tuple(jax.device_put(p, self.device) for p in pages))
            firsts = range(first, first + count * PAGE, PAGE)
            self.held.setdefault((layer, row), {}).update(dict.fromkeys(firsts, row))
        self.next[row] = first + count * PAGE

    def park(self, row: int) -> None:
        if row not in self.parked:
            self.store.park(row)
            self.parked.add(row)

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
        """One step over rows: every page of theirs arrives, in order, with its own bytes."""
        sent, delivered = self.store.sent, 0
        self.store.begin(row, rows, again)
        for layer in range(LAYERS):
            seen: dict[int, list[int]] = {}
            for pages, table in self.store.visit(layer, row, rows):
                assert len(self.store._ahead) + len(self.store._busy) <= max(1, self.prefetch)
                table, size = np.asarray(table), len(pages[0])
                assert size == table[-1] <= self.group and len(table) == 2 * size + 1
                assert all(p.devices() == {self.device} for p in pages)
                for i, (owner, first) in enumerate(zip(table[:size], table[size:-1], strict=True)):
                    maker = self.held[layer, int(owner)][int(first)]
                    expected = _pages(layer, maker, int(first), 1, self.arrays)
                    for page, whole in zip(pages, expected, strict=True):
                        assert np.asarray(page[i]).tobytes() == whole[0].tobytes()
                    seen.setdefault(int(owner), []).append(int(first))
                    if self.place(layer, int(first)) != "device":
                        delivered += sum(p[i].nbytes for p in pages)
                self.store.done(pages[0][:1, :1, :1, :1])
            for owner in range(row, row + rows):
                wanted = {} if owner in self.parked else self.held.get((layer, owner), {})
                assert seen.get(owner, []) == list(wanted)
        assert self.store.sent - sent == delivered

    def check_held(self) -> None:
        """No more than the pages of all rows, no less than what differs between them."""
        pages = sum(map(len, self.held.values()))
        made = {(layer, *page) for (layer, _), had in self.held.items() for page in had.items()}
        size = HEADS * PAGE * 2 * DIM * 4
        assert len(made) * size <= sum(self.store.held_bytes().values()) <= pages * size
        for (layer, row), had in self.held.items():
            found = dict(self.store.row_pages(layer, row))
            assert list(found) == list(had)
            for first, arrays in found.items():
                expected = _pages(layer, had[first], first, 1, self.arrays)
                for page, whole in zip(arrays, expected, strict=True):
                    assert page.tobytes() == whole[0].tobytes()


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
    st.tuples(st.just("adopt"), st.integers(0, ROWS - 1), st.integers(0, 10 * ROWS)),
    st.tuples(st.just("row"), st.integers(0, ROWS - 1), st.booleans()),
    st.tuples(st.just("all"), st.just(0), st.booleans()),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    place=st.sampled_from(list(MIXES)),
    group=st.sampled_from([1, 2, 4, 8]),
    prefetch=st.sampled_from([1, 2, 4]),
    arrays=st.sampled_from([1, 2]),
    actions=st.lists(ACTIONS, max_size=12),
)
def test_random_lives(place: str, group: int, prefetch: int, arrays: int, actions: list):
    """Rows grow, shrink from the front, are set aside, begin as others do and go, in any order,
    between steps of one row or all."""
    model = Model(place, group, prefetch, arrays)
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
        elif action == "adopt":
            model.adopt(row, value % ROWS, value // ROWS)
        elif action == "row":
            model.visit(row, 1, again=bool(value))
        else:
            model.visit(0, ROWS, again=bool(value))
        model.check_held()
    model.visit(0, ROWS, again=False)


def test_pages_are_not_changed_by_their_maker():
    """Memory that the maker writes to again is not the store's."""
    for place in PLACES:
        store = PageStore(jax.devices()[0], range(1), 2, 1, lambda layer, first, place=place: place)
        [mine] = _pages(0, 0, 0, 1, 1)
        kept = mine.copy()
        store.add(0, 0, 0, (jax.device_put(mine.copy(), jax.devices()[0]),))
        mine[:] = 0
        store.begin(0, 1, again=False)
        [(pages, _)] = store.visit(0, 0, 1)
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
        store = PageStore(jax.devices()[0], range(1), 4, 2, lambda layer, first, place=place: place)
        for first in range(0, positions, PAGE):
            store.add(0, 0, first, join_page(*ring_block(ring, zero, 1, zero[None] + first, PAGE)))
        store.begin(0, 1, again=False)
        pages = []
        for group, table in store.visit(0, 0, 1):
            assert len(group) == 1 and group[0].dtype == jnp.uint8
            pages += [split_page(cfg, (page[None],)) for page in group[0]]
            store.done(table)
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
    assert model.store._ahead
    model.visit(0, ROWS, again=True)
    assert model.store.discarded == 0
    model.visit(0, ROWS, again=False)
    model.release(0)
    model.visit(0, ROWS, again=False)
