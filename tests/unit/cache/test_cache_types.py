"""Stored rows are ggml's blocks, byte for byte; rotations change no score."""

from __future__ import annotations

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.cache.types import CACHE_TYPES, hadamard, rotate
from sharding import CACHE_BLOCKS, row_bytes

DIM = 64
QUANTISED = ("q8_0", "q4_0")


def _ggml(name: str, x: np.ndarray) -> np.ndarray:
    kind = gguf.GGMLQuantizationType[name.upper()]
    with np.errstate(over="ignore"):  # a scale past float16 is infinite
        return gguf.quants.quantize(x.reshape(-1, x.shape[-1]), kind).reshape(*x.shape[:-1], -1)


def _blocks(*values: float) -> np.ndarray:
    """One row whose first block begins with these values."""
    row = np.zeros((1, DIM), np.float32)
    row[0, : len(values)] = values
    return row


def _random() -> np.ndarray:
    random = np.random.default_rng(0)
    x = random.standard_normal((500, 4, DIM)).astype(np.float32)
    return x * 10.0 ** random.uniform(-4, 4, (500, 4, 1)).astype(np.float32)


HALVES = np.arange(-31, 32, 2, dtype=np.float32)
CASES = {
    "random": _random(),
    "zeros": _blocks(),
    "negative zero": _blocks(-0.0, 0.0),
    "one value": _blocks(3.5),
    "negative one": _blocks(-3.5),
    "both signs of the largest": np.concatenate([_blocks(2, -2, 1), _blocks(-2, 2, 1)]),
    "ties of q8_0": np.concatenate([_blocks(127, *HALVES[:31] / 2), _blocks(127, *HALVES[1:] / 2)]),
    "ties of q4_0": np.concatenate([_blocks(-8, *HALVES[:31] / 4), _blocks(8, *HALVES[1:] / 4)]),
    "last values": np.nextafter(_blocks(127, 0.5, 1.5, -0.5, -2.5), np.float32(0)),
    "huge": np.concatenate([_blocks(8e6, -1e6), _blocks(-3e38, 1e38)]),
    "tiny": np.concatenate([_blocks(1e-5, 3e-6), _blocks(-2e-7, 1e-7), _blocks(1e-34, 3e-35)]),
    "integers": np.arange(-64, 64, dtype=np.float32).reshape(2, DIM),
}


@pytest.mark.smoke
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", QUANTISED)
def test_bytes_are_ggmls(name: str, case: str):
    kind, x = CACHE_TYPES[name], CASES[case]
    stored = np.asarray(jax.jit(kind.encode)(x))
    expected = _ggml(name, x)
    assert stored.dtype == np.uint8 and stored.shape == (*x.shape[:-1], kind.row(DIM))
    np.testing.assert_array_equal(stored, expected)
    values = jax.jit(kind.decode, static_argnums=(1, 2))(stored, DIM, jnp.float32)
    with np.errstate(invalid="ignore"):  # infinite scales
        as_ggml = gguf.quants.dequantize(
            expected.reshape(-1, expected.shape[-1]), gguf.GGMLQuantizationType[name.upper()]
        )
    np.testing.assert_array_equal(np.asarray(values).reshape(as_ggml.shape), as_ggml)


@pytest.mark.parametrize("name", QUANTISED)
def test_less_than_a_scale_can_hold_is_zero(name: str):
    """Codes may differ from ggml's there, whose own depend on the compiler; values do not."""
    kind = CACHE_TYPES[name]
    stored = kind.encode(jnp.asarray(_blocks(1e-37, -3e-38, 1e-40)))
    assert not np.asarray(kind.decode(stored, DIM, jnp.float32)).any()


def test_rows_are_as_planned():
    assert set(CACHE_TYPES) == set(CACHE_BLOCKS)
    for name, kind in CACHE_TYPES.items():
        x = np.ones((3, 2, 192), np.float32)
        stored = kind.encode(jnp.asarray(x, jnp.bfloat16))
        assert stored.shape == (3, 2, kind.row(192))
        assert stored.nbytes == 6 * row_bytes(name, 192)
        decoded = kind.decode(stored, 192, jnp.bfloat16)
        assert decoded.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(decoded, np.float32), x, rtol=0.01)


@pytest.mark.parametrize("dim", [1, 2, 32, 64, 256])
def test_a_rotation_is_its_own_inverse(dim: int):
    matrix = hadamard(dim).astype(np.float64)
    np.testing.assert_allclose(matrix @ matrix, np.eye(dim), atol=1e-6)
    assert len(np.unique(np.abs(matrix))) == 1
    random = np.random.default_rng(0)
    q, k = random.standard_normal((2, 5, dim)).astype(np.float32)
    np.testing.assert_allclose(rotate(rotate(q)), q, atol=1e-5)
    np.testing.assert_allclose((rotate(q) * rotate(k)).sum(-1), (q * k).sum(-1), atol=1e-4)


def test_a_rotation_spreads_a_large_value():
    x = np.random.default_rng(0).standard_normal((50, 64)).astype(np.float32)
    x[:, 7] += 40
    kind = CACHE_TYPES["q4_0"]

    def loss(x: jax.Array) -> float:
        return float(((kind.decode(kind.encode(x), 64, jnp.float32) - x) ** 2).mean())

    assert loss(rotate(x)) < loss(jnp.asarray(x)) / 2
