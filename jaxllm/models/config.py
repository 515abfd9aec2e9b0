"""What a model is, read once from GGUF metadata: frozen, hashable, free of weights and devices.

Dimension letters used throughout the package: B batch rows, T query positions, S key positions,
D model width, N query heads, K KV heads, G query heads a KV head, H head dim, F MLP columns,
V vocabulary rows, P positions of a page, R devices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from jaxllm.cache.types import CacheFormat
from sharding import LayerShape, ModelShape


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of one layer (Su et al. 2021).

    `pairs` says which two dims are rotated together: "neighbours" (0,1), (2,3), ... as in llama's
    GGUF files, or "halves" (0, dim/2), ... as in most other families.
    """

    theta: float
    dim: int
    pairs: Literal["neighbours", "halves"]
    scale: float = 1.0  # positions are divided by it (linear scaling)
    factors: bool = False  # frequencies are divided by the tensor rope_freqs.weight


@dataclass(frozen=True)
class LayerConfig:
    """Sizes and switches of one decoder layer, before any split."""

    kv_heads: int
    q_per_kv: int
    k_dim: int
    v_dim: int
    mlp: int
    rope: Rope
    scale: float  # of the attention scores
    eps: float
    window: int | None = None  # position p sees keys k with p - k < window
    softcap: float | None = None  # of the attention scores
    activation: Literal["silu", "gelu"] = "silu"
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    experts: int = 0  # MLPs that a router picks from; 0 for a dense layer
    experts_used: int = 0  # picked for each token
    kv_repeat: int = 1  # times each stored KV head is repeated (a plan's KV replication)
    cache: CacheFormat = CacheFormat()  # how a plan stores K and V

    def replicated(self, times: int) -> LayerConfig:
        """This layer with every KV head stored `times` times, its query heads dealt out."""
        if times == 1:
            return self
        return replace(
            self,
            kv_heads=self.kv_heads * times,
            q_per_kv=self.q_per_kv // times,
            kv_repeat=self.kv_repeat * times,
        )


@dataclass(frozen=True)
class ModelConfig:
    """A whole model: its ends and its layers."""

    architecture: str
    embed: int
    vocab: int
    layers: tuple[LayerConfig, ...]
    eps: float
    tied: bool
    ctx_train: int
    head_bias: bool = False
    embed_scale: float = 1.0
    logit_softcap: float | None = None
    name: str = ""

    def shape(self, mlp_block: int = 32) -> ModelShape:
        """The sizes that a plan needs; `mlp_block` is the block size of the down tensors' type."""
        return ModelShape(
            layers=tuple(
                LayerShape(
                    kv_heads=layer.kv_heads,
                    q_per_kv=layer.q_per_kv,
                    k_dim=layer.k_dim,
                    v_dim=layer.v_dim,
                    mlp=layer.mlp,
                    mlp_block=mlp_block,
                    window=layer.window,
                    experts=layer.experts,
                    experts_used=layer.experts_used,
                )
                for layer in self.layers
            ),
            vocab=self.vocab,
            embed=self.embed,
            name=self.name or self.architecture,
        )
