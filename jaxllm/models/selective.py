"""Selective state spaces (Gu and Dao 2023): a memory a channel, which fades and takes in by steps
that tokens choose.

The rule is in `jaxllm.models.linear_memory`, where queries and keys are what the paper calls C and
B. All channels share a token's key and query, which are made of all channels, as is what steps are
made of; so devices that have some channels each sum their parts of these between `begin` and the
rest. PLaMo 2 has heads of channels with one step and one rate of fading, as Mamba 2.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.models.config import LayerConfig
from jaxllm.models.conv import causal_conv
from jaxllm.models.grouped import Mixer, conv_taps, into_groups, out_of_groups, real_tokens
from jaxllm.models.layers import Array, Norm, matrix, param
from jaxllm.models.linear_memory import memory_chunks, memory_scan, memory_step
from jaxllm.models.parts import NormStyle
from jaxllm.models.recurrent import Selective
from jaxllm.models.sections import Section, together

Begun = tuple[tuple[Array, ...], Array]


class SelectiveMixer(Mixer):
    """Projections, convolution, memory, gate and output over a device's own groups."""

    def __init__(self, cfg: LayerConfig, groups: int, embed: int, dtype: jnp.dtype):
        assert isinstance(cfg.recurrent, Selective)
        self.net = net = cfg.recurrent
        axes, f32 = ("state_group", "head_rows"), jnp.dtype(jnp.float32)
        size, whole = net.channels, net.groups * net.channels
        own, steps = together(0, size), 1 if net.heads else size
        inputs = (  # of the memory, and its gate
            (Section(size, size, 1, 2 * size, size), Section(0, size, 1, 2 * size, size))
            if net.heads
            else (own, together(whole, size))
        )
        make = partial(param, dtype=f32, form="sections")
        project = partial(matrix, dtype=dtype, form="sections")
        self.inner = project(
            (groups, 2 * size, embed), (*axes, "embed"), ("ssm_in.weight",), sections=inputs
        )
        self.taps = conv_taps(groups, size, net.kernel, (own,), "ssm_conv1d.weight")
        self.conv_bias = (
            make((groups, size), axes, ("ssm_conv1d.bias",), sections=(own,))
            if net.conv_bias
            else None
        )
        self.shared = matrix(
            (net.rank + 2 * net.keys, groups, size),
            ("latent", *axes),
            ("ssm_x.weight",),
            dtype,
            form="columns",
        )
        end = "" if net.heads else ".weight"
        self.norms = nnx.List(
            Norm(width, cfg.eps, f"ssm_{name}_norm{end}", NormStyle(weight=net.weighted), "latent")
            for name, width in (("dt", net.rank), ("b", net.keys), ("c", net.keys))
            if net.normed
        )
        each = (together(0, steps),)
        self.step = project(
            (groups, steps, net.rank), (*axes, "latent"), ("ssm_dt.weight",), sections=each
        )
        self.step_bias = make((groups, steps), axes, ("ssm_dt.bias",), sections=each)
        self.skip = make((groups, steps), axes, ("ssm_d",), sections=each)
        rates = (groups, 1 if net.heads else size, 1 if net.heads else net.keys)
        self.rate = make(rates, (*axes, "head_dim"), ("ssm_a",), sections=each)
        self.out = matrix(
            (embed, groups, size), ("embed", *axes), ("ssm_out.weight",), dtype, form="columns"
        )

    def begin(self, x: Array, state: tuple[Array, ...], counts: Array) -> Begun:
        """x [N, T, D] and states of own groups -> what `__call__` goes on with, and this device's
        part of steps, keys and queries [N, T, rank + 2 S]."""
        y = into_groups(x, self.inner[...])
        u, z = jnp.split(y, 2, axis=-1)
        u, conv = causal_conv(u, self.taps[...], state[0], counts)
        u = jax.nn.silu(u if self.conv_bias is None else u + self.conv_bias[...][:, None])
        shared = out_of_groups(jnp.moveaxis(u, 2, 1).astype(x.dtype), self.shared[...])
        return (u, z, conv), shared

    def __call__(
        self, held: tuple[Array, ...], shared: Array, state: tuple[Array, ...], counts: Array
    ) -> tuple[Array, tuple[Array, ...]]:
        """What `begin` made, the parts summed -> [N, T, D], to be summed over devices, and the
        states after the first counts [N] tokens."""
        u, z, conv = held
        step, k, q = self._shared(shared)
        step = into_groups(step, self.step[...]) + self.step_bias[...][:, None]
        step = jax.nn.softplus(step)  # [N, G, T, C], or one a head
        step = jnp.where(real_tokens(u.shape[2], counts), step, 0.0)
        o, memory = self._remember(q, k, u, step, state[1])
        o = (o + u * self.skip[...][:, None]) * jax.nn.silu(z)
        o = jnp.moveaxis(o, 2, 1).astype(shared.dtype)
        return out_of_groups(o, self.out[...]), (conv, memory)

    def _shared(self, shared: Array) -> tuple[Array, Array, Array]:
        """What steps are made of [N, T, rank], float32 keys and queries [N, 1, T, S]."""
        net = self.net
        if net.heads:
            k, q, step = jnp.split(shared, (net.keys, 2 * net.keys), axis=-1)
        else:
            step, k, q = jnp.split(shared, (net.rank, net.rank + net.keys), axis=-1)
        if net.normed:
            step, k, q = (norm(a) for norm, a in zip(self.norms, (step, k, q), strict=True))
        return step, k[:, None].astype(jnp.float32), q[:, None].astype(jnp.float32)

    def _remember(
        self, q: Array, k: Array, u: Array, step: Array, memory: Array
    ) -> tuple[Array, Array]:
        """Outputs [N, G, T, C] and the memory [N, G, S, C] after all tokens."""
        rate = jnp.moveaxis(self.rate[...], -1, -2)[:, None]  # [G, 1, S, C], of ones for a head
        v, step, memory = ((step * u)[:, :, None], step[:, :, None], memory[:, :, None])
        if u.shape[2] == 1:
            g = step[..., 0, None, :] * rate
            o, memory = memory_step(q[:, :, 0], k[:, :, 0], v[..., 0, :], g, memory)
            return o, memory[:, :, 0]  # o [N, G, 1, C]
        if self.net.heads:
            o, memory = memory_chunks(q, k, v, step * rate, memory)
        else:
            o, memory = memory_scan(q, k, v, step, rate, memory)
        return o[:, :, 0], memory[:, :, 0]
