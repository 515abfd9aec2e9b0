"""The recurrent mixer of a layer's slice, by its kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax.numpy as jnp

from jaxllm.models.config import LayerConfig
from jaxllm.models.delta import GatedDeltaNet, KimiDeltaMixer
from jaxllm.models.grouped import Mixer
from jaxllm.models.lightning import LightningMixer
from jaxllm.models.mamba2 import Mamba2Mixer
from jaxllm.models.recurrent import (
    ChannelMix,
    DeltaNet,
    KimiDelta,
    Lightning,
    Mamba2,
    Selective,
    ShortConv,
    TimeMix,
)
from jaxllm.models.selective import SelectiveMixer
from jaxllm.models.short_conv import ShortConvMixer
from jaxllm.models.time_mix import ChannelMixer, TimeMixer

KINDS: Mapping[type, Callable[..., Mixer]] = {
    ChannelMix: ChannelMixer,
    DeltaNet: GatedDeltaNet,
    KimiDelta: KimiDeltaMixer,
    Lightning: LightningMixer,
    Mamba2: Mamba2Mixer,
    Selective: SelectiveMixer,
    ShortConv: ShortConvMixer,
    TimeMix: TimeMixer,
}


def mixer(cfg: LayerConfig, groups: int, embed: int, dtype: jnp.dtype) -> Mixer | None:
    """That of so many groups; None for a layer without."""
    if cfg.recurrent is None:
        return None
    return KINDS[type(cfg.recurrent)](cfg, groups, embed, dtype)
