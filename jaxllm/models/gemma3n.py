"""gemma3n (text): several residual streams, inputs of each layer, a low-rank way around attention,
and gates of the first layers of which most are zero.

The streams are AltUp's (Baykal et al. 2023), the way around LAuReL's (Menghani et al. 2024), the
sparse gates Spark Transformer's (You et al. 2025).
"""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.errors import ModelError
from jaxllm.gguf.metadata import Metadata
from jaxllm.models.config import Columns, LayerConfig, ModelConfig
from jaxllm.models.decoder import DecoderBlock
from jaxllm.models.family import Family, Tensors, in_window, read_layer, read_model, read_positive
from jaxllm.models.inputs import LayerGate
from jaxllm.models.layers import ACTIVATIONS, Array, DenseMLP, Heads, Norm, linear, matrix, param
from jaxllm.models.parts import SANDWICH, AltUp

# What files do not say: it is the same in all sizes.
OWNERS = 20  # layers with a cache of their own
SPARSE, DEVIATIONS = 10, 1.6448533535003662  # layers whose gates are cut, and where
SOFTCAP = 30.0


class Mixer(nnx.Module):
    """How much of each stream goes into each, from what the layer computes."""

    def __init__(self, cfg: LayerConfig, altup: AltUp, embed: int):
        n, f32 = altup.streams, jnp.dtype(jnp.float32)
        self.norm = Norm(embed, cfg.eps, "altup_router_norm.weight")
        axes, source = ("stream", "embed"), ("altup_router.weight",)
        self.router = param((n, embed), axes, source, f32)
        axes, source = ("stream", "stream"), ("altup_predict_coef.weight",)
        self.predict_by = param((n * n, n), axes, source, f32)
        self.correct_by = param((n, n), axes, ("altup_correct_coef.weight",), f32)

    def predict(self, streams: Array) -> Array:
        """What the streams [B, T, N, D] will be after the layer, by those before it."""
        n = streams.shape[-2]
        by = linear(self._kinds(streams[..., 0, :]), self.predict_by[...])
        by = by.reshape(*streams.shape[:-2], n, n)  # to, from
        return streams + jnp.einsum("btij,btjd->btid", by, streams, precision="highest")

    def correct(self, predicted: Array, found: Array) -> Array:
        """The streams [B, T, N, D], given what the layer found [B, T, D] the first to be."""
        by = 1.0 + linear(self._kinds(found), self.correct_by[...])
        return predicted + by[..., None] * (found - predicted[..., 0, :])[..., None, :]

    def _kinds(self, x: Array) -> Array:
        y = self.norm(x.astype(jnp.float32)) / x.shape[-1]
        return jnp.tanh(linear(y, self.router[...]))


class Laurel(nnx.Module):
    """x + norm(x through a matrix of low rank)."""

    def __init__(self, cfg: LayerConfig, altup: AltUp, embed: int, dtype: jnp.dtype):
        rank, axes = altup.laurel, ("latent", "embed")
        self.left = matrix((rank, embed), axes, ("laurel_l.weight",), dtype)
        self.right = matrix((embed, rank), axes[::-1], ("laurel_r.weight",), dtype)
        self.norm = Norm(embed, cfg.eps, "laurel_post_norm.weight")

    def __call__(self, x: Array) -> Array:
        return x + self.norm(linear(linear(x, self.left[...]), self.right[...]))


