"""Mamba 2 (Dao and Gu 2024): heads whose memory fades by one number and adds what tokens write.

The rule is in `jaxllm.models.linear_memory`: queries and keys are what the papers call C and B, and
a token writes its values times a step that also says how much the memory fades.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from jaxllm.models.config import LayerConfig
from jaxllm.models.conv import causal_conv
from jaxllm.models.grouped import Mixer, conv_taps, into_groups, out_of_groups, real_tokens
from jaxllm.models.layers import Array, matrix, normalise, param
from jaxllm.models.linear_memory import memory_chunks, memory_step
from jaxllm.models.recurrent import Mamba2
from jaxllm.models.sections import together


class Mamba2Mixer(Mixer):
    """Projection, convolution, memory, gate, norm and output over a device's own groups."""

    def __init__(self, cfg: LayerConfig, groups: int, embed: int, dtype: jnp.dtype):
        assert isinstance(cfg.recurrent, Mamba2)
        self.net, self.eps = cfg.recurrent, cfg.eps
        net, f32, axes = self.net, jnp.dtype(jnp.float32), ("state_group", "head_rows")
        inner, shared = net.groups * net.heads * net.dim, net.groups * net.keys
        make = partial(param, form="sections")

        def channels(first: int):
            return (
                together(first, net.dim, net.heads),
                together(first + inner, net.keys),
                together(first + inner + shared, net.keys),
            )

        gate = together(0, net.dim, net.heads)
        step = together(2 * (inner + shared), 1, net.heads)
        self.inner = matrix(
            (groups, net.channels + net.heads * (net.dim + 1), embed),
            (*axes, "embed"),
            ("ssm_in.weight",),
            dtype,
            form="sections",
            sections=(gate, *channels(inner), step),
        )
        source = "ssm_conv1d.weight"
        self.taps = conv_taps(groups, net.channels, net.kernel, channels(0), source)
        self.conv_bias = make(
            (groups, net.channels), axes, ("ssm_conv1d.bias",), f32, sections=channels(0)
        )
        each, shape = (together(0, 1, net.heads),), (groups, net.heads)
        wide = (*axes, "head_dim")
        self.decay = make((*shape, 1), wide, ("ssm_a",), f32, sections=each)
        self.skip = make((*shape, 1), wide, ("ssm_d",), f32, sections=each)
        self.step_bias = make(shape, axes, ("ssm_dt.bias",), f32, sections=each)
        rows = net.heads * net.dim
        source = ("ssm_norm.weight",)
        self.norm = param((groups, rows), axes, source, f32) if net.normed else None
        self.out = matrix(
            (embed, groups, rows),
            ("embed", "state_group", "head_rows"),
            ("ssm_out.weight",),
            dtype,
            form="columns",
        )

    def __call__(
        self, x: Array, state: tuple[Array, ...], counts: Array
    ) -> tuple[Array, tuple[Array, ...]]:
        """x [N, T, D] and states of own groups -> [N, T, D], to be summed over devices, and the
        states after the first counts [N] tokens."""
        conv, memory = state
        net, tokens = self.net, x.shape[1]
        y, rows = into_groups(x, self.inner[...]), net.heads * net.dim
        z, u, step = jnp.split(y, (rows, rows + net.channels), axis=-1)
        u, conv = causal_conv(u, self.taps[...], conv, counts)
        u = jax.nn.silu(u + self.conv_bias[...][:, None])
        v, k, q = jnp.split(u, (rows, rows + net.keys), axis=-1)
        v = v.reshape(*v.shape[:-1], net.heads, net.dim)  # [N, G, T, r, P]
        step = jax.nn.softplus(step + self.step_bias[...][:, None])
        step = jnp.where(real_tokens(tokens, counts), step, 0.0)
        g = step * self.decay[...][:, None, :, 0]
        written, skipped = v * step[..., None], v * self.skip[...][:, None]
        if tokens == 1:
            q, k, written, g = (a[:, :, 0] for a in (q, k, written, g))
            o, memory = memory_step(q, k, written, g[..., None, None], memory)
            o = o[:, :, None]
        else:
            written, g = (jnp.moveaxis(a, 2, 3) for a in (written, g))
            o, memory = memory_chunks(q, k, written, g[..., None], memory)
            o = jnp.moveaxis(o, 3, 2)
        o = (o + skipped).reshape(z.shape) * jax.nn.silu(z)
        if self.norm is not None:
            o = normalise(o, "rms", self.eps) * self.norm[...][:, None]
        o = jnp.moveaxis(o, 2, 1).astype(x.dtype)
        return out_of_groups(o, self.out[...]), (conv, memory)
