"""The ends of a layer that predicts tokens ahead (MTP, NextN; DeepSeek-V3).

The layer reads, at position p, the token there and the hidden state of the model at p - 1 after its
last norm, both normalised and joined by a projection, and predicts the token at p + 1. Its own
result after a last norm takes the place of the hidden state where the model has none yet. Table,
last norm and head are the model's where the layer has none of its own.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx

from jaxllm.models.config import ModelConfig
from jaxllm.models.layers import Array, Norm, linear, matrix


class NextN(nnx.Module):
    """What comes before the layer and after it, over a device's own vocabulary rows."""

    def __init__(self, cfg: ModelConfig, rows: int, dtype: jnp.dtype):
        assert cfg.draft is not None
        own, embed = f"/blk.{len(cfg.layers) - 1}.nextn.", cfg.embed

        def norm(name: str) -> Norm:
            return Norm(embed, cfg.eps, f"{own}{name}.weight")

        def of_vocab(name: str) -> nnx.Param:
            source = (f"{own}{name}.weight",)
            return matrix((rows, embed), ("vocab", "embed"), source, dtype)

        self.token_norm, self.hidden_norm = norm("enorm"), norm("hnorm")
        source = (f"{own}eh_proj.weight",)
        self.project = matrix((embed, 2 * embed), ("embed", "embed"), source, dtype)
        self.table = of_vocab("embed_tokens") if cfg.draft.table else None
        self.norm = norm("shared_head_norm") if cfg.draft.norm else None
        self.head = of_vocab("shared_head_head") if cfg.draft.head else None

    def __call__(self, x: Array, hidden: Array) -> Array:
        """Embeddings x and hidden states [B, T, D] -> what the layer reads [B, T, D]."""
        both = self.token_norm(x), self.hidden_norm(hidden.astype(x.dtype))
        return linear(jnp.concatenate(both, axis=-1), self.project[...])
