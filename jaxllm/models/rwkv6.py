"""rwkv6: memories that fade and a shift by one token in place of attention (Peng et al. 2024)."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

import jax.numpy as jnp

from jaxllm.errors import ModelError
from jaxllm.gguf.metadata import Metadata
from jaxllm.models.config import ModelConfig
from jaxllm.models.decoder import DecoderBlock
from jaxllm.models.family import Family, Tensors, read_layer, read_model
from jaxllm.models.layers import Array
from jaxllm.models.parts import Norms
from jaxllm.models.recurrent import ChannelMix, TimeMix

BIASES = ("attn_norm.bias", "attn_norm_2.bias")
BLOCK = 32  # columns that stored weights keep together, where the width allows


class HalfBlock(DecoderBlock):
    """x + mixer(norm(x)), half of it where a layer says so, that narrow floats may hold it."""

    def join_attention(self, x: Array, total: Array) -> tuple[Array, Array]:
        joined, read = super().join_attention(x, total)
        return (joined * jnp.asarray(0.5, x.dtype) if self.cfg.halved else joined), read


def configure(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """Both halves of a block are layers of their own. Old files, in which the tensors of the
    mixtures are apart, are refused."""
    lerps = "blk.0.time_mix_lerp_fused.weight"
    if lerps not in tensors:
        raise ModelError(f"{lerps} is missing; convert the model again with a newer tool")
    if int(meta.get("token_shift_count", 2)) != 2:
        raise ModelError(
            f"{meta.architecture}.token_shift_count is {meta.get('token_shift_count')}; it must be "
            "2, one for each half of a block"
        )
    keys = "embedding_length", "wkv.head_size", "time_mix_extra_dim", "time_decay_extra_dim"
    embed, dim, rank, decay_rank = (meta.require(key, int) for key in keys)
    if min(embed, dim, rank, decay_rank) < 1 or embed % dim:
        raise ModelError(
            f"{meta.architecture} has a width of {embed}, heads of {dim}, and mixtures and decays "
            f"made of {rank} and {decay_rank} values; expected whole heads, and at least 1 value"
        )
    heads, every = embed // dim, int(meta.get("rescale_every_n_layers", 0))
    time = TimeMix(heads, dim, rank, decay_rank)
    layers = []
    for i, own in enumerate(read_layer(meta, tensors, None, "layer", partial=True)):
        whole = own.mlp // BLOCK if own.mlp % BLOCK == 0 else own.mlp
        groups = gcd(heads, whole)
        first = replace(own.without_attention(time), norms=Norms(mlp=None), mlp=0)
        first = replace(first, norm=replace(own.norm, biases=BIASES))
        second = replace(
            first,
            recurrent=ChannelMix(groups, own.mlp // groups, embed),
            norms=Norms("attn_norm_2.weight", mlp=None),
            halved=every > 0 and (i + 1) % every == 0,
        )
        layers += [first, second]
    mixes = tuple(f"time_mix_lerp_{side}.weight" for side in "wkvrg")
    return read_model(meta, tensors, layers, block_layers=2, unused=mixes)


FAMILY = Family(HalfBlock, configure)
