"""Models of every family for tests of meshes, each with its block."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxllm import ModelConfig
from jaxllm.models.block import Block
from jaxllm.models.decoder import DecoderBlock
from jaxllm.models.early import EarlyBlock
from jaxllm.models.gemma4 import Gemma4Block
from jaxllm.models.parts import (
    SANDWICH,
    BlockIndexer,
    Experts,
    Follower,
    Indexer,
    Latent,
    Norms,
    NormStyle,
    Relative,
    Rope,
    Temperature,
)
from jaxllm.models.recurrent import (
    ChannelMix,
    DeltaNet,
    Mamba2,
    Selective,
    ShortConv,
    TimeMix,
)
from support import layer_config, model_config, small_model, with_layers

HALVES = Rope(theta=10000.0, dim=16, pairs="halves")
PARTIAL = Rope(theta=10000.0, dim=8, pairs="halves", scale=8.0, factors="rope_freqs.weight")


def _windows(window: int) -> ModelConfig:
    layers = [
        layer_config(
            8, 2, 16, mlp=211, activation="gelu", softcap=30.0, rope=HALVES, norms=SANDWICH
        )
    ]
    layers.append(with_layers(model_config(layers), window=window, softcap=None).layers[0])
    return model_config(layers, embed_scale=8.0, logit_softcap=3.0)


def _heads_normed() -> ModelConfig:
    """Norms over the heads and columns of all devices, on what is added and not on what is read."""
    norms = Norms(None, "post_attention_norm.weight", None, "post_ffw_norm.weight")
    return with_layers(
        _windows(24),
        norms=norms,
        norm=NormStyle(),
        qk_norm=True,
        norm_heads="all",
        sub_norms=True,
        out_gate=16,
        residual_scale=0.5,
        scale=0.25,
    )


def _biased() -> ModelConfig:
    """No rope but learned positions and linear biases; both halves read one norm with a bias."""
    norm = NormStyle("layer", biases=("attn_norm.bias", "output_norm.bias"))
    layers = dict(
        norm=norm,
        norms=Norms(mlp="attn_norm.weight"),
        parallel=True,
        rope=None,
        alibi=8.0,
        qkv_joined=(256, 128, 128),
        qkv_bias=True,
        qkv_clamp=2.0,
        out_bias=True,
        qk_norm=True,
        norm_heads="each",
        mlp_gated=False,
        mlp_bias=True,
        activation="gelu",
        scale=0.25,
    )
    ends = dict(norm=norm, embed_norm=norm, positions=128, logit_scale=0.5)
    return with_layers(small_model(tied=False, head_bias=True, **ends), **layers)


def _shared() -> ModelConfig:
    """Layers of two kinds, the last of each kind over the cache of the one before; inputs of each
    layer go beside the residual."""
    plain = dict(mlp=211, v_norm=True, inputs=8, out_scale=True, norms=SANDWICH, scale=0.25)
    whole = layer_config(8, 2, 32, rope=HALVES, v_from_k=True, **plain)
    window = layer_config(8, 2, 16, rope=HALVES, window=24, **plain)
    layers = [window, whole]
    layers += [replace(layer, owns_cache=False, v_from_k=False) for layer in layers]
    return model_config(layers, layer_inputs=8)


def _mixture(**experts: Any) -> ModelConfig:
    """Layers of eight experts, of which a token goes through three."""
    fields: dict[str, Any] = dict(count=8, used=3, scores="sigmoid", shared=96) | experts
    return with_layers(small_model(), mlp=96, experts=Experts(**fields))


def _latent() -> ModelConfig:
    """Layers whose eight query heads read one latent vector of 32 values and 8 that turn."""
    layer = layer_config(
        1,
        8,
        40,
        v_dim=32,
        mlp=211,
        rope=Rope(theta=10000.0, dim=8, pairs="neighbours"),
        latent=Latent(q_rank=24, nope=16, v_dim=12),
    )
    return model_config([layer] * 2)


def _sparse() -> ModelConfig:
    """The first layer chooses six keys, and the second attends to those too."""
    plain, _ = _latent().layers
    assert plain.rope is not None
    indexer = Indexer(heads=4, dim=8, top_k=6, rope=plain.rope, bias=True, followed=True)
    first = replace(plain, indexer=indexer, k_dim=plain.k_dim + indexer.dim)
    return model_config([first, replace(plain, indexer=Follower(indexer.top_k))])


def _recurrent() -> ModelConfig:
    """Five groups of a delta net, in turns with gated attention, beside Mamba 2 in one layer; one
    layer has no MLP and one nothing else. Channels of Mamba 1, and heads of channels, whose devices
    sum something midway. Both halves of RWKV 6."""
    gated = layer_config(8, 2, 16, mlp=211, scale=0.25, gated_q=True, out_gate=16, qk_norm=True)
    bare = replace(gated, kv_heads=0, gated_q=False, out_gate=0, qk_norm=False, rope=None)
    net = DeltaNet(groups=5, v_heads=2, dim=8, kernel=4, tiled=True, joined=False)
    mamba = Mamba2(groups=5, heads=2, dim=8, keys=16, kernel=3, normed=True)
    conv = ShortConv(groups=2, channels=32, kernel=3)
    channels = Selective(
        5,
        channels=12,
        keys=8,
        rank=6,
        kernel=4,
        heads=False,
        conv_bias=True,
        normed=True,
        weighted=True,
    )
    layers = [
        replace(bare, recurrent=net),
        replace(gated, recurrent=mamba),
        replace(bare, recurrent=replace(net, tiled=False, joined=True), mlp=0),
        bare,
        replace(bare, recurrent=conv),
        replace(bare, recurrent=channels),
        replace(bare, recurrent=replace(channels, heads=True, conv_bias=False), mlp=0),
        replace(bare, recurrent=TimeMix(groups=8, dim=8, rank=6, decay_rank=4), mlp=0),
        replace(bare, recurrent=ChannelMix(groups=3, columns=48, embed=64), mlp=0),
    ]
    return model_config(layers)


def _encoded() -> ModelConfig:
    """Two blocks of an encoder before one of a decoder, whose self-attention has no MLP."""
    plain = layer_config(8, 2, 16, mlp=211, rope=None, scale=0.25)
    near = Relative("attn_rel_b.weight", 8, both_ways=True, furthest=24)
    encoder = replace(plain, role="encoder", causal=False, relative=near)
    own = replace(plain, mlp=0, norms=Norms(mlp=None), relative=replace(near, both_ways=False))
    memory = replace(plain, mlp=0, norms=Norms("/enc.norm.weight", mlp=None), role="memory")
    cross = replace(plain, role="cross", causal=False, owns_cache=False)
    return model_config([encoder, encoder, own, memory, cross], block_layers=3)


def blocks(size: int) -> ModelConfig:
    """In one of two layers each KV group attends to the three best blocks of so many keys."""
    layer = layer_config(8, 2, 16, mlp=211)
    indexer = BlockIndexer(dim=8, size=size, top=3, local=1, rope=replace(HALVES, dim=8))
    return model_config([layer, replace(layer, indexer=indexer)])


GROUPED = _mixture(groups=4, groups_used=2, scale=2.5, biases=True, shared_gate=True)
WARMER = Temperature(every=8, scale=0.5, offset=1)
EARLY = _mixture(scores="softmax", shared_suffix="", reads="norm")
# The numpy pass of `naive` does not know these; unit/models/test_layers.py has their parts.
SWITCHES = ("heads-normed", "biased", "shared", "recurrent", "blocks", "sparse", "encoded")

MODELS: dict[str, tuple[type[Block], ModelConfig]] = {
    "llama": (DecoderBlock, small_model()),
    "llama-factors": (DecoderBlock, with_layers(small_model(), rope=PARTIAL)),
    "qwen2": (DecoderBlock, with_layers(small_model(tied=False), qkv_bias=True, rope=HALVES)),
    "qwen3": (DecoderBlock, with_layers(small_model(), qk_norm=True, scale=0.25, rope=HALVES)),
    "gemma2": (DecoderBlock, _windows(24)),
    "gemma3": (DecoderBlock, with_layers(_windows(32), qk_norm=True, scale=0.25, softcap=None)),
    "heads-normed": (DecoderBlock, _heads_normed()),
    "biased": (DecoderBlock, _biased()),
    "shared": (Gemma4Block, _shared()),
    "recurrent": (DecoderBlock, _recurrent()),
    "blocks": (DecoderBlock, blocks(4)),
    "sparse": (DecoderBlock, _sparse()),
    "encoded": (DecoderBlock, _encoded()),
    "sinks": (DecoderBlock, with_layers(_windows(24), sinks=True, out_factor=0.5)),
    "chunks": (DecoderBlock, with_layers(_windows(24), chunked=True, temperature=WARMER)),
    "latent": (DecoderBlock, _latent()),
    "experts": (DecoderBlock, GROUPED),
    "early-experts": (EarlyBlock, EARLY),
    "head-bias": (DecoderBlock, small_model(tied=False, head_bias=True)),
    "wide-keys": (DecoderBlock, with_layers(small_model(), k_dim=192, v_dim=128, scale=5.0)),
    "wide-values": (DecoderBlock, with_layers(small_model(), v_dim=24)),
    "one-of-8": (DecoderBlock, model_config([layer_config(1, 8, 16, mlp=211)] * 2)),
    "one-of-6": (DecoderBlock, model_config([layer_config(1, 6, 16, mlp=211)] * 2)),
    "three-of-4": (DecoderBlock, model_config([layer_config(3, 4, 16, mlp=211)] * 2)),
}
