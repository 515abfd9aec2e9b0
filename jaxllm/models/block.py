"""The contract between a family and the engines, and the two ends every family shares.

A block says what precedes attention and what follows it; attention itself belongs to the cache.
A layer that has no heads or no MLP is asked nothing about them; `recur` is for those with a state,
`begin_recur` for those of them that are `summed` (`jaxllm.models.recurrent`). A memory of what an
encoder gives is asked to `remember` it and nothing else.
An engine calls, in this order, for every layer:

    heads   = block.project(x)
    squares = sum over devices of block.head_squares(heads), where there are any
    q, k, v = block.before_attention(heads, squares, positions)
    o       = attention of q over the cache, k and v included
    midway  = block.begin_recur(x, s, counts), its part summed over devices, where there is one
    r, s    = block.recur(x, s, counts, midway)
    x, read = block.join_attention(x, sum over devices of block.after_attention(o, x) + r)
    begun, part = block.begin_mlp(read)
    total   = sum over devices of part, where there is one
    x       = block.join_mlp(x, sum over devices of block.end_mlp(begun, total))

Where one device has all of a layer, `rest_of_layer` may stand for all that follows on attention,
and `whole_layer` for attention of one token too, or for all.

`BlockDef` is a block without its values: hashable, one object a shape, so that layers and models
of one shape share their compiled programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.gguf.blocks import BlockType
from jaxllm.models.config import Columns, LayerConfig, ModelConfig
from jaxllm.models.inputs import LayerInputs
from jaxllm.models.kept import KeptMix
from jaxllm.models.layers import Array, Heads, Norm, linear, matrix, param
from jaxllm.models.nextn import NextN
from jaxllm.models.products import Rings
from jaxllm.models.quantised import QuantisedParam, values
from jaxllm.models.relative import RelativeBias
from jaxllm.models.streams import Streams


class Midway(NamedTuple):
    """A recurrent mixer on its way: what it goes on with, and what the groups of all devices made
    together [B, T, R] (or this device's part of it)."""

    held: tuple[Array, ...]
    total: Array


class Whole(NamedTuple):
    """What a kernel makes of a layer's token: the residual [B, 1, D] and the layer's ring of keys
    and of values, which have the token's."""

    x: Array
    k: Array
    v: Array


class Block(nnx.Module):
    """One decoder layer over a device's own slice; see the module's docstring for the order."""

    slopes: nnx.Param | None = None  # of linear biases [K, G], where the layer has them
    sinks: nnx.Param | None = None  # logits [K, G] that take weight and give no value
    relative: RelativeBias | None = None  # biases by distance, where the layer has them

    def project(self, x: Array) -> Heads:
        """x [B, T, D] -> q [B, T, K, G, H], k [B, T, K, H] and v [B, T, K, Hv] of own heads; k and
        v are None for a layer that reads another's cache."""
        raise NotImplementedError

    def remember(self, x: Array) -> tuple[Array, Array]:
        """What an encoder gives [B, T, D] -> k [B, T, K, H] and v [B, T, K, Hv] of own heads."""
        raise NotImplementedError

    def head_squares(self, heads: Heads) -> Array | None:
        """This device's part [B, T, 2] of what norms over the heads of all devices need."""
        return None

    def before_attention(self, heads: Heads, squares: Array | None, positions: Array) -> Heads:
        """Queries and keys as attention compares them: normalised and turned to their positions
        [B, T]; squares [B, T, 2] is the full sum."""
        raise NotImplementedError

    def after_attention(self, o: Array, x: Array) -> Array:
        """o [B, T, K, G, Hv] and the residual x that attention read -> this device's partial
        [B, T, D]."""
        raise NotImplementedError

    def rest_of_layer(self, o: Array, x: Array) -> Array | None:
        """o [B, T, K, G, Hv] and the residual x that attention read -> the residual after a layer
        that this device has all of, by one kernel; None where there is none."""
        return None

    def whole_layer(
        self, x: Array, positions: Array, rings: Rings, qkv: Array | None = None
    ) -> Whole | None:
        """The same for all of a layer, of the residual x [B, 1, D] at positions [B, 1]; or for
        attention and what follows, where each head's queries, key and value are there: qkv
        [B, K, ...], turned to their positions."""
        return None

    def begin_recur(self, x: Array, state: tuple[Array, ...], counts: Array) -> Midway:
        """The residual x [B, T, D] up to where a recurrent mixer needs the other devices."""
        raise NotImplementedError

    def recur(
        self, x: Array, state: tuple[Array, ...], counts: Array, midway: Midway | None
    ) -> tuple[Array, tuple[Array, ...]]:
        """The residual x [B, T, D] through the recurrent mixer of own groups -> this device's
        partial [B, T, D], and the state after the first counts [B] tokens of each row."""
        raise NotImplementedError

    def join_attention(self, x: Array, total: Array) -> tuple[Array, Array]:
        """The residual after attention, given the full sum of the partials, and what the MLP
        reads."""
        raise NotImplementedError

    def enter_mlp(self, x: Array) -> Array:
        """What the MLP reads in a layer that is nothing else."""
        raise NotImplementedError

    def begin_mlp(self, read: Array) -> tuple[Any, Array | None]:
        """What an MLP does before something in it needs a sum over its columns, and this device's
        part of that sum. In most nothing does: they are all in `end_mlp`."""
        return read, None

    def end_mlp(self, begun: Any, total: Array | None) -> Array:
        """The rest of the MLP, given that sum if there is one: this device's partial [B, T, D]."""
        raise NotImplementedError

    def join_mlp(self, x: Array, total: Array) -> Array:
        """The residual after the MLP, given the full sum of the partials."""
        raise NotImplementedError


class Ends(nnx.Module):
    """Token embedding and output head over a device's own vocabulary rows."""

    def __init__(self, cfg: ModelConfig, rows: int, dtype: jnp.dtype):
        self.cfg = cfg
        axes, embed = ("vocab", "embed"), cfg.embed
        self.table = matrix((rows, embed), axes, ("/token_embd.weight",), dtype)
        self.positions = (
            param((cfg.positions, embed), ("position", "embed"), ("/position_embd.weight",), dtype)
            if cfg.positions
            else None
        )
        self.inputs = LayerInputs(cfg, rows, dtype) if cfg.layer_inputs else None
        self.streams = Streams(cfg, dtype) if cfg.streams > 1 else None
        name = "/token_embd_norm.weight"
        self.first_norm = Norm(embed, cfg.eps, name, cfg.embed_norm) if cfg.embed_norm else None
        name = "/output_res_score.weight"
        self.mix = KeptMix(embed, cfg.eps, name) if cfg.kept else None
        self.norm = Norm(embed, cfg.eps, f"/{cfg.norm_name}.weight", cfg.norm)
        self.head = None if cfg.tied else matrix((rows, embed), axes, ("/output.weight",), dtype)
        self.bias = param((rows,), ("vocab",), ("/output.bias",), dtype) if cfg.head_bias else None
        self.nextn = NextN(cfg, rows, dtype) if cfg.ahead else None

    def embed(
        self, tokens: Array, positions: Array, vocab: Array, features: Array | None = None
    ) -> Array:
        """tokens and positions [B, T] -> [B, T, D]; zero for tokens whose row another device
        holds. vocab int32 [2]: the device's first row and how many it has. features [B, T, D] are
        given to `DraftEnds` alone."""
        table = self.table[...]
        if table.shape[0] == 0:
            return jnp.zeros((*tokens.shape, self.cfg.width), table.dtype)
        row, mine = _own_rows(tokens, vocab)
        x = values(table[row])
        x = x * jnp.asarray(self.cfg.embed_scale, x.dtype)
        if self.positions is not None:
            x = x + self.positions[...][positions]
        if self.first_norm is not None:
            x = self.first_norm(x)
        if self.inputs is not None:
            spread = x if self.streams is None else self.streams.spread(x)
            x = jnp.concatenate([spread, self.inputs(x, row)], axis=-1)
        elif self.cfg.embed_kept:
            x = jnp.concatenate([x, x], axis=-1)
        elif self.cfg.kept:
            x = jnp.pad(x, ((0, 0), (0, 0), (0, self.cfg.width - x.shape[-1])))
        return jnp.where(mine[..., None], x, jnp.zeros((), x.dtype))

    def features(self, x: Array) -> Array:
        """What the head reads of the residual: [..., D] after the last norm."""
        if self.mix is not None:
            x = self.mix(x, self.cfg.kept)
        elif self.streams is not None:
            x = self.streams.join(x[..., : self.cfg.streams * self.cfg.embed])
        else:
            x = x[..., : self.cfg.embed]
        return self.norm(x)

    def output(self) -> nnx.Param:
        """The rows of the head."""
        return self.table if self.head is None else self.head

    def logits(self, x: Array, vocab: Array) -> Array:
        """x [..., D] -> float32 [..., own rows]; vocab int32 [2] as in `embed`."""
        y = linear(self.features(x), self.output()[...])
        if self.bias is not None:
            y = y + self.bias[...]
        y, cap = y.astype(jnp.float32), self.cfg.logit_softcap
        y = y if self.cfg.logit_scale == 1.0 else y * self.cfg.logit_scale
        y = y if cap is None else cap * jnp.tanh(y / cap)
        if self.cfg.drawn == 0:
            return y
        return jnp.where(vocab[0] + jnp.arange(y.shape[-1]) < self.cfg.drawn, y, -jnp.inf)


def _own_rows(tokens: Array, vocab: Array) -> tuple[Array, Array]:
    """Rows of a device's table, zero for tokens of another; whether each is its own."""
    row = tokens - vocab[0]
    mine = (row >= 0) & (row < vocab[1])
    return jnp.where(mine, row, 0), mine


class DraftEnds(Ends):
    """The same parameters as `Ends` has, as the layer that predicts tokens ahead uses them: a
    token comes with the features of the position before it (`jaxllm.models.nextn`)."""

    def embed(
        self, tokens: Array, positions: Array, vocab: Array, features: Array | None = None
    ) -> Array:
        assert self.nextn is not None and features is not None
        own = self.table if self.nextn.table is None else self.nextn.table
        table = own[...]
        if table.shape[0] == 0:
            return jnp.zeros((*tokens.shape, self.cfg.embed), table.dtype)
        row, mine = _own_rows(tokens, vocab)
        x = self.nextn(values(table[row]), features)
        return jnp.where(mine[..., None], x, jnp.zeros((), x.dtype))

    def features(self, x: Array) -> Array:
        assert self.nextn is not None
        return super().features(x) if self.nextn.norm is None else self.nextn.norm(x)

    def output(self) -> nnx.Param:
        assert self.nextn is not None
        return super().output() if self.nextn.head is None else self.nextn.head


@dataclass(frozen=True, eq=False)
class BlockDef:
    """A module without its values. Compared by identity: `block_def` and `ends_def` give the same
    object for the same arguments."""

    graph: Any
    tree: Any
    paths: tuple[str, ...]
    variables: Mapping[str, nnx.Variable]  # shape, dtype and metadata of every leaf

    def bind(self, leaves: tuple[Array, ...]) -> Any:
        """The module with these values, in the order of `paths`; for use inside a trace."""
        return nnx.merge(self.graph, jax.tree.unflatten(self.tree, leaves))


# The parameters of a module that are held quantised: path and type of each.
Kinds = tuple[tuple[str, BlockType], ...]


def _define(make: Any, kinds: Kinds) -> BlockDef:
    def quantised() -> Any:
        module = make()
        for path, kind in kinds:
            *owners, name = path.split(".")
            owner = reduce(getattr, owners, module)
            setattr(owner, name, QuantisedParam(getattr(owner, name), kind))
        return module

    graph, state = nnx.split(nnx.eval_shape(quantised))
    _, tree = jax.tree.flatten(state)
    flat = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}
    return BlockDef(graph, tree, tuple(flat), flat)


@cache
def block_def(
    block: type[Block],
    cfg: LayerConfig,
    kv_heads: int,
    columns: Columns,
    embed: int,
    dtype: str,
    kinds: Kinds,
) -> BlockDef:
    """The definition of a layer's slice of `kv_heads` KV groups and `columns` MLP columns."""
    make: Any = block
    return _define(lambda: make(cfg, kv_heads, columns, embed, jnp.dtype(dtype)), kinds)


@cache
def ends_def(ends: type[Ends], cfg: ModelConfig, rows: int, dtype: str, kinds: Kinds) -> BlockDef:
    """The definition of the two ends over `rows` vocabulary rows."""
    return _define(lambda: ends(cfg, rows, jnp.dtype(dtype)), kinds)
