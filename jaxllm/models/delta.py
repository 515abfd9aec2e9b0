"""The gated delta net (Yang et al. 2024): a linear layer whose memory forgets and corrects itself.

Its rule is in `jaxllm.models.linear_memory`; around it are a short convolution of queries, keys and
values, and a gated norm of what comes out.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.models.config import LayerConfig
from jaxllm.models.conv import causal_conv
from jaxllm.models.grouped import conv_taps, into_groups, out_of_groups, real_tokens
from jaxllm.models.layers import Array, Norm, matrix, param
from jaxllm.models.linear_memory import memory_chunks, memory_step
from jaxllm.models.recurrent import DeltaNet
from jaxllm.models.sections import tiled, together


def _unit(a: Array, eps: float) -> Array:
    """Vectors of length one, or of less where they are shorter than eps."""
    return a / jnp.maximum(jnp.linalg.norm(a, axis=-1, keepdims=True), eps)


class GatedDeltaNet(nnx.Module):
    """Projections, convolution, delta rule, gated norm and output over a device's own groups."""

    def __init__(self, cfg: LayerConfig, groups: int, embed: int, dtype: jnp.dtype):
        assert isinstance(cfg.recurrent, DeltaNet)
        self.net = net = cfg.recurrent
        r, dim, f32 = net.v_heads, net.dim, jnp.dtype(jnp.float32)
        axes, keys = ("state_group", "head_rows"), net.groups * net.dim

        def values(first: int, height: int, tensor: int = 0):
            if net.tiled:
                return tiled(first, height, r, net.groups, tensor)
            return together(first, height, r, tensor)

        inner = together(0, dim), together(keys, dim), values(2 * keys, dim)
        rates = (together(0, 2 * r),) if net.joined else (values(0, 1), values(0, 1, tensor=1))
        sources = ("ssm_ba.weight",) if net.joined else ("ssm_beta.weight", "ssm_alpha.weight")
        make, wide = partial(param, form="sections"), (*axes, "embed")
        project = partial(matrix, form="sections")
        self.inner = project(
            (groups, net.channels, embed), wide, ("attn_qkv.weight",), dtype, sections=inner
        )
        self.gate = project(
            (groups, r * dim, embed), wide, ("attn_gate.weight",), dtype, sections=(values(0, dim),)
        )
        self.rates = project((groups, 2 * r, embed), wide, sources, dtype, sections=rates)
        self.taps = conv_taps(groups, net.channels, net.kernel, "ssm_conv1d.weight", inner)
        self.decay = make((groups, r), axes, ("ssm_a",), f32, sections=(values(0, 1),))
        self.bias = make((groups, r), axes, ("ssm_dt.bias",), f32, sections=(values(0, 1),))
        self.norm = Norm(dim, cfg.eps, "ssm_norm.weight", axis="head_dim")
        shape, axes = (embed, groups, r * dim), ("embed", "state_group", "head_rows")
        source = ("ssm_out.weight",)
        self.out = (
            param(shape, axes, source, dtype, "section_columns", sections=(values(0, dim),))
            if net.tiled
            else matrix(shape, axes, source, dtype, "columns")
        )
        self.eps = cfg.eps

    def __call__(
        self, x: Array, state: tuple[Array, ...], counts: Array
    ) -> tuple[Array, tuple[Array, ...]]:
        """x [N, T, D] and states of own groups -> [N, T, D], to be summed over devices, and the
        states after the first counts [N] tokens."""
        conv, memory = state
        tokens, r, dim = x.shape[1], self.net.v_heads, self.net.dim
        y, conv = causal_conv(into_groups(x, self.inner[...]), self.taps[...], conv, counts)
        q, k, v = jnp.split(jax.nn.silu(y), (dim, 2 * dim), axis=-1)
        q, k = _unit(q, self.eps), _unit(k, self.eps)
        q, v = q / jnp.sqrt(jnp.float32(dim)), v.reshape(*v.shape[:-1], r, dim)
        b, g = self._rates(x, counts)
        if tokens == 1:
            q, k, v, b, g = (a[:, :, 0] for a in (q, k, v, b, g))
            o, memory = memory_step(q, k, v, g[..., None, None], memory, b)
            o = o[:, None]  # [N, 1, G, r, S]
        else:
            v, b, g = (jnp.moveaxis(a, 2, 3) for a in (v, b, g))
            o, memory = memory_chunks(q, k, v, g[..., None], memory, b)
            o = jnp.moveaxis(o, 3, 1)
        gate = into_groups(x, self.gate[...])  # [N, G, T, r S]
        gate = jnp.moveaxis(gate, 2, 1).reshape(o.shape)
        o = (self.norm(o) * jax.nn.silu(gate)).astype(x.dtype)
        return out_of_groups(o, self.out[...]), (conv, memory)

    def _rates(self, x: Array, counts: Array) -> tuple[Array, Array]:
        """How much tokens correct and how much the memory keeps (its log): [N, G, T, r]; nothing
        and all of it after the first counts [N] tokens."""
        b, g = jnp.split(into_groups(x, self.rates[...]), 2, axis=-1)
        g = self.decay[...][:, None] * jax.nn.softplus(g + self.bias[...][:, None])
        real = real_tokens(x.shape[1], counts)
        return jnp.where(real, jax.nn.sigmoid(b), 0.0), jnp.where(real, g, 0.0)
