"""Both halves of an RWKV 6 layer (Peng et al. 2024), each a mixer with a state of its own.

Both read a token beside the one before it: the first mixes the two by amounts that tokens choose,
and remembers (`jaxllm.models.linear_memory`, where queries are what the paper calls receptance);
the second is an MLP. What a layer read last is the state of a token shift. Every group needs all of
its channels and keeps them.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxllm.models.config import LayerConfig
from jaxllm.models.grouped import Mixer, into_groups, out_of_groups, real_tokens
from jaxllm.models.layers import Array, linear, matrix, normalise, param
from jaxllm.models.linear_memory import memory_chunks, memory_step
from jaxllm.models.recurrent import ChannelMix, TimeMix
from jaxllm.models.sections import together

FLOAT = jnp.dtype(jnp.float32)
GROUP = ("state_group", "head_rows")
NORM_EPS = 64e-5  # of each head's norm, which no file says
MIXES = 5  # what a token reads of itself and the one before it: decay, key, value, query and gate


def token_before(x: Array, state: Array, counts: Array) -> tuple[Array, Array]:
    """The token before each of x [N, T, D] after the one that groups keep [N, G, 1, D], and what
    they keep after the first counts [N] tokens."""
    whole = jnp.concatenate([state[:, 0], x.astype(state.dtype)], axis=1)
    last = jax.vmap(lambda a, n: lax.dynamic_slice_in_dim(a, n, 1))(whole, counts)
    return whole[:, :-1].astype(x.dtype), jnp.broadcast_to(last[:, None], state.shape)


class TimeMixer(Mixer):
    """Projections, memory, norm, gate and output over a device's own heads."""

    def __init__(self, cfg: LayerConfig, groups: int, embed: int, dtype: jnp.dtype):
        assert isinstance(cfg.recurrent, TimeMix)
        self.net = net = cfg.recurrent
        dim, own, name = net.dim, (together(0, net.dim),), "time_mix_{}.weight".format
        whole, narrow = partial(param, dtype=dtype), ("latent", "embed")
        self.lerp = param((embed,), ("embed",), (name("lerp_x"),), FLOAT)
        self.lerps = param((MIXES, embed), ("pair", "embed"), (name("lerp_fused"),), FLOAT)
        self.down = whole((MIXES * net.rank, embed), narrow, (name("w1"),))
        self.up = whole(
            (MIXES, embed, net.rank),
            ("pair", *narrow[::-1]),
            (name("w2"),),
            form="experts_columns",
        )
        self.decay_down = whole((net.decay_rank, embed), narrow, (name("decay_w1"),))
        heads = partial(param, dtype=FLOAT, form="sections")
        self.decay_up = heads(
            (groups, dim, net.decay_rank), (*GROUP, "latent"), (name("decay_w2"),), sections=own
        )
        self.decay = heads((groups, dim), GROUP, (name("decay"),), sections=own)
        first, one = (name("first"),), (together(0, 1),)
        self.bonus = heads((groups, 1, dim), (*GROUP, "head_dim"), first, sections=one)
        self.weight = heads((groups, dim), GROUP, (name("ln"),), sections=own)
        self.bias = heads((groups, dim), GROUP, ("time_mix_ln.bias",), sections=own)
        sides = ("key", "value", "receptance", "gate")
        self.key, self.value, self.query, self.gate = (
            matrix((groups, dim, embed), (*GROUP, "embed"), (name(s),), dtype, "sections", own)
            for s in sides
        )
        shape, axes, source = (embed, groups, dim), ("embed", *GROUP), (name("output"),)
        self.out = matrix(shape, axes, source, dtype, "columns")

    def __call__(
        self, x: Array, state: tuple[Array, ...], counts: Array
    ) -> tuple[Array, tuple[Array, ...]]:
        """x [N, T, D] and states of own groups -> [N, T, D], to be summed over devices, and the
        states after the first counts [N] tokens."""
        shift, memory = state
        before, shift = token_before(x, shift, counts)
        at_decay, at_key, at_value, at_query, at_gate = self._mixed(x, before)
        q, k, v, gate = (
            into_groups(a, w[...])
            for a, w in (
                (at_query, self.query),
                (at_key, self.key),
                (at_value, self.value),
                (at_gate, self.gate),
            )
        )
        narrow = jnp.tanh(linear(at_decay, self.decay_down[...])).astype(jnp.float32)
        g = -jnp.exp(into_groups(narrow, self.decay_up[...]) + self.decay[...][:, None])
        real = real_tokens(x.shape[1], counts)
        v, g = jnp.where(real, v, 0.0), jnp.where(real, g, 0.0)
        v, g, bonus = v[:, :, None], g[:, :, None], self.bonus[...]  # one head a group
        if x.shape[1] == 1:
            one = q[:, :, 0], k[:, :, 0], v[..., 0, :], g[..., 0, :, None]
            o, memory = memory_step(*one, memory, bonus=bonus)
        else:
            o, memory = memory_chunks(q, k, v, g, memory, bonus=bonus)
            o = o[:, :, 0]
        o = normalise(o, "layer", NORM_EPS) * self.weight[...][:, None] + self.bias[...][:, None]
        o = jnp.moveaxis(o * jax.nn.silu(gate), 2, 1).astype(x.dtype)
        return out_of_groups(o, self.out[...]), (shift, memory)

    def _mixed(self, x: Array, before: Array) -> list[Array]:
        """What each of the five projections reads of tokens and those before them [N, T, D]."""
        step = before - x
        narrow = jnp.tanh(linear((x + step * self.lerp[...]).astype(x.dtype), self.down[...]))
        parts = jnp.split(narrow, MIXES, axis=-1)
        up, lerps = self.up[...], self.lerps[...]
        amounts = (linear(part, up[i]) + lerps[i] for i, part in enumerate(parts))
        return [(x + step * amount).astype(x.dtype) for amount in amounts]


