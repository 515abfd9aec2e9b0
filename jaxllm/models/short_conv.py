"""The gated short convolution of LFM2: y = c * conv(b * x), with b, c and x projections."""

from __future__ import annotations

import jax.numpy as jnp

from jaxllm.models.config import LayerConfig
from jaxllm.models.conv import causal_conv
from jaxllm.models.grouped import Mixer, conv_taps, into_groups, out_of_groups
from jaxllm.models.layers import Array, matrix
from jaxllm.models.recurrent import ShortConv
from jaxllm.models.sections import together


class ShortConvMixer(Mixer):
    """Both projections and the convolution over a device's own groups of channels."""

    def __init__(self, cfg: LayerConfig, groups: int, embed: int, dtype: jnp.dtype):
        assert isinstance(cfg.recurrent, ShortConv)
        net = cfg.recurrent
        axes = "state_group", "head_rows"
        whole = net.groups * net.channels
        self.inner = matrix(
            (groups, 3 * net.channels, embed),
            (*axes, "embed"),
            ("shortconv.in_proj.weight",),
            dtype,
            form="sections",
            sections=tuple(together(i * whole, net.channels) for i in range(3)),
        )
        source, own = "shortconv.conv.weight", (together(0, net.channels),)
        self.taps = conv_taps(groups, net.channels, net.kernel, own, source)
        self.out = matrix(
            (embed, groups, net.channels),
            ("embed", "state_group", "head_rows"),
            ("shortconv.out_proj.weight",),
            dtype,
            form="columns",
        )

    def __call__(
        self, x: Array, state: tuple[Array, ...], counts: Array
    ) -> tuple[Array, tuple[Array, ...]]:
        """x [N, T, D] and states of own groups -> [N, T, D], to be summed over devices, and the
        states after the first counts [N] tokens."""
        b, c, u = jnp.split(into_groups(x, self.inner[...]), 3, axis=-1)
        u, last = causal_conv(b * u, self.taps[...], state[0], counts)
        u = jnp.moveaxis(c * u, 2, 1).astype(x.dtype)
        return out_of_groups(u, self.out[...]), (last,)
