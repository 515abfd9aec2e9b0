"""Lightning attention (Qin et al. 2024): heads whose memory fades by a constant.

The rule is in `jaxllm.models.linear_memory`. Outputs are normalised over the heads of all devices:
see `SubNorm`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.models.config import LayerConfig
from jaxllm.models.grouped import Mixer, into_groups, real_tokens
from jaxllm.models.layers import Array, SubNorm, matrix, param
from jaxllm.models.linear_memory import memory_chunks, memory_step
from jaxllm.models.recurrent import Lightning
from jaxllm.models.sections import together


class LightningMixer(Mixer):
    """Projections, memory, norm, gate and output over a device's own heads."""

    def __init__(self, cfg: LayerConfig, groups: int, embed: int, dtype: jnp.dtype):
        assert isinstance(cfg.recurrent, Lightning)
        net, f32, axes = cfg.recurrent, jnp.dtype(jnp.float32), ("state_group", "head_rows")
        dim, wide = net.dim, (*axes, "embed")

        def project(rows: int, name: str) -> nnx.Param:
            own = (together(0, rows),)
            return matrix((groups, rows, embed), wide, (f"{name}.weight",), dtype, "sections", own)

        self.inner, self.gate = project(3 * dim, "attn_qkv"), project(dim, "attn_gate")
        self.decay = param((groups, 1), axes, (), f32, form="fading")
        source = ("attn_norm_2.weight",)
        weight = param((groups, dim), axes, source, f32, "sections", sections=(together(0, dim),))
        self.norm = SubNorm(weight, net.groups * dim, cfg.eps)
        source = ("attn_output.weight",)
        self.out = matrix((embed, groups, dim), ("embed", *axes), source, dtype, "columns")

    def __call__(
        self, x: Array, state: tuple[Array, ...], counts: Array
    ) -> tuple[Array, tuple[Array, ...]]:
        """x [N, T, D] and states of own groups -> [N, T, D + 1], to be summed over devices (see
        `SubNorm`), and the states after the first counts [N] tokens."""
        [memory] = state
        tokens = x.shape[1]
        q, k, v = jnp.split(jax.nn.silu(into_groups(x, self.inner[...])), 3, axis=-1)
        real = real_tokens(tokens, counts)
        v, g = jnp.where(real, v, 0.0), jnp.where(real, self.decay[...][:, None], 0.0)
        v, g = v[:, :, None], g[:, :, None]  # one head a group
        if tokens == 1:
            g = g[..., 0, :, None]
            o, memory = memory_step(q[:, :, 0], k[:, :, 0], v[..., 0, :], g, memory)
            o = o[:, :, None]
        else:
            o, memory = memory_chunks(q, k, v, g, memory)
        gate = jax.nn.sigmoid(into_groups(x, self.gate[...]))
        o, gate = (jnp.moveaxis(a, 2, 1).reshape(*x.shape[:2], -1) for a in (o[:, :, 0], gate))
        w = self.out[...]
        return self.norm.project(o, w.reshape(w.shape[0], -1), gate, x.dtype), (memory,)

    def finish(self, total: Array, dtype: jnp.dtype) -> Array:
        return self.norm.finish(total, dtype)
