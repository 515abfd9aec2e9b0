"""talkie: norms without weights, and a part of the embedding added by every layer."""

from __future__ import annotations

import jax.numpy as jnp

from jaxllm.gguf.metadata import Metadata
from jaxllm.models.config import Columns, LayerConfig, ModelConfig
from jaxllm.models.decoder import DecoderBlock
from jaxllm.models.family import Family, Tensors, read_layer, read_model
from jaxllm.models.layers import Array, Heads, normalise, param
from jaxllm.models.parts import NormStyle


class TalkieBlock(DecoderBlock):
    """A DecoderBlock over the first half of a residual [B, T, 2 D]; the other is the embedding.

    Queries and keys are normalised after their rotation, and queries have a gain a head.
    """

    def __init__(
        self, cfg: LayerConfig, kv_heads: int, columns: Columns, embed: int, dtype: jnp.dtype
    ):
        super().__init__(cfg, kv_heads, columns, embed, dtype)
        f32 = jnp.dtype(jnp.float32)
        self.embed, self.eps = embed, cfg.eps
        self.gain = param(
            (kv_heads, cfg.q_per_kv, 1),
            ("kv_group", "head_rows", "head_dim"),
            ("attn_q_norm.weight",),
            f32,
            form="q_heads",
        )
        self.kept = param((1,), ("embed",), ("layer_output_scale.weight",), f32)

    def project(self, x: Array) -> Heads:
        return super().project(x[..., : self.embed])

    def before_attention(self, heads: Heads, squares: Array | None, positions: Array) -> Heads:
        q, k, v = super().before_attention(heads, squares, positions)
        assert k is not None
        sides = (normalise(h.astype(jnp.float32), "rms", self.eps) for h in (q, k))
        gained, k = (h.astype(q.dtype) for h in sides)
        return gained * self.gain[...].astype(q.dtype), k, v

    def join_attention(self, x: Array, total: Array) -> tuple[Array, Array]:
        joined, read = super().join_attention(x[..., : self.embed], total)
        return jnp.concatenate([joined, x[..., self.embed :]], axis=-1), read

    def join_mlp(self, x: Array, total: Array) -> Array:
        first, kept = jnp.split(x, 2, axis=-1)
        joined = super().join_mlp(first, total) + kept * self.kept[...].astype(x.dtype)
        return jnp.concatenate([joined, kept], axis=-1)


def configure(meta: Metadata, tensors: Tensors) -> ModelConfig:
    """The norm of queries that a file has is that gain, not one of weights."""
    return read_model(
        meta,
        tensors,
        read_layer(meta, tensors, "halves", weights=False, qk_norm=False),
        embed_norm=NormStyle(weight=False),
        embed_kept=True,
        logit_scale=float(meta.require("logit_scale")),
    )


FAMILY = Family(TalkieBlock, configure)
