"""What a model is, read once from GGUF metadata: frozen, hashable, free of weights and devices.

Dimension letters used throughout the package: B batch rows, T query positions, S key positions,
D model width, N query heads, K KV heads, G query heads a KV head, H head dim, F MLP columns,
V vocabulary rows, P positions of a page, R devices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from jaxllm.cache.types import CacheFormat
from jaxllm.errors import ModelError
from jaxllm.models.parts import (
    RMS,
    Activation,
    AltUp,
    AttnNames,
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
from jaxllm.models.recurrent import Recurrent, state_bytes
from sharding import Context, LayerShape, ModelShape, Role


class Columns(NamedTuple):
    """MLP columns of one layer, or of a device's slice of it, and groups of a recurrent state."""

    mlp: int
    shared: int = 0  # of what is beside a mixture of experts: an MLP, or smaller experts
    states: int = 0


@dataclass(frozen=True)
class LayerConfig:
    """Sizes and switches of one decoder layer, before any split.

    `norm_heads` says over what a norm of queries and keys goes: over each head with one weight for
    all, over each head with a weight for each, over the whole projection, or over each head
    without a weight.
    """

    kv_heads: int
    q_per_kv: int
    k_dim: int
    v_dim: int
    mlp: int
    rope: Rope | None  # None: a layer without
    scale: float  # of the attention scores
    eps: float
    role: Role = "decoder"  # in a model with an encoder: see `sharding.LayerShape`
    causal: bool = True  # False: every position sees the whole prompt, one step, or a memory
    window: int | None = None  # position p sees keys k with p - k < window
    chunked: bool = False  # and none before the last multiple of it
    temperature: Temperature | None = None
    softcap: float | None = None  # of the attention scores
    sinks: bool = False  # one more logit a query head, which takes weight and gives no value
    alibi: float = 0.0  # largest exponent of the slopes of linear biases (Press et al. 2022)
    relative: Relative | None = None  # biases of the scores by distance
    attn_names: AttnNames = AttnNames()
    norm: NormStyle = RMS
    norms: Norms = Norms()
    post_eps: float | None = None  # of norms on what is added, where theirs is another
    parallel: bool = False  # the MLP reads the residual that attention reads
    residual_scale: float = 1.0  # of what each half adds
    halved: bool = False  # the layer's result, residual and all
    read_residual: float = 0.0  # each half adds to so many times what it reads, not to the residual
    qkv_joined: tuple[int, int, int] | None = None  # rows of q, k and v in one tensor attn_qkv
    v_from_k: bool = False  # values are what keys are made of
    v_norm: bool = False  # an RMS norm of values, over each head, without a weight
    qkv_bias: bool = False
    qkv_clamp: float | None = None
    out_bias: bool = False
    gated_q: bool = False  # in attn_q each head's gate follows its query
    out_factor: float = 1.0  # of attention's part of the residual, before its bias
    out_gate: int = 0  # of a gate a query head on its output: one, or one a value; 0 for none
    out_gate_kind: Literal["sigmoid", "softplus"] = "sigmoid"
    qk_norm: bool = False
    norm_heads: Literal["one", "each", "all", "bare"] = "one"
    rope_first: bool = False  # before the norm of queries and keys
    sub_norms: bool = False  # on what the output and down projections read, over its whole width
    inputs: int = 0  # channels that go beside the residual to this layer
    earlier: int = 0  # residuals of earlier layers that are kept beside it: see `models.kept`
    begins_anew: bool = False  # the residual is kept too, and goes on with attention's part alone
    altup: AltUp | None = None
    out_scale: bool = False  # the layer's result, residual and all, is multiplied by a tensor
    activation: Activation = "silu"
    xielu: tuple[float, ...] = ()  # alpha_n, alpha_p, beta and eps of that activation
    situ: tuple[float, float] = (0.0, 0.0)  # bounds of gate and linear half of that activation
    mlp_gated: bool = True
    mlp_sparsity: float = 0.0  # of gates, those this many deviations above their mean count alone
    mlp_limit: float = 0.0  # of both halves of a gated MLP, the gate's activation from above
    mlp_joined: bool = False  # gate and up are one tensor ffn_up
    mlp_bias: bool = False
    mlp_bare: bool = False  # no tensors: what the MLP would read goes through the activation alone
    mlp_scales: bool = False  # activations are divided by the tensor ffn.act.scales
    experts: Experts | None = None  # None for a dense layer
    indexer: Indexer | Follower | BlockIndexer | None = None
    latent: Latent | None = None  # keys and values are one latent vector
    recurrent: Recurrent | None = None  # a mixer with a state; where kv_heads is 0 the only one
    kv_repeat: int = 1  # times each stored KV head is repeated (a plan's KV replication)
    owns_cache: bool = True  # False: queries only, over the cache of the last owner of its kind
    cache: CacheFormat = CacheFormat()  # how a plan stores K and V
    kernels: bool = False  # whether a plan's devices have those of products

    def __post_init__(self) -> None:
        if self.needs_squares and self.recurrent is not None and self.recurrent.summed:
            raise ModelError("a layer with a norm over all heads cannot have a summed mixer too")

    @property
    def needs_squares(self) -> bool:
        """Whether a norm goes over heads that several devices may have."""
        return self.qk_norm and self.norm_heads == "all"

    @property
    def sums_columns(self) -> bool:
        """Whether something in the MLP needs a sum over columns that several devices may have."""
        second = self.experts is not None and self.experts.adjugates is not None
        return second or self.mlp_sparsity > 0.0

    def with_rope(self, **changes: Any) -> LayerConfig:
        """This layer with fields of its rope changed, where it has one."""
        return self if self.rope is None else replace(self, rope=replace(self.rope, **changes))

    @property
    def columns(self) -> Columns:
        """The whole layer's MLP columns."""
        beside = 0
        if self.experts is not None:
            adjugates = self.experts.adjugates
            beside = self.experts.shared if adjugates is None else adjugates.columns
        return Columns(self.mlp, beside, 0 if self.recurrent is None else self.recurrent.groups)

    @property
    def q_rows(self) -> int:
        """Rows of a query head in its tensor."""
        return self.k_dim * (2 if self.gated_q else 1)

    @property
    def k_stored(self) -> int:
        """Values of a head's K that the cache stores."""
        return self.k_dim + (self.indexer.dim if isinstance(self.indexer, BlockIndexer) else 0)

    @property
    def v_stored(self) -> int:
        """Values of a head's V that the cache stores beside K."""
        return self.v_dim if self.latent is None else 0

    def without_attention(self, recurrent: Recurrent | None = None) -> LayerConfig:
        """This layer without heads; what its tensors seemed to say of them does not count."""
        bare: dict[str, Any] = dict(rope=None, qkv_bias=False, out_bias=False, qk_norm=False)
        bare |= dict(kv_heads=0, q_per_kv=1, qkv_joined=None, out_gate=0)
        return replace(self, recurrent=recurrent, **bare)

    def in_context(self, ctx: int) -> LayerConfig:
        """This layer for a context of so many positions."""
        indexer = self.indexer
        if isinstance(indexer, BlockIndexer):
            indexer = replace(indexer, top=min(indexer.top, -(-ctx // indexer.size)))
        elif indexer is not None:
            indexer = replace(indexer, top_k=min(indexer.top_k, ctx))
        rope = self.rope and self.rope.in_context(ctx)
        return replace(self, rope=rope, indexer=indexer)

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


def _kept(indexer: Indexer | Follower | BlockIndexer | None) -> dict[str, int]:
    """What a query keeps of the keys that it chooses, as a `LayerShape` has it."""
    if isinstance(indexer, BlockIndexer):
        return {"kept_blocks": indexer.top, "block_keys": indexer.size}
    heads = indexer.heads if isinstance(indexer, Indexer) else 0
    return {} if indexer is None else {"kept_keys": indexer.top_k, "index_heads": heads}


@dataclass(frozen=True)
class Draft:
    """A layer that predicts tokens ahead (MTP, NextN), and which ends it has of its own in place of
    the model's: see `jaxllm.models.nextn`."""

    layer: LayerConfig
    table: bool = False
    norm: bool = False
    head: bool = False


@dataclass(frozen=True)
class ModelConfig:
    """A whole model: its ends and its layers, of which the last `ahead` predict tokens ahead."""

    architecture: str
    embed: int
    vocab: int
    layers: tuple[LayerConfig, ...]
    eps: float
    tied: bool
    ctx_train: int
    norm: NormStyle = RMS  # of the ends
    norm_name: str = "output_norm"  # of the last norm
    head_bias: bool = False
    embed_scale: float = 1.0
    embed_norm: NormStyle | None = None
    embed_kept: bool = False  # beside the residual, for layers that add it again
    streams: int = 1  # of the residual (see `AltUp`)
    layer_inputs: int = 0  # channels that each layer reads beside the residual
    kept: int = 0  # residuals of layers that go beside the newest: see `models.kept`
    positions: int = 0  # rows of a learned position embedding; 0 for none
    block_layers: int = 1  # layers that the tensors of one block of a file make, of the decoder
    start: int = 0  # the token that the decoder of a model with an encoder begins with
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    drawn: int = 0  # tokens, of which those after so many are never drawn; 0: there are none
    unused: tuple[str, ...] = ()  # ends of names of tensors that a file may have for nothing
    drafts: int = 0  # further layers of a file, that only predict tokens ahead
    draft: Draft | None = None  # the first of them, where it can be used
    ahead: int = 0
    name: str = ""

    @property
    def width(self) -> int:
        """Channels of the residual and of what goes beside it."""
        kept = self.embed * (self.streams - 1 + self.kept + self.embed_kept)
        return self.embed + kept + self.layer_inputs * len(self.layers)

    @property
    def causal(self) -> bool:
        """Whether a position's logits are made of it and earlier ones alone."""
        return all(layer.causal for layer in self.layers if layer.role == "decoder")

    @property
    def encoder(self) -> int:
        """How many layers an encoder has; 0 for a decoder alone."""
        return sum(layer.role == "encoder" for layer in self.layers)

    def of_step(self, encode: bool) -> tuple[int, ...]:
        """The layers, in their order, of a step of the encoder or of the decoder."""
        roles = ("encoder", "memory") if encode else ("decoder", "cross")
        return tuple(i for i, layer in enumerate(self.layers) if layer.role in roles)

    def stored(self, layer: int) -> str:
        """What the names of a layer's tensors in a file begin with."""
        if layer < self.encoder:
            return f"enc.blk.{layer}."
        block = (layer - self.encoder) // self.block_layers
        return f"{'dec.' if self.encoder else ''}blk.{block}."

    @property
    def owners(self) -> tuple[int, ...]:
        """The layer whose cache each layer reads."""
        shape = self.shape()
        return tuple(map(shape.cache_owner, range(len(self.layers))))

    @property
    def cached(self) -> tuple[int, ...]:
        """The layers that have a cache of their own."""
        return tuple(i for i, own in enumerate(self.layers) if own.kv_heads and own.owns_cache)

    @property
    def stateful(self) -> tuple[int, ...]:
        """The layers that keep a recurrent state."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.recurrent is not None)

    def with_draft(self) -> ModelConfig:
        """The model with the layer of its file that predicts tokens ahead as its last one.

        Raises:
            ModelError: where the file has none, or several.
        """
        if self.draft is None:
            raise ModelError(
                f"{self.name or self.architecture} has {self.drafts} layers that predict tokens "
                "ahead, or of a kind that is not supported, where one is needed; load it without "
                "spec_type (--spec-type)"
            )
        return replace(self, layers=(*self.layers, self.draft.layer), drafts=0, ahead=1)

    def of_context(self, context: Context) -> ModelConfig:
        """The layers of one context alone."""
        cut = len(self.layers) - self.ahead
        own = self.layers[:cut] if context == "main" else self.layers[cut:]
        return replace(self, layers=own, ahead=0)

    def in_context(self, ctx: int) -> ModelConfig:
        """The model for a context of so many positions; `ModelError` where it has fewer."""
        if 0 < self.positions < ctx:
            raise ModelError(
                f"a context (-c) of {ctx} is longer than the {self.positions} positions that "
                f"{self.architecture} has learned; give -c {self.positions} or less"
            )
        return replace(self, layers=tuple(layer.in_context(ctx) for layer in self.layers))

    def shape(self, mlp_block: int = 32) -> ModelShape:
        """The sizes that a plan needs; `mlp_block` is the block size of the down tensors' type."""
        return ModelShape(
            layers=tuple(
                LayerShape(
                    kv_heads=layer.kv_heads,
                    q_per_kv=layer.q_per_kv,
                    k_dim=layer.k_stored,
                    v_dim=layer.v_dim,
                    mlp=layer.mlp,
                    mlp_block=mlp_block,
                    window=layer.window,
                    owns_cache=layer.owns_cache,
                    experts=0 if layer.experts is None else layer.experts.count,
                    experts_used=0 if layer.experts is None else layer.experts.used,
                    shared_mlp=layer.columns.shared,
                    k_only=layer.latent is not None,
                    gated_q=layer.gated_q,
                    states=layer.columns.states,
                    state_bytes=0 if layer.recurrent is None else state_bytes(layer.recurrent),
                    state_work=0 if layer.recurrent is None else 4 * layer.recurrent.work,
                    biased=layer.relative is not None,
                    role=layer.role,
                    **_kept(layer.indexer),
                    cache_context="main" if i < len(self.layers) - self.ahead else "draft",
                )
                for i, layer in enumerate(self.layers)
            ),
            vocab=self.vocab,
            embed=self.embed,
            name=self.name or self.architecture,
            beside=self.width - self.embed,
        )