class Gemma3nBlock(DecoderBlock):
    """A DecoderBlock of the first of N streams. The residual is [N streams | inputs of all layers];
    between attention and MLP what the layer has so far stands before it, and the streams are what
    they are predicted to be. As in gemma4 a layer moves its inputs to the end."""

    def __init__(
        self, cfg: LayerConfig, kv_heads: int, columns: Columns, embed: int, dtype: jnp.dtype
    ):
        super().__init__(cfg, kv_heads, columns, embed, dtype)
        assert cfg.altup is not None
        self.embed, self.streams = embed, cfg.altup.streams
        self.mixer = Mixer(cfg, cfg.altup, embed)
        self.laurel = Laurel(cfg, cfg.altup, embed, dtype)
        self.inputs = LayerGate(cfg, cfg.inputs, embed, dtype)
        f32, name = jnp.dtype(jnp.float32), ("altup_correct_scale.weight",)
        self.first_scale = param((embed,), ("embed",), name, f32)

    def _parts(self, x: Array) -> tuple[Array, Array]:
        """The streams [B, T, N, D] of a residual, and the inputs of the layers."""
        streams, inputs = jnp.split(x, [self.streams * self.embed], axis=-1)
        return streams.reshape(*x.shape[:2], self.streams, self.embed), inputs

    def _predicted(self, x: Array) -> tuple[Array, Array]:
        streams, inputs = self._parts(x)
        return self.mixer.predict(streams).astype(x.dtype), inputs

    def project(self, x: Array) -> Heads:
        return super().project(self._predicted(x)[0][..., 0, :])

    def join_attention(self, x: Array, total: Array) -> tuple[Array, Array]:
        assert self.mlp_norm is not None
        predicted, inputs = self._predicted(x)
        first = predicted[..., 0, :]
        joined = self._add(first, total, None, self.post_attn_norm)
        joined = (joined + self.laurel(self._read(first))) * jnp.asarray(sqrt(0.5), x.dtype)
        streams = predicted.reshape(*x.shape[:2], -1)
        return jnp.concatenate([joined, streams, inputs], axis=-1), self.mlp_norm(joined)

    def begin_mlp(self, read: Array) -> tuple[Any, Array | None]:
        if not self.cfg.mlp_sparsity:
            return super().begin_mlp(read)
        assert isinstance(self.ffn, DenseMLP)
        columns = self.ffn.columns(read)
        gate = jnp.split(columns, 2, axis=-1)[0].astype(jnp.float32)
        return columns, jnp.stack([gate.sum(axis=-1), (gate * gate).sum(axis=-1)], axis=-1)

    def end_mlp(self, begun: Any, total: Array | None) -> Array:
        if total is None:
            return super().end_mlp(begun, total)
        assert isinstance(self.ffn, DenseMLP)
        count = self.cfg.mlp
        mean, squares = total[..., :1] / count, total[..., 1:]
        deviation = jnp.sqrt((squares - count * mean * mean) / (count - 1))
        gate, up = jnp.split(begun, 2, axis=-1)
        cut = (mean + self.cfg.mlp_sparsity * deviation).astype(gate.dtype)
        gate = ACTIVATIONS["gelu"](jax.nn.relu(gate - cut))
        return linear(gate * up, self.ffn.down[...])

    def join_mlp(self, x: Array, total: Array) -> Array:
        predicted, inputs = self._parts(x[..., self.embed :])
        found = self._add(x[..., : self.embed], total, None, self.post_mlp_norm)
        streams = self.mixer.correct(predicted, found).astype(x.dtype)
        first = (streams[..., 0, :] * self.first_scale[...]).astype(x.dtype)
        more = self.inputs(first, inputs[..., : self.cfg.inputs])
        streams = streams.at[..., 1:, :].add(more[..., None, :]).reshape(*x.shape[:2], -1)
        return jnp.concatenate([streams, jnp.roll(inputs, -self.cfg.inputs, axis=-1)], axis=-1)


def configure(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """Layers with a window have a rope base of their own, without scaling. The last layers read the
    caches of earlier ones; their own keys and values are not used."""
    embed, window = meta.require("embedding_length", int), meta.require("attention.sliding_window")
    period = int(meta.get("attention.sliding_window_pattern", 5))
    key = "rope.freq_base_swa"
    theta = read_positive(meta, key, meta.get(key, 10000.0))
    streams, laurel, inputs = (
        _rows(tensors, name)
        for name in ("blk.0.altup_router", "blk.0.laurel_l", "per_layer_proj_norm")
    )
    layers = read_layer(
        meta,
        tensors,
        "halves",
        window=True,
        activation="gelu",
        norms=SANDWICH,
        scale=1.0,
        v_norm=True,
        inputs=inputs,
        altup=AltUp(streams, laurel),
    )

    def adapt(i: int, layer: LayerConfig) -> LayerConfig:
        sparsity = DEVIATIONS if i < SPARSE else 0.0
        layer = replace(layer, owns_cache=i < OWNERS, mlp_sparsity=sparsity)
        if not in_window(i, period):
            return layer
        return replace(layer.with_rope(theta=theta, scale=1.0, factors=None), window=window)

    parts = ("k", "v", "k_norm")
    unused = [f"blk.{i}.attn_{p}.weight" for i in range(OWNERS, len(layers)) for p in parts]
    return read_model(
        meta,
        tensors,
        [adapt(i, layer) for i, layer in enumerate(layers)],
        embed_scale=sqrt(embed),
        streams=streams,
        layer_inputs=inputs,
        logit_softcap=SOFTCAP,
        unused=tuple(unused),
    )


def _rows(tensors: Tensors, name: str) -> int:
    """Rows of a tensor that says a size which metadata do not."""
    if f"{name}.weight" not in tensors:
        raise ModelError(f"{name}.weight is missing; the file does not hold a whole model")
    return int(tensors[f"{name}.weight"].shape[0])


FAMILY = Family(Gemma3nBlock, configure)
