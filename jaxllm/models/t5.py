"""t5: an encoder before a decoder, biases by distance in place of positions, scores that are not
scaled (Raffel et al. 2020).

A block of the decoder is three layers: attention to the decoder's own tokens, a memory of what the
encoder gives, and cross attention over that memory with the MLP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt

from jaxllm.errors import ModelError
from jaxllm.gguf.metadata import Metadata
from jaxllm.models.config import LayerConfig, ModelConfig
from jaxllm.models.decoder import DecoderBlock
from jaxllm.models.family import Family, Tensors, read_layer, read_model
from jaxllm.models.parts import AttnNames, Norms, Relative

BIAS = "attn_rel_b.weight"
FURTHEST = 128  # distance with a bucket of its own; in all sizes, and not in files
OWN = AttnNames(out="attn_o")
CROSS = AttnNames("cross_attn_q", "cross_attn_k", "cross_attn_v", "cross_attn_o")


def configure(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """Where the head is the embedding table its logits are scaled as in training, which llama.cpp
    leaves out: the order of tokens is the same."""
    count = meta.require("block_count", int)
    encoder = _side(meta, tensors, "enc.", count)
    layers = [replace(own, role="encoder", causal=False) for own in encoder]
    blocks = int(meta.get("decoder_block_count", count))
    for own in _side(meta, tensors, "dec.", blocks):
        alone = replace(own, mlp=0, norms=Norms(mlp=None))
        apart = replace(own, relative=None, causal=False, attn_names=CROSS)
        memory = Norms("/enc.output_norm.weight", mlp=None)
        layers += [
            alone,
            replace(apart, role="memory", mlp=0, norms=memory),
            replace(apart, role="cross", owns_cache=False, norms=Norms("cross_attn_norm.weight")),
        ]
    tied = "output.weight" not in tensors
    return read_model(
        meta,
        tensors,
        layers,
        norm_name="dec.output_norm",
        block_layers=3,
        start=int(meta.get("decoder_start_token_id", 0)),
        logit_scale=1.0 / sqrt(meta.require("embedding_length", int)) if tied else 1.0,
        unused=(f".cross_{BIAS}",),  # which no implementation reads
    )


def _side(meta: Metadata, tensors: Tensors, side: str, count: int) -> Sequence[LayerConfig]:
    """The layers of the encoder or the decoder, as if they were all that the file has."""
    own = {n.removeprefix(side): info for n, info in tensors.items() if n.startswith(side)}
    first = f"blk.0.{BIAS}"
    if first not in own:
        raise ModelError(f"{side}{first} is missing; the file does not hold a whole model")
    buckets = int(own[first].shape[0])
    if not 4 <= buckets <= FURTHEST:
        raise ModelError(
            f"{side}{first} has biases of {buckets} ranges of distances; expected 4 to {FURTHEST}"
        )
    alone = Metadata({**meta.values, f"{meta.architecture}.block_count": count}, meta.architecture)
    gated = "blk.0.ffn_gate.weight" in own
    layers = read_layer(
        alone,
        own,
        None,
        scale=1.0,
        attn_names=OWN,
        mlp_gated=gated,
        activation="gelu" if gated else "relu",
    )

    def biased(i: int, layer: LayerConfig) -> LayerConfig:
        """With its own biases, or those of the first layer, which most models share."""
        mine = i > 0 and f"blk.{i}.{BIAS}" in own
        source = BIAS if mine else f"/{side}{first}"
        return replace(layer, relative=Relative(source, buckets, side == "enc.", FURTHEST))

    return [biased(i, layer) for i, layer in enumerate(layers)]


FAMILY = Family(DecoderBlock, configure)
