"""Attention over blocks of keys, one after the other, is attention over all of them."""

from __future__ import annotations

from math import log

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import naive
from jaxllm.cache.attention import (
    Carry,
    Ring,
    attend_block,
    attend_ring,
    attend_span,
    decode_spans,
    finish,
    queries_first,
    start_carry,
    visible_positions,
    write_ring,
)
from jaxllm.cache.flash import Parts, with_parts
from jaxllm.models.config import LayerConfig
from support import layer_config, nmse

KEYS, QUERIES, HEADS, GROUP, DIM, VALUE = 300, 3, 2, 2, 8, 6


def _tensors(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries at the last positions, whose scores reach far enough that sums need rescaling."""
    random = np.random.default_rng(seed)
    q = random.standard_normal((1, QUERIES, HEADS, GROUP, DIM)).astype(np.float32) * 6
    k = random.standard_normal((1, HEADS, KEYS, DIM)).astype(np.float32)
    k *= np.linspace(0.2, 3, KEYS, dtype=np.float32)[:, None]  # later keys score higher
    v = random.standard_normal((1, HEADS, KEYS, VALUE)).astype(np.float32)
    return q, k, v


def _fold(cfg: LayerConfig, parts: list[tuple[int, int]], masked: int | None = None) -> np.ndarray:
    """Attention over parts of the keys; with `masked`, also over a block that nobody may see, in
    that place of the order."""
    q, k, v = _tensors()
    turned = queries_first(jnp.asarray(q))
    carry = start_carry(turned, VALUE)
    positions = jnp.arange(KEYS - QUERIES, KEYS)[None]
    floor = jnp.zeros((1,), jnp.int32)

    def block(carry: Carry, start: int, stop: int, first: int) -> Carry:
        keys = jnp.arange(first, first + stop - start)[None]
        seen = visible_positions(cfg, positions, keys, floor)
        return attend_block(cfg, carry, turned, k[:, :, start:stop], v[:, :, start:stop], seen)

    for i, (start, stop) in enumerate(parts):
        if masked == i:
            carry = block(carry, 0, 16, KEYS + 16)  # in the future of all queries
        carry = block(carry, start, stop, start)
    return np.asarray(finish(carry, jnp.float32))


def _whole(cfg: LayerConfig) -> np.ndarray:
    q, k, v = (a.astype(np.float64) for a in _tensors())
    out = np.zeros((1, QUERIES, HEADS, GROUP, VALUE))
    for head in range(HEADS):
        for g in range(GROUP):
            out[0, :, head, g] = naive.attention(q[0, :, head, g], k[0, head], v[0, head], cfg)
    return out


@pytest.mark.smoke
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("masked", [None, 0, 1])
def test_parts_merge(window: int | None, softcap: float | None, masked: int | None):
    cfg = layer_config(HEADS, GROUP, DIM, scale=0.5, window=window, softcap=softcap)
    split = [(0, 256), (256, 300)]
    found = _fold(cfg, split, masked)
    assert np.isfinite(found).all()
    assert nmse(found, _whole(cfg)) <= 1e-11
    assert nmse(found, _fold(cfg, [(0, 300)])) <= 1e-11


def test_what_a_kernel_has_joins_a_carry():
    """Parts as the kernel leaves them, of which one has seen nothing, in tiles that are not full:
    m in base two, [N, parts, K, Q]."""
    cfg = layer_config(HEADS, GROUP, DIM, scale=0.5)
    q, k, v = _tensors()
    turned = queries_first(jnp.asarray(q))
    positions, floor = jnp.arange(KEYS - QUERIES, KEYS)[None], jnp.zeros((1,), jnp.int32)

    def over(start: int, stop: int) -> Carry:
        seen = visible_positions(cfg, positions, jnp.arange(start, stop)[None], floor)
        own = k[:, :, start:stop], v[:, :, start:stop]
        return attend_block(cfg, start_carry(turned, VALUE), turned, *map(jnp.asarray, own), seen)

    def tiles(carry: Carry) -> Parts:
        flat = (a.reshape(1, 1, HEADS, GROUP * QUERIES, *a.shape[4:]) for a in carry[:3])
        m, l, acc = (  # noqa: E741
            jnp.pad(a, [(0, 0)] * 3 + [(0, 5)] + [(0, 0)] * (a.ndim - 4)) for a in flat
        )
        return Parts(m / log(2), l, acc)

    parts = [tiles(over(0, 100)), tiles(start_carry(turned, VALUE)), tiles(over(100, 220))]
    whole = Parts(*(jnp.concatenate(each, axis=1) for each in zip(*parts, strict=True)))
    found = finish(with_parts(over(220, KEYS), whole, turned), jnp.dtype(jnp.float32))
    assert nmse(np.asarray(found), _whole(cfg)) <= 1e-11


@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.sampled_from(range(20, 300, 20)), max_size=5, unique=True))
def test_any_parts_merge(cuts: list[int]):
    cfg = layer_config(HEADS, GROUP, DIM, scale=0.5)
    edges = [0, *sorted(cuts), KEYS]
    found = _fold(cfg, list(zip(edges, edges[1:], strict=False)))
    assert nmse(found, _whole(cfg)) <= 1e-11


def test_masked_block_leaves_the_carry():
    """Bit for bit: so pages of other rows in a group change nothing."""
    cfg = layer_config(HEADS, GROUP, DIM, scale=0.5)
    plain = _fold(cfg, [(0, 256), (256, 300)])
    assert plain.tobytes() == _fold(cfg, [(0, 256), (256, 300)], masked=1).tobytes()


@pytest.mark.parametrize("rows", [2, 3])
def test_a_row_that_takes_no_part_is_not_written(rows: int):
    """A negative start, beside a row at the last position and one past it, which is the first."""
    cfg = layer_config(2, 1, 4)
    ring = Ring(*(jnp.full((rows, 2, 8, 4), 7.0) for _ in range(2)))
    starts = jnp.asarray([-1, 7, 8][:rows])
    new = jnp.arange(rows * 8.0).reshape(rows, 1, 2, 4)
    found = write_ring(cfg, ring, new, new, jnp.int32(0), starts)
    expected = np.full((rows, 2, 8, 4), 7.0, np.float32)
    for row, start in enumerate(starts.tolist()):
        if start >= 0:
            expected[row, :, start % 8] = new[row, 0]
    for side in found:
        np.testing.assert_array_equal(side, expected)


@pytest.mark.parametrize(
    ("window", "capacity", "positions"),
    [(None, 64, [5, 12, -1]), (24, 64, [5, 63, -1]), (24, 64, [64, 100, 200])],
)
def test_a_span_is_the_ring(window: int | None, capacity: int, positions: list[int]):
    """One token of three rows, read at once or block by block; slots that are not seen hold junk,
    and the third case has been around the ring."""
    cfg = layer_config(HEADS, GROUP, DIM, scale=0.5, window=window, v_dim=VALUE)
    random = np.random.default_rng(1)
    rows = len(positions)
    k = random.standard_normal((rows, HEADS, capacity, DIM)).astype(np.float32)
    v = random.standard_normal((rows, HEADS, capacity, VALUE)).astype(np.float32)
    q = queries_first(jnp.asarray(random.standard_normal((rows, 1, HEADS, GROUP, DIM)), k.dtype))
    ring, row = Ring(jnp.asarray(k), jnp.asarray(v)), jnp.zeros((), jnp.int32)
    at = jnp.asarray(positions)[:, None]
    whole = finish(attend_ring(cfg, start_carry(q, VALUE), q, ring, row, at), k.dtype)
    for span in (s for s in (16, capacity) if s > max(min(p, capacity - 1) for p in positions)):
        found = finish(attend_span(cfg, start_carry(q, VALUE), q, ring, row, at, span), k.dtype)
        assert nmse(np.asarray(found), np.asarray(whole)) < 1e-12


def test_spans():
    assert decode_spans(512) == (512,)
    assert decode_spans(2048) == (512, 2048)
    assert decode_spans(32768) == (512, 1024, 2048, 4096, 8192, 32768)
