"""The gated delta net (Yang et al. 2024): a linear layer whose memory forgets and corrects itself.

Its rule is in `jaxllm.models.linear_memory`; around it are a short convolution of queries, keys and
values, and a gated norm of what comes out. Kimi delta attention (Kimi team 2025) forgets each key
at a rate of its own.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.models.config import LayerConfig
from jaxllm.models.conv import causal_conv
from jaxllm.models.grouped import Mixer, conv_taps, into_groups, out_of_groups, real_tokens
from jaxllm.models.layers import Array, Norm, linear, matrix, param
from jaxllm.models.linear_memory import memory_chunks, memory_step
from jaxllm.models.recurrent import DeltaNet, KimiDelta
from jaxllm.models.sections import tiled, together


def _unit(a: Array, eps: float) -> Array:
    """Vectors of length one, or of less where they are shorter than eps."""
    return a / jnp.maximum(jnp.linalg.norm(a, axis=-1, keepdims=True), eps)


class DeltaMixer(Mixer):
    """Projections, convolution, delta rule, gated norm and output over a device's own groups, of
    one query and key and some values each; kinds say what makes rates and the gate."""

    inner: nnx.Param  # query, key and values [G, C, D]
    taps: nnx.Param
    norm: Norm
    out: nnx.Param

    def __init__(self, dim: int, values: int, eps: float):
        self.dim, self.values, self.eps = dim, values, eps

    def rates(self, x: Array) -> tuple[Array, Array]:
        """x [N, T, D] -> how much tokens correct [N, G, T, r], and how much the memory keeps (its
        log) of all or of each key [N, G, T, r, 1 or S]."""
        raise NotImplementedError

    def gated(self, x: Array) -> Array:
        """x [N, T, D] -> what outputs are multiplied by [N, G, T, r S]."""
        raise NotImplementedError

    def __call__(
        self, x: Array, state: tuple[Array, ...], counts: Array
    ) -> tuple[Array, tuple[Array, ...]]:
        """x [N, T, D] and states of own groups -> [N, T, D], to be summed over devices, and the
        states after the first counts [N] tokens."""
        conv, memory = state
        tokens, r, dim = x.shape[1], self.values, self.dim
        y, conv = causal_conv(into_groups(x, self.inner[...]), self.taps[...], conv, counts)
        q, k, v = jnp.split(jax.nn.silu(y), (dim, 2 * dim), axis=-1)
        q, k = _unit(q, self.eps), _unit(k, self.eps)
        q, v = q / jnp.sqrt(jnp.float32(dim)), v.reshape(*v.shape[:-1], r, dim)
        b, g = self.rates(x)
        real = real_tokens(tokens, counts)
        b, g = jnp.where(real, b, 0.0), jnp.where(real[..., None], g, 0.0)
        if tokens == 1:
            q, k, v, b, g = (a[:, :, 0] for a in (q, k, v, b, g))
            o, memory = memory_step(q, k, v, g[..., None], memory, b)
            o = o[:, None]  # [N, 1, G, r, S]
        else:
            v, b, g = (jnp.moveaxis(a, 2, 3) for a in (v, b, g))
            o, memory = memory_chunks(q, k, v, g, memory, b)
            o = jnp.moveaxis(o, 3, 1)
        gate = jnp.moveaxis(self.gated(x), 2, 1).reshape(o.shape)
        o = (self.norm(o) * gate).astype(x.dtype)
        return out_of_groups(o, self.out[...]), (conv, memory)


class GatedDeltaNet(DeltaMixer):
    """One rate of forgetting a head of values; groups may be apart in tensors."""

    def __init__(self, cfg: LayerConfig, groups: int, embed: int, dtype: jnp.dtype):
        assert isinstance(cfg.recurrent, DeltaNet)
        net = cfg.recurrent
        super().__init__(net.dim, net.v_heads, cfg.eps)
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
        self.both = project((groups, 2 * r, embed), wide, sources, dtype, sections=rates)
        self.taps = conv_taps(groups, net.channels, net.kernel, inner, "ssm_conv1d.weight")
        self.decay = make((groups, r), axes, ("ssm_a",), f32, sections=(values(0, 1),))
        self.bias = make((groups, r), axes, ("ssm_dt.bias",), f32, sections=(values(0, 1),))
        self.norm = Norm(dim, cfg.eps, "ssm_norm.weight", axis="head_dim")
        self.out = matrix(
            (embed, groups, r * dim),
            ("embed", "state_group", "head_rows"),
            ("ssm_out.weight",),
            dtype,
            "section_columns",
            sections=(values(0, dim),),
        )

    def rates(self, x: Array) -> tuple[Array, Array]:
        b, g = jnp.split(into_groups(x, self.both[...]), 2, axis=-1)
        g = self.decay[...][:, None] * jax.nn.softplus(g + self.bias[...][:, None])
        return jax.nn.sigmoid(b), g[..., None]

    def gated(self, x: Array) -> Array:
        return jax.nn.silu(into_groups(x, self.gate[...]))


class GroupRows(nnx.Module):
    """Rows of own groups times x, or times what one narrow matrix for all groups makes of it."""

    def __init__(
        self, groups: int, rows: int, embed: int, names: tuple[str, ...], dtype: jnp.dtype
    ):
        *first, last = (f"{name}.weight" for name in names)
        self.narrow = (
            matrix((rows, embed), ("latent", "embed"), (*first,), dtype) if first else None
        )
        width, axis = (rows, "latent") if first else (embed, "embed")
        axes, own = ("state_group", "head_rows", axis), (together(0, rows),)
        self.rows = matrix((groups, rows, width), axes, (last,), dtype, "sections", own)

    def __call__(self, x: Array) -> Array:
        """x [N, T, D] -> float32 [N, G, T, rows]."""
        x = x if self.narrow is None else linear(x, self.narrow[...])
        return into_groups(x, self.rows[...])


class KimiDeltaMixer(DeltaMixer):
    """A rate of forgetting each key of a head."""

    def __init__(self, cfg: LayerConfig, groups: int, embed: int, dtype: jnp.dtype):
        assert isinstance(cfg.recurrent, KimiDelta)
        self.net = net = cfg.recurrent
        super().__init__(net.dim, 1, cfg.eps)
        dim, f32, axes = net.dim, jnp.dtype(jnp.float32), ("state_group", "head_rows")
        own, one = (together(0, dim),), (together(0, 1),)
        inner = tuple(together(0, dim, tensor=i) for i in range(3))
        names = tuple(f"attn_{side}.weight" for side in "qkv")
        self.inner = matrix(
            (groups, 3 * dim, embed), (*axes, "embed"), names, dtype, "sections", inner
        )
        taps = (f"ssm_conv1d_{side}.weight" for side in "qkv")
        self.taps = conv_taps(groups, 3 * dim, net.kernel, inner, *taps)
        make = partial(param, dtype=f32, form="sections")
        self.rate = make((groups, 1), axes, ("ssm_a",), sections=one)
        self.bias = make((groups, dim), axes, ("ssm_dt.bias",), sections=own)
        self.correction = GroupRows(groups, 1, embed, ("ssm_beta",), dtype)
        self.decay = GroupRows(groups, dim, embed, net.decay, dtype)
        self.gate = GroupRows(groups, dim, embed, net.gate, dtype)
        self.norm = Norm(dim, cfg.eps, "ssm_norm.weight", axis="head_dim")
        self.out = matrix(
            (embed, groups, dim), ("embed", *axes), ("attn_output.weight",), dtype, "columns"
        )

    def rates(self, x: Array) -> tuple[Array, Array]:
        g, rate = self.decay(x) + self.bias[...][:, None], self.rate[...][:, None]
        if self.net.floor is None:
            g = rate * jax.nn.softplus(g)
        else:
            g = self.net.floor * jax.nn.sigmoid(self.net.sign * rate * g)
        return jax.nn.sigmoid(self.correction(x)), g[..., None, :]

    def gated(self, x: Array) -> Array:
        return jax.nn.sigmoid(self.gate(x))
