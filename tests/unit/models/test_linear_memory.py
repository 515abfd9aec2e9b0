"""The delta rule: chunks, single steps and a plain loop over float64 give the same."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.models.conv import causal_conv
from jaxllm.models.linear_memory import memory_chunks, memory_step
from support import nmse

ROWS, GROUPS, HEADS, DIM, TOKENS = 2, 3, 2, 8, 37


def _inputs(seed: int, decay: float) -> list[np.ndarray]:
    """q, k, v, b, g as `delta_chunks` takes them, and a memory."""
    draw = np.random.default_rng(seed)
    q, k = draw.standard_normal((2, ROWS, GROUPS, TOKENS, DIM))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = draw.standard_normal((ROWS, GROUPS, HEADS, TOKENS, DIM))
    b = draw.uniform(0.0, 1.0, (ROWS, GROUPS, HEADS, TOKENS))
    g = -decay * draw.uniform(0.0, 1.0, b.shape) ** 4
    memory = draw.standard_normal((ROWS, GROUPS, HEADS, DIM, DIM))
    return [a.astype(np.float32) for a in (q, k, v, b, g, memory)]


def _naive(q, k, v, b, g, memory) -> tuple[np.ndarray, np.ndarray]:
    """The rule token by token and head by head."""
    q, k, v, b, g = (a.astype(np.float64) for a in (q, k, v, b, g))
    memory, out = memory.astype(np.float64), np.zeros(v.shape)
    for head in np.ndindex(ROWS, GROUPS, HEADS):
        group, own = head[:2], memory[head]
        for t in range(TOKENS):
            own *= np.exp(g[head][t])
            d = b[head][t] * (v[head][t] - own.T @ k[group][t])
            own += np.outer(k[group][t], d)
            out[head][t] = own.T @ q[group][t]
    return out, memory


@pytest.mark.parametrize("decay", [0.1, 400.0])
def test_chunks_steps_and_a_plain_loop(decay: float):
    q, k, v, b, g, memory = _inputs(0, decay)
    expected, end = _naive(q, k, v, b, g, memory)
    for chunk in (16, 64):
        o, after = memory_chunks(*map(jnp.asarray, (q, k, v, g, memory, b)), chunk=chunk)
        assert nmse(o, expected) < 1e-12
        assert nmse(after, end) < 1e-12
    after, found = jnp.asarray(memory), []
    for t in range(TOKENS):
        one = q[..., t, :], k[..., t, :], v[..., t, :], g[..., t], after, b[..., t]
        o, after = memory_step(*map(jnp.asarray, one))
        found.append(o)
    assert nmse(jnp.stack(found, axis=-2), expected) < 1e-12
    assert nmse(after, end) < 1e-12


def test_padding_leaves_the_memory_as_it_was():
    q, k, v, b, g, memory = _inputs(1, 1.0)
    _, after = memory_chunks(q, k, v, np.zeros_like(g), jnp.asarray(memory), np.zeros_like(b))
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
