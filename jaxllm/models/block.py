"""The contract between a family and the engines, and the two ends every family shares.

A block says what precedes attention and what follows it; attention itself belongs to the cache.
An engine calls, in this order, for every layer:

    q, k, v = block.before_attention(x, positions)
    o       = attention of q over the cache, k and v included
    x       = block.join_attention(x, sum over devices of block.after_attention(o))
    x       = block.join_mlp(x, sum over devices of block.mlp(x))

`BlockDef` is a block without its values: hashable, one object a shape, so that layers and models
of one shape share their compiled programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.models.config import LayerConfig, ModelConfig
from jaxllm.models.layers import Array, RMSNorm, linear, param


class Block(nnx.Module):
    """One decoder layer over a device's own slice; see the module's docstring for the order."""

    def before_attention(self, x: Array, positions: Array) -> tuple[Array, Array, Array]:
        """x [B, T, D], positions [B, T] -> q [B,T,K,G,H], k [B,T,K,H], v [B,T,K,Hv]."""
        raise NotImplementedError

    def after_attention(self, o: Array) -> Array:
        """o [B, T, K, G, Hv] -> this device's partial [B, T, D]."""
        raise NotImplementedError

    def join_attention(self, x: Array, total: Array) -> Array:
        """The residual after attention, given the full sum of the partials."""
        return x + total

    def mlp(self, x: Array) -> Array:
        """x [B, T, D] -> this device's partial [B, T, D]."""
        raise NotImplementedError

    def join_mlp(self, x: Array, total: Array) -> Array:
        """The residual after the MLP, given the full sum of the partials."""
        return x + total


class Ends(nnx.Module):
    """Token embedding and output head over a device's own vocabulary rows."""

    def __init__(self, cfg: ModelConfig, rows: int, dtype: jnp.dtype):
        self.scale, self.softcap = cfg.embed_scale, cfg.logit_softcap
        axes = ("vocab", "embed")
        self.table = param((rows, cfg.embed), axes, ("/token_embd.weight",), dtype)
        self.norm = RMSNorm(cfg.embed, cfg.eps, "/output_norm.weight")
        self.head = None if cfg.tied else param((rows, cfg.embed), axes, ("/output.weight",), dtype)
        self.bias = param((rows,), ("vocab",), ("/output.bias",), dtype) if cfg.head_bias else None

    def embed(self, tokens: Array, first_row: Array) -> Array:
        """tokens [B, T] -> [B, T, D]; zero for tokens whose row another device holds."""
        table = self.table[...]
        if table.shape[0] == 0:
            return jnp.zeros((*tokens.shape, table.shape[1]), table.dtype)
        row = tokens - first_row
        mine = (row >= 0) & (row < table.shape[0])
        x = table[jnp.where(mine, row, 0)]
        scale = jnp.asarray(self.scale, x.dtype)
        return jnp.where(mine[..., None], x * scale, jnp.zeros((), x.dtype))

    def logits(self, x: Array) -> Array:
        """x [..., D] -> float32 [..., own rows]."""
        head = self.table if self.head is None else self.head
        y = linear(self.norm(x), head[...])
        if self.bias is not None:
            y = y + self.bias[...]
        y = y.astype(jnp.float32)
        return y if self.softcap is None else self.softcap * jnp.tanh(y / self.softcap)


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


def _define(make: Any) -> BlockDef:
    graph, state = nnx.split(nnx.eval_shape(make))
    _, tree = jax.tree.flatten(state)
    flat = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}
    return BlockDef(graph, tree, tuple(flat), flat)


@cache
def block_def(
    block: type[Block], cfg: LayerConfig, kv_heads: int, columns: int, embed: int, dtype: str
) -> BlockDef:
    """The definition of a layer's slice of `kv_heads` KV groups and `columns` MLP columns."""
    make: Any = block
    return _define(lambda: make(cfg, kv_heads, columns, embed, jnp.dtype(dtype)))


@cache
def ends_def(cfg: ModelConfig, rows: int, dtype: str) -> BlockDef:
    """The definition of the two ends over `rows` vocabulary rows."""
    return _define(lambda: Ends(cfg, rows, jnp.dtype(dtype)))
