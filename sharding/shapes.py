"""What a plan is made from: the sizes of a model and of its tensors. No values, no devices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal, get_args

from sharding.axes import Axis, axis
from sharding.errors import PlanError

Context = Literal["main", "draft"]  # whose cache it is
Role = Literal["decoder", "encoder", "memory", "cross"]  # of a layer, see `LayerShape`


@dataclass(frozen=True)
class LayerShape:
    """Sizes of one layer before any split.

    `mlp_block` is the block size of the down projection's type and `o_block` that of the attention
    output's; `gated_q` says that the query projection carries a gate (both only matter to
    llama.cpp's rounding). `window` is the number of positions a query sees, None for all. A layer
    that does not own its cache reads that of the last earlier layer of its kind that does.
    `cache_context` says whose cache it is: the main model's or a draft's (a draft head or model
    planned along), which residency budgets keep apart.
    `kv_heads` is 0 for a layer without attention, `mlp` is 0 for one without an MLP. `experts` is
    how many MLPs of `mlp` columns a mixture has, of which a token goes through `experts_used`; 0
    for a dense layer. `shared_mlp` is how many columns the MLP has that every token goes through
    beside the mixture. `k_only` says that V is a part of K, so that only K is stored.
    `states` is how many groups of a recurrent state a layer keeps, 0 for none: they are cut by the
    attention share as KV groups are, take `state_bytes` each in a slot, and `state_work` bytes each
    for a token of a chunk while the layer runs. They have no pages.
    `kept_keys` is how many keys of each KV group a query keeps that attends to those alone which
    `index_heads` choose, and `kept_blocks` how many blocks of `block_keys` keys where it chooses
    among blocks.
    `biased` says that each score has a bias of its own, which takes as much as the scores do.
    `role` is "decoder" but in models with an encoder. That runs once over a prompt, which is one
    step: the cache of an "encoder" layer is of that step alone and has no pages. What it gives
    becomes keys and values of "memory" layers, the cache that a "cross" layer after it reads.
    """

    kv_heads: int
    q_per_kv: int
    k_dim: int
    v_dim: int
    mlp: int
    mlp_block: int = 32
    window: int | None = None
    owns_cache: bool = True
    gated_q: bool = False
    o_block: int = 1
    cache_context: Context = "main"
    experts: int = 0
    experts_used: int = 0
    shared_mlp: int = 0
    k_only: bool = False
    states: int = 0
    state_bytes: int = 0
    state_work: int = 0
    kept_keys: int = 0
    index_heads: int = 0
    kept_blocks: int = 0
    block_keys: int = 1
    biased: bool = False
    role: Role = "decoder"

    def __post_init__(self) -> None:
        counts = "kv_heads", "mlp", "experts", "experts_used", "shared_mlp"
        for name in (*counts, "states", "state_bytes", "state_work"):
            _at_least(self, name, 0)
        for name in ("kept_keys", "index_heads", "kept_blocks"):
            _at_least(self, name, 0)
        for name in ("q_per_kv", "k_dim", "v_dim", "mlp_block", "o_block", "block_keys"):
            _at_least(self, name, 1)
        if self.window is not None:
            _at_least(self, "window", 1)
        if self.cache_context not in ("main", "draft"):
            raise PlanError(f"cache_context is {self.cache_context!r}; it must be main or draft.")
        if self.role not in get_args(Role):
            raise PlanError(
                f"role is {self.role!r}; it must be one of {', '.join(get_args(Role))}."
            )

    @property
    def exchanges(self) -> int:
        """How many sums over the devices of the layer it takes: of its mixer and of its MLP."""
        return (self.kv_heads + self.states > 0) + (self.mlp > 0)

    @property
    def has_pages(self) -> bool:
        """Whether it has a cache of its own that outlives a step."""
        return self.owns_cache and self.role != "encoder"

    @property
    def cache_kind(self) -> tuple[object, ...]:
        """What two layers must have in common to share a cache."""
        dims = self.k_dim, self.v_dim, self.k_only
        crossed = self.role in ("memory", "cross")
        return self.kv_heads, *dims, self.window, self.cache_context, crossed


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a whole model: its layers, vocabulary rows and width; `beside` counts channels that
    go along with the residual."""

    layers: tuple[LayerShape, ...]
    vocab: int
    embed: int
    name: str = ""
    beside: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers:
            raise PlanError("a model has no layers; give it at least one.")
        _at_least(self, "vocab", 1)
        _at_least(self, "embed", 1)
        for index in range(len(self.layers)):
            self.cache_owner(index)

    def in_context(self, context: Context) -> list[int]:
        """The layers of a context.

        Raises:
            PlanError: where there are none.
        """
        found = [i for i, layer in enumerate(self.layers) if layer.cache_context == context]
        if not found:
            raise PlanError(f"the model has no layer of the {context} context.")
        return found

    def cache_owner(self, layer: int) -> int:
        """The layer whose cache `layer` reads: itself, or the last earlier owner of its kind."""
        own = self.layers[layer]
        if own.owns_cache:
            return layer
        for index in range(layer - 1, -1, -1):
            other = self.layers[index]
            if other.owns_cache and other.cache_kind == own.cache_kind:
                return index
        raise PlanError(
            f"layer {layer} owns no cache and no earlier layer of its shape does; set owns_cache."
        )


@dataclass(frozen=True)
class TensorShape:
    """One tensor of the whole model: `axes` names one axis a dimension of `shape`.

    `layer` is None for a tensor outside the layers; `itemsize` is in bytes. With replicated KV
    heads, `shape` counts the virtual groups (`LayerPlan.replication` times the KV heads). In a
    tensor of quantised codes or scales an element covers `packs` values along the last dimension;
    a step unpacks them.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    layer: int | None
    itemsize: int
    packs: int = 1

    @property
    def nbytes(self) -> int:
        """Of the whole tensor."""
        return prod(self.shape) * self.itemsize

    @cached_property
    def split_axis(self) -> Axis | None:
        """The axis that is cut over devices, or None. Raises `PlanError` for an unknown axis, for
        another number of axes than dimensions and for more than one split axis."""
        try:
            named = [axis(name) for name in self.axes]
        except PlanError as error:
            raise PlanError(f"tensor {self.name}: {error}") from None
        if len(named) != len(self.shape):
            raise PlanError(
                f"tensor {self.name} has shape {self.shape} and axes {self.axes}; name exactly one"
                " axis a dimension."
            )
        split = [a for a in named if a.split]
        if len(split) > 1:
            raise PlanError(
                f"tensor {self.name} is split along {' and '.join(a.name for a in split)}; declare"
                " one of them replicated."
            )
        if split and split[0].name != "vocab" and self.layer is None:
            raise PlanError(
                f"tensor {self.name} is split along {split[0].name} and belongs to no layer; say"
                " which layer's split it follows."
            )
        return split[0] if split else None

    def packs_along(self, dim: int) -> int:
        """Values that an element covers along one dimension."""
        return self.packs if dim == len(self.shape) - 1 else 1


def _at_least(owner: object, name: str, least: int) -> None:
    value = getattr(owner, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise PlanError(f"{name} is {value!r}; it must be a whole number of at least {least}.")
