"""The rule of a fading memory: chunks, single steps and a plain loop over float64 give the same."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.models.conv import causal_conv
from jaxllm.models.linear_memory import memory_chunks, memory_scan, memory_step
from support import nmse

ROWS, GROUPS, HEADS, DIM, TOKENS = 2, 3, 2, 8, 37


def _inputs(seed: int, decay: float, keys: int = 1) -> list[np.ndarray]:
    """q, k, v, g, memory and b as `memory_chunks` takes them, g with so many `keys`."""
    draw = np.random.default_rng(seed)
    q, k = draw.standard_normal((2, ROWS, GROUPS, TOKENS, DIM))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = draw.standard_normal((ROWS, GROUPS, HEADS, TOKENS, DIM))
    b = draw.uniform(0.0, 1.0, (ROWS, GROUPS, HEADS, TOKENS))
    g = -decay * draw.uniform(0.0, 1.0, (*b.shape, keys)) ** 4
    memory = draw.standard_normal((ROWS, GROUPS, HEADS, DIM, DIM))
    return [a.astype(np.float32) for a in (q, k, v, g, memory, b)]


def _naive(q, k, v, g, memory, b=None, bonus=None) -> tuple[np.ndarray, np.ndarray]:
    """The rule token by token and head by head; g [..., T, key or 1, value or 1]."""
    q, k, v, g = (a.astype(np.float64) for a in (q, k, v, g))
    memory, out = memory.astype(np.float64), np.zeros(v.shape)
    for head in np.ndindex(ROWS, GROUPS, HEADS):
        group, own = head[:2], memory[head]
        for t in range(TOKENS):
            before = own.copy()
            own *= np.exp(g[head][t])
            d = v[head][t]
            if b is not None:
                d = b[head][t] * (d - own.T @ k[group][t])
            own += np.outer(k[group][t], d)
            asked = own
            if bonus is not None:
                asked = before + np.outer(bonus[head[1:]] * k[group][t], d)
            out[head][t] = asked.T @ q[group][t]
    return out, memory


def _steps(q, k, v, g, memory, b=None, bonus=None) -> tuple[jax.Array, jax.Array]:
    """The same by single steps."""
    after, found, step = jnp.asarray(memory), [], jax.jit(memory_step)
    for t in range(TOKENS):
        one = q[..., t, :], k[..., t, :], v[..., t, :], g[..., t, :, :], after
        o, after = step(*one, None if b is None else b[..., t], bonus)
        found.append(o)
    return jnp.stack(found, axis=-2), after


@pytest.mark.parametrize("keys", [1, DIM])
@pytest.mark.parametrize("decay", [0.1, 400.0])
def test_chunks_steps_and_a_plain_loop(decay: float, keys: int):
    q, k, v, g, memory, b = _inputs(0, decay, keys)
    expected, end = _naive(q, k, v, g[..., None], memory, b)
    chunks = [memory_chunks(*map(jnp.asarray, (q, k, v, g, memory, b)), chunk=n) for n in (16, 64)]
    for o, after in (*chunks, _steps(q, k, v, g[..., None], memory, b)):
        assert nmse(o, expected) < 1e-12
        assert nmse(after, end) < 1e-12


@pytest.mark.parametrize("keys", [1, DIM])
@pytest.mark.parametrize("decay", [0.1, 400.0])
def test_asked_before_it_takes_in(decay: float, keys: int):
    q, k, v, g, memory, _ = _inputs(0, decay, keys)
    bonus = np.random.default_rng(1).standard_normal((GROUPS, HEADS, DIM)).astype(np.float32)
    expected, end = _naive(q, k, v, g[..., None], memory, bonus=bonus)
    given = map(jnp.asarray, (q, k, v, g, memory))
    for o, after in (
        memory_chunks(*given, bonus=jnp.asarray(bonus)),
        _steps(q, k, v, g[..., None], memory, bonus=bonus),
    ):
        assert nmse(o, expected) < 1e-12
        assert nmse(after, end) < 1e-12


@pytest.mark.parametrize("decay", [0.1, 400.0])
def test_a_rate_a_key_and_value(decay: float):
    q, k, v, step, memory, _ = _inputs(0, decay, DIM)
    rate = np.random.default_rng(1).uniform(0.1, 3.0, memory.shape[1:]).astype(np.float32)
    g = step[..., None, :] * rate[..., None, :, :]
    expected, end = _naive(q, k, v, g, memory)
    scanned = memory_scan(*map(jnp.asarray, (q, k, v, step, rate, memory)))
    for o, after in (scanned, _steps(q, k, v, g, memory)):
        assert nmse(o, expected) < 1e-12
        assert nmse(after, end) < 1e-12


def test_padding_leaves_the_memory_as_it_was():
    q, k, v, g, memory, b = _inputs(1, 1.0)
    none = np.zeros_like(g)
    _, after = memory_chunks(q, k, v, none, jnp.asarray(memory), np.zeros_like(b))
    np.testing.assert_array_equal(after, memory)
    rate = np.ones_like(memory)
    _, after = memory_scan(q, k, np.zeros_like(v), none, rate, jnp.asarray(memory))
    np.testing.assert_array_equal(after, memory)


def test_convolution_keeps_the_last_real_inputs():
    draw = np.random.default_rng(2)
    u, taps = draw.standard_normal((2, 1, 5, 3)), draw.standard_normal((1, 3, 4))
    state = draw.standard_normal((2, 1, 3, 3))
    y, last = causal_conv(*map(jnp.asarray, (u, taps, state)), jnp.asarray([2, 0]))
    whole = np.concatenate([state, u], axis=2)
    for t in range(5):
        expected = np.einsum("ngkc,gck->ngc", whole[:, :, t : t + 4], taps)
        np.testing.assert_allclose(y[:, :, t], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(last[0], whole[0, :, 2:5], rtol=1e-6)
    np.testing.assert_allclose(last[1], state[1], rtol=1e-6)
