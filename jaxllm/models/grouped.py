"""What the mixers of recurrent layers share: products and a convolution by groups of channels.

A device has some of a layer's groups; its output is a partial, to be summed over devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jaxllm.models.layers import Array, linear, param
from jaxllm.models.quantised import Quantised
from jaxllm.models.sections import Section


class Mixer(nnx.Module):
    """A recurrent mixer over a device's own groups; most do without the other devices."""

    __call__: Callable[..., tuple[Array, tuple[Array, ...]]]

    def finish(self, total: Array, dtype: Any) -> Array:
        """What is added to the residual [B, T, D], of the sum over devices."""
        return total


def into_groups(x: Array, w: Array | Quantised) -> Array:
    """x [N, T, D] times w [G, rows, D]: float32 [N, G, T, rows]."""
    y = linear(x, w.reshape(-1, w.shape[-1])).astype(jnp.float32)
    return jnp.moveaxis(y.reshape(*x.shape[:2], *w.shape[:2]), 2, 1)


def out_of_groups(o: Array, w: Array | Quantised) -> Array:
    """o [N, T, G, ...] times w [D, G, rows]: this device's partial [N, T, D]."""
    return linear(o.reshape(*o.shape[:2], -1), w.reshape(w.shape[0], -1))


def conv_taps(
    groups: int, channels: int, kernel: int, sections: tuple[Section, ...], *source: str
) -> nnx.Param:
    """The taps [G, C, K] of `causal_conv`, of the rows of tensors that sections say."""
    shape, axes = (groups, channels, kernel), ("state_group", "head_rows", "tap")
    return param(shape, axes, source, jnp.dtype(jnp.float32), "sections", sections=sections)


def real_tokens(tokens: int, counts: Array) -> Array:
    """Which of T tokens are among the first counts [N] of their row: [N, 1, T, 1]."""
    return (jnp.arange(tokens) < counts[:, None])[:, None, :, None]
