"""Experts that take part before attention has: they, or their router, read the layer's input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import jax.numpy as jnp

from jaxllm.gguf.metadata import Metadata
from jaxllm.models.config import Columns, LayerConfig, ModelConfig
from jaxllm.models.decoder import DecoderBlock
from jaxllm.models.experts import RoutedMLP
from jaxllm.models.family import Family, Tensors, read_layer, read_model
from jaxllm.models.layers import Array, Norm
from jaxllm.models.routing import Routing


class EarlyBlock(DecoderBlock):
    """A layer whose MLP reads two things side by side [B, T, 2 D]: what it would read after
    attention, and the layer's input, for the router alone or, normalised, for all experts; then
    the dense MLP beside them reads the first."""

    def __init__(
        self, cfg: LayerConfig, kv_heads: int, columns: Columns, embed: int, dtype: jnp.dtype
    ):
        super().__init__(cfg, kv_heads, columns, embed, dtype)
        whole = cfg.experts is not None and cfg.experts.reads == "norm"
        self.early_norm = Norm(embed, cfg.eps, "ffn_norm_exps.weight", cfg.norm) if whole else None

    def join_attention(self, x: Array, total: Array) -> tuple[Array, Array]:
        joined, read = super().join_attention(x, total)
        early = x if self.early_norm is None else self.early_norm(x)
        return joined, jnp.concatenate([read, early], axis=-1)

    def end_mlp(self, begun: Array, total: Array | None) -> Array:
        late, early = jnp.split(begun, 2, axis=-1)
        assert isinstance(self.ffn, RoutedMLP)
        if self.early_norm is None:
            return self.ffn.routed(late, early)
        assert self.ffn.shared is not None
        return self.ffn.routed(early, early) + self.ffn.shared(late)


def _arctic(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """A dense MLP after attention, and experts that read what the layer was given."""
    layers = read_layer(meta, tensors, "neighbours", routing=Routing(shared="", reads="norm"))
    return read_model(meta, tensors, layers)


def _smallthinker(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """Where there are windows they are of 4096; every fourth layer has none and no rope. A model
    of four layers has rope in all, as in llama.cpp."""
    routing = Routing(scores_key=True, reads="route")
    layers = read_layer(meta, tensors, "halves", routing=routing, activation="relu")
    rope = len(layers) == 4
    if int(meta.get("attention.sliding_window", 0)):
        layers = [
            replace(
                layer, window=4096 if i % 4 else None, rope=layer.rope if i % 4 or rope else None
            )
            for i, layer in enumerate(layers)
        ]
    return read_model(meta, tensors, layers)


FAMILIES: Mapping[str, Family] = {
    "arctic": Family(EarlyBlock, _arctic),
    "smallthinker": Family(EarlyBlock, _smallthinker),
}
