"""The short causal convolution of recurrent layers, and the inputs that it keeps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxllm.models.layers import Array


def causal_conv(u: Array, taps: Array, state: Array, counts: Array) -> tuple[Array, Array]:
    """Each channel's own convolution over time, of u [N, G, T, C] by taps [G, C, K] after the
    inputs state [N, G, K - 1, C] that came before; the last tap is that of a token itself.

    Returns the outputs [N, G, T, C], and the last inputs of the first counts [N] tokens.
    """
    tokens, kept = u.shape[2], state.shape[2]
    whole = jnp.concatenate([state, u], axis=2)
    weights = jnp.moveaxis(taps, -1, 0)[:, None, :, None]  # [K, 1, G, 1, C]
    y = sum(whole[:, :, j : j + tokens] * weights[j] for j in range(kept + 1))
    last = jax.vmap(lambda a, n: lax.dynamic_slice_in_dim(a, n, kept, axis=1))(whole, counts)
    return jnp.asarray(y), last
