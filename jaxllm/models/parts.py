"""What a layer's config is put together from: frozen, hashable records of sizes and switches.

See `jaxllm.models.config` for the letters of dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

NormKind = Literal["rms", "layer"]
Pairs = Literal["neighbours", "halves"]
Activation = Literal["silu", "gelu", "relu", "relu2", "xielu", "clamped_swiglu", "situ"]


@dataclass(frozen=True)
class Yarn:
    """YaRN (Peng et al. 2023): frequencies that turn less than `slow` times over the original
    context are divided by the rope's scale, those that turn more than `fast` times are kept, and
    the ones between are mixed; `mix` 0 divides all."""

    context: int
    fast: float = 32.0
    slow: float = 1.0
    mix: float = 1.0


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of one layer (Su et al. 2021).

    `pairs` says which two dims are rotated together: "neighbours" (0,1), (2,3), ... as in llama's
    GGUF files, or "halves" (0, dim/2), ... as in most other families.
    """

    theta: float
    dim: int
    pairs: Pairs
    scale: float = 1.0  # positions are divided by it (linear scaling), or see `yarn`
    yarn: Yarn | None = None
    magnitude: float = 1.0  # of what is rotated
    factors: str | None = None  # a tensor that frequencies are divided by
    factor_rows: int = 0  # of that tensor, where more than there are pairs to turn
    longer: tuple[int, str] | None = None  # contexts above this have factors of their own

    def in_context(self, ctx: int) -> Rope:
        """The rope that a context of so many positions has throughout (LongRoPE)."""
        if self.longer is None:
            return self
        beyond, factors = self.longer
        return replace(self, longer=None, factors=factors if ctx > beyond else self.factors)


@dataclass(frozen=True)
class NormStyle:
    """Of norms over a width: x / rms(x) (Zhang and Sennrich 2019), or (x - mean) / deviation (Ba
    et al. 2016); then times a weight and plus a bias where they have one."""

    kind: NormKind = "rms"
    weight: bool = True
    biases: tuple[str, ...] = ()  # names of those that there are


RMS = NormStyle()


@dataclass(frozen=True)
class Norms:
    """Where a layer has norms, by the names of their weights: on what each half reads and on what
    it adds to the residual. An MLP beside attention may name attention's norm: then both read it.
    """

    attn: str | None = "attn_norm.weight"
    attn_post: str | None = None
    mlp: str | None = "ffn_norm.weight"
    mlp_post: str | None = None


def bias_of(weight: str) -> str:
    """The name of the bias beside a weight."""
    return weight.removesuffix("weight") + "bias"


SANDWICH = Norms(attn_post="post_attention_norm.weight", mlp_post="post_ffw_norm.weight")


@dataclass(frozen=True)
class Adjugates:
    """Smaller experts, one for each group of `group` experts, that read what the chosen experts
    give together; `scale` times their weighted sum is added to it (see `jaxllm.models.grove`)."""

    columns: int
    group: int
    scale: float


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in the place of a layer's MLP: how it routes, and what it is made of.

    A router gives every expert a score: `scores` says how they come from its logits ("chosen": the
    softmax is over the chosen experts alone). Each token goes through the `used` experts with the
    largest scores, `choice_bias` added for that choice only; of experts in several groups only the
    `groups_used` groups count whose two largest scores have the largest sums. The outputs are
    summed with the scores as weights, `normalised` to sum to one, times `scale`; or where
    `weigh_input` is set the expert's input is multiplied by its weight, not the output.
    """

    count: int
    used: int
    scores: Literal["softmax", "sigmoid", "chosen"] = "softmax"
    normalised: bool = True
    scale: float = 1.0
    weigh_input: bool = False
    groups: int = 1
    groups_used: int = 1
    choice_bias: str | None = None  # the tensor's name after that of its layer
    router_bias: bool = False
    biases: bool = False  # of gate, up and down
    down_scale: bool = False  # one factor an expert on its output
    joined: bool = False  # gate and up are one tensor in the file
    shared: int = 0  # columns of an MLP beside the mixture that every token goes through
    shared_suffix: str = "_shexp"  # of the names of its tensors
    shared_gate: bool = False  # its output is multiplied by the sigmoid of one more logit
    shared_limit: float = 0.0  # as `LayerConfig.mlp_limit`
    blend: float = 1.0  # of the sum of both
    adjugates: Adjugates | None = None
    reads: Literal["mlp", "norm", "route"] = "mlp"  # see `jaxllm.models.early`
    narrow: int = 0  # width that experts read and give, between two projections; 0 for none
    narrow_name: str = ""  # begins the names of those, ends with _down and _up
    narrow_norm: bool = False  # on the sum over experts


@dataclass(frozen=True)
class Latent:
    """Latent attention, absorbed (see `jaxllm.models.latent`): the layer has one KV head, of
    which the last `v_dim` values (of the layer) are the value."""

    q_rank: int  # width between the two query projections; 0 for a single one
    nope: int  # values of a head's query and key without position
    v_dim: int  # values of a head's output
    joined: bool = False  # what makes keys and values of the vector is one tensor attn_kv_b


@dataclass(frozen=True)
class Indexer:
    """Of the keys that a query sees it attends to the `top_k` that small heads of an indexer score
    best (see `jaxllm.models.indexer`); the small key of a position stands after its turned part."""

    heads: int
    dim: int
    top_k: int
    rope: Rope
    bias: bool  # of the norm of small keys
    followed: bool = False  # by a layer that attends to what this one has chosen


@dataclass(frozen=True)
class Follower:
    """Attends to the `top_k` keys that the last indexer of an earlier layer has chosen."""

    top_k: int


@dataclass(frozen=True)
class BlockIndexer:
    """Of the blocks of `size` keys that the queries of a KV group see, they attend to the `top`
    ones whose best key the group's own index query scores best (see `jaxllm.models.indexer`),
    always to the `local` newest ones; a position's index key stands after its key."""

    dim: int  # of index queries and keys
    size: int
    top: int
    local: int
    rope: Rope | None


@dataclass(frozen=True)
class AltUp:
    """Several residual streams of which a layer computes one and predicts the others (Baykal et al.
    2023), and a low-rank way around attention; see `jaxllm.models.gemma3n`."""

    streams: int
    laurel: int  # rank of that way


@dataclass(frozen=True)
class Relative:
    """Biases of scores by how far a key is from its query (T5, Raffel et al. 2020): a learned one a
    query head for each of `buckets` ranges of distances, in the tensor `source`; see
    `jaxllm.models.relative`."""

    source: str
    buckets: int
    both_ways: bool  # later keys have half of the buckets; else they have none
    furthest: int  # all beyond are in one bucket with it


class AttnNames(NamedTuple):
    """What the tensors of a layer's queries, keys, values and output are called."""

    q: str = "attn_q"
    k: str = "attn_k"
    v: str = "attn_v"
    out: str = "attn_output"


class Temperature(NamedTuple):
    """Queries at position p times 1 + scale * log(1 + floor((p + offset) / every)), so that long
    contexts do not blur attention (as in Llama 4)."""

    every: int
    scale: float
    offset: int = 0
