"""Chunks of a prefill: every position once, in order, in programs that a ring can write."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.engine.prefill import chunk_sizes, chunks

UBATCHES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048]


@given(st.integers(0, 300), st.integers(0, 3000), st.sampled_from(UBATCHES))
def test_every_position_once_in_programs_that_exist(blocks: int, count: int, ubatch: int):
    """From any multiple of the smallest size on."""
    at = start = blocks * chunk_sizes(ubatch)[0]
    for position, used, size in chunks(start, count, ubatch):
        assert position == at and 0 < used <= size
        assert size in chunk_sizes(ubatch)
        assert position // ubatch == (position + size - 1) // ubatch
        at += used
    assert at == start + count


@given(st.integers(1, 3000), st.sampled_from(UBATCHES))
def test_only_the_last_program_is_padded(count: int, ubatch: int):
    *before, (_, used, size) = chunks(0, count, ubatch)
    assert all(each_used == each_size for _, each_used, each_size in before)
    assert used == size or not [n for n in chunk_sizes(ubatch) if used <= n < size]


@pytest.mark.parametrize(
    ("ubatch", "sizes"),
    [
        (1, (1,)),
        (8, (8,)),
        (16, (16,)),
        (32, (16, 32)),
        (64, (16, 64)),
        (128, (16, 64, 128)),
        (512, (16, 64, 256, 512)),
        (1024, (16, 64, 256, 1024)),
    ],
)
def test_chunk_sizes(ubatch: int, sizes: tuple[int, ...]):
    assert chunk_sizes(ubatch) == sizes


def test_a_whole_prompt():
    assert list(chunks(0, 150, 64)) == [(0, 64, 64), (64, 64, 64), (128, 22, 64)]
    assert list(chunks(0, 70, 64)) == [(0, 64, 64), (64, 6, 16)]
    assert list(chunks(0, 0, 64)) == []
