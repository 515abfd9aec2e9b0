"""grovemoe: a second mixture, of smaller experts that stand for groups of the first one's."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from jaxllm.errors import ModelError
from jaxllm.gguf.metadata import Metadata
from jaxllm.models.config import Columns, LayerConfig, ModelConfig
from jaxllm.models.decoder import DecoderBlock
from jaxllm.models.experts import LEAST_SUM, ExpertMLPs, RoutedMLP
from jaxllm.models.family import Family, Tensors, read_layer, read_model
from jaxllm.models.layers import Array, linear
from jaxllm.models.parts import Adjugates, Experts
from jaxllm.models.routing import Routing, columns_of

DEFAULT_SCALE = 0.05


class GroveBlock(DecoderBlock):
    """A DecoderBlock whose mixture is followed by a second one. As in llama.cpp the smaller experts
    read what the first mixture gives, whole, and are weighted by the scores at their own indexes.
    """

    def __init__(
        self, cfg: LayerConfig, kv_heads: int, columns: Columns, embed: int, dtype: jnp.dtype
    ):
        super().__init__(cfg, kv_heads, columns, embed, dtype)
        own = None if cfg.experts is None else cfg.experts.adjugates
        assert cfg.experts is not None and own is not None
        count = cfg.experts.count // own.group
        experts = Experts(count, min(cfg.experts.used, count))
        self.scale, self.group = own.scale, own.group
        self.adjugates = ExpertMLPs(
            cfg, experts, columns.shared, embed, dtype, "_chexps", axis="shared_mlp"
        )

    def begin_mlp(self, read: Array) -> tuple[tuple[Array, Array], Array]:
        assert isinstance(self.ffn, RoutedMLP)
        mixed = self.ffn.routed(read, read)
        return (read, mixed), mixed

    def end_mlp(self, begun: tuple[Array, Array], total: Array | None) -> Array:
        read, mixed = begun
        assert total is not None
        more = self.adjugates.mix(total, *self._route(read.reshape(-1, read.shape[-1])))
        return mixed + more * jnp.asarray(self.scale, more.dtype)

    def _route(self, rows: Array) -> tuple[Array, Array]:
        """rows [M, D] -> float32 weights and ids [M, used] of the smaller experts."""
        assert isinstance(self.ffn, RoutedMLP)
        logits = linear(rows.astype(jnp.float32), self.ffn.router.weight[...])
        chosen = lax.top_k(logits, self.adjugates.experts.used)[1] // self.group
        weights = jnp.take_along_axis(jax.nn.softmax(logits, axis=-1), chosen, axis=-1)
        return weights / jnp.maximum(weights.sum(axis=-1, keepdims=True), LEAST_SUM), chosen


def configure(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """Each layer is a mixture, and its scores are a softmax over all experts."""
    group = meta.require("experts_per_group", int)
    scale = float(meta.get("expert_group_scale", DEFAULT_SCALE))

    def adapt(i: int, layer: LayerConfig) -> LayerConfig:
        columns = columns_of(tensors, f"blk.{i}.ffn_down_chexps.weight")
        if layer.experts is None or group < 1 or layer.experts.count % group:
            count = 0 if layer.experts is None else layer.experts.count
            raise ModelError(
                f"layer {i} has {count} experts in groups of {group}; use another file"
            )
        experts = replace(layer.experts, adjugates=Adjugates(columns, group, scale))
        return replace(layer, experts=experts)

    layers = read_layer(meta, tensors, "halves", routing=Routing())
    return read_model(meta, tensors, [adapt(i, layer) for i, layer in enumerate(layers)])


FAMILY = Family(GroveBlock, configure)