class ChannelMixer(Mixer):
    """down(relu(up(x))^2) over a device's own columns, times a gate that every device has whole."""

    def __init__(self, cfg: LayerConfig, groups: int, embed: int, dtype: jnp.dtype):
        assert isinstance(cfg.recurrent, ChannelMix)
        net, name = cfg.recurrent, "channel_mix_{}.weight".format
        lerps = (param((embed,), ("embed",), (name(f"lerp_{s}"),), FLOAT) for s in "kr")
        self.up_lerp, self.gate_lerp = lerps
        shape, axes, own = (
            (groups, net.columns, embed),
            (*GROUP, "embed"),
            (together(0, net.columns),),
        )
        self.up = matrix(shape, axes, (name("key"),), dtype, "sections", own)
        self.gate = matrix((embed, embed), ("embed", "embed"), (name("receptance"),), dtype)
        shape, axes = (embed, groups, net.columns), ("embed", *GROUP)
        self.down = matrix(shape, axes, (name("value"),), dtype, "columns")

    def __call__(
        self, x: Array, state: tuple[Array, ...], counts: Array
    ) -> tuple[Array, tuple[Array, ...]]:
        """x [N, T, D] and states of own groups -> [N, T, D], to be summed over devices, and the
        states after the first counts [N] tokens."""
        [shift] = state
        before, shift = token_before(x, shift, counts)
        at_up, at_gate = (
            (x + (before - x) * lerp[...]).astype(x.dtype)
            for lerp in (self.up_lerp, self.gate_lerp)
        )
        y = jnp.square(jax.nn.relu(into_groups(at_up, self.up[...])))
        y = out_of_groups(jnp.moveaxis(y, 2, 1).astype(x.dtype), self.down[...])
        return y * jax.nn.sigmoid(linear(at_gate, self.gate[...])), (shift,)
