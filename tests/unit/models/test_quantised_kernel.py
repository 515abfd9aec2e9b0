"""The kernel of quantised products, its instructions done one by one on the host."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as T
from ptx import Block

from jaxllm.gguf.blocks import BLOCK_TYPES, BlockType
from jaxllm.models import quantised_ptx
from jaxllm.models.quantised import WARPS, Quantised
from jaxllm.models.quantised_ptx import LANES, Program


def random_matrix(kind: BlockType, out: int, size: int) -> Quantised:
    """Codes of every value that a type has, with random scales."""
    random, parts = np.random.default_rng(0), {}
    for name, part in kind.parts.items():
        shape = (out, size // part.packs)
        if part.dtype.kind == "f":
            parts[name] = random.standard_normal(shape).astype(part.dtype)
        elif name == "words":
            words = random.integers(-(2**31), 2**31, shape, np.int32)
            five_bits = kind.bits == 8 and not kind.signed
            parts[name] = words & 0x1F1F1F1F if five_bits else words
        else:
            low = -64 if part.dtype.kind == "i" else 0
            parts[name] = random.integers(low, 64, shape).astype(part.dtype)
    return Quantised(kind, np.dtype(np.float32), parts)


def error(w: Quantised, n: int) -> float:
    """NMSE of what the kernel makes of n rows."""
    out, size = w.shape
    x = jnp.asarray(np.random.default_rng(1).standard_normal((n, size)), jnp.bfloat16)
    exact = np.asarray(x, np.float64) @ np.asarray(w.values(), np.float64).T
    program, found = Program(w.kind, n, w.shape), np.full((n, out), np.nan, np.float32)
    parts = [np.asarray(w.parts[name]) for name in w.kind.parts]
    arrays = [np.array(x).view(np.uint16), *parts, found]
    shared = [int(np.prod(program.copies)), 4 * int(np.prod(program.sums))]
    block = Block(program.text(), arrays, shared, WARPS * LANES)
    for group in range(program.groups):
        block.run(group)
    return float(np.square(found - exact).sum() / np.square(exact).sum())


@pytest.mark.parametrize("kind", BLOCK_TYPES, ids=lambda kind: kind.name)
def test_it_is_exact_but_for_the_order_of_sums(kind: T):
    assert error(random_matrix(BLOCK_TYPES[kind], 16, 2048), 1) < 1e-13


@pytest.mark.parametrize(
    "kind, size, n",
    [
        (T.Q4_K, 1280, 1),  # rows that begin between two words, and warps without a last span
        (T.Q6_K, 1280, 3),
        (T.Q4_0, 3328, 2),
        (T.Q8_0, 5120, 4),  # more turns than are on their way
    ],
)
def test_spans_that_do_not_fill_all_warps(kind: T, size: int, n: int):
    assert error(random_matrix(BLOCK_TYPES[kind], 16, size), n) < 1e-13


@pytest.mark.parametrize("kind, size", [(T.Q4_K, 4096), (T.Q8_0, 6144), (T.Q4_0, 3328)])
def test_groups_go_on_to_further_tiles(monkeypatch: pytest.MonkeyPatch, kind: T, size: int):
    monkeypatch.setattr(quantised_ptx, "MULTIPROCESSORS", 1)  # three or four groups
    assert error(random_matrix(BLOCK_TYPES[kind], 7 * 16, size), 1) < 1e-13


@pytest.mark.parametrize("span", [32, 64, 128])
def test_spans_that_a_cut_has_shortened(span: int):
    kind = BLOCK_TYPES[T.Q4_K].cut_at(span)
    assert kind is not None and kind.span == span
    assert error(random_matrix(kind, 16, 1024), 1) < 1e-13


def test_what_it_is_for():
    kind = replace(BLOCK_TYPES[T.Q4_0], kernel=True)
    w, x = random_matrix(kind, 32, 1024), jnp.zeros((1, 1024), jnp.bfloat16)
    assert w.has_kernel(x)
    assert w.has_kernel(jnp.zeros((4, 1024), jnp.bfloat16))
    assert not w.has_kernel(jnp.zeros((5, 1024), jnp.bfloat16))
    assert not w.has_kernel(x.astype(jnp.float32))
    wide = random_matrix(kind, 16, 2 * 14336)  # of which memory has room for two rows of x
    assert wide.has_kernel(jnp.zeros((2, 2 * 14336), jnp.bfloat16))
    assert not wide.has_kernel(jnp.zeros((3, 2 * 14336), jnp.bfloat16))
    assert not w[:24].has_kernel(x)  # one of several matrices, and rows that fill no tile
    assert not random_matrix(kind, 24, 1024).has_kernel(x)
    assert not random_matrix(kind, 32, 768).has_kernel(jnp.zeros((1, 768), jnp.bfloat16))
    assert not random_matrix(kind, 32, 1152).has_kernel(jnp.zeros((1, 1152), jnp.bfloat16))
    assert not random_matrix(BLOCK_TYPES[T.Q4_0], 32, 1024).has_kernel(x)
