"""The block of decoder families, put together from the switches of a `LayerConfig`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import cache
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jaxllm.models import parts
from jaxllm.models.block import Block, Midway, Whole
from jaxllm.models.config import Columns, LayerConfig
from jaxllm.models.cross import KeysValues
from jaxllm.models.experts import feed_forward
from jaxllm.models.heads import HeadNorms, HeadsGate
from jaxllm.models.indexer import BlockIndexer
from jaxllm.models.latent import LatentOut, LatentQKV
from jaxllm.models.layers import (
    QKV,
    Array,
    DenseMLP,
    Heads,
    HeadsOut,
    Norm,
    activation,
    normalise,
    param,
)
from jaxllm.models.mixers import mixer
from jaxllm.models.products import Products, Rings
from jaxllm.models.ptx.share import Turned
from jaxllm.models.relative import RelativeBias
from jaxllm.models.rope import RopeTable
from jaxllm.models.selective import SelectiveMixer

# What of a layer's configuration is done with when attention is, or is no matter of its values.
_BEFORE = {
    "kv_heads", "q_per_kv", "k_dim", "v_dim", "mlp", "rope", "scale", "eps", "causal", "window",
    "chunked", "temperature", "softcap", "sinks", "alibi", "relative", "attn_names", "qkv_joined",
    "v_from_k", "v_norm", "qkv_bias", "qkv_clamp", "qk_norm", "norm_heads", "rope_first",
    "mlp_joined", "kv_repeat", "owns_cache", "cache", "kernels",
}  # fmt: skip


@cache
def _ends_plainly(cfg: LayerConfig) -> bool:
    """Whether what follows on attention is an output projection, and an MLP with a gate by silu
    after a norm, each added to the residual: all else is as it is by default."""
    others = (field for field in fields(cfg) if field.name not in _BEFORE)
    return bool(cfg.mlp) and all(getattr(cfg, field.name) == field.default for field in others)


def _begins_plainly(cfg: LayerConfig) -> bool:
    """Whether queries, keys and values are one product, of which rope turns all dims."""
    others = cfg.qkv_bias, cfg.qk_norm, cfg.v_norm, cfg.v_from_k
    plain = not any(others) and cfg.qkv_clamp is None and cfg.temperature is None
    turned = None if cfg.rope is None else cfg.rope.dim
    return plain and turned == cfg.k_dim == cfg.v_dim


def attention(
    cfg: LayerConfig, kv_heads: int, embed: int, dtype: jnp.dtype
) -> tuple[QKV | LatentQKV | KeysValues | None, HeadsOut | LatentOut | None]:
    """What stands before and after attention of a layer's slice."""
    if not cfg.kv_heads:
        return None, None
    if cfg.role == "memory":
        return KeysValues(cfg, kv_heads, embed, dtype), None
    if cfg.latent is None:
        return QKV(cfg, kv_heads, embed, dtype), HeadsOut(cfg, kv_heads, embed, dtype)
    qkv = LatentQKV(cfg, kv_heads, embed, dtype)
    return qkv, LatentOut(cfg, kv_heads, embed, dtype, qkv.keys)


class DecoderBlock(Block):
    """x + attn(norm(x)), then x + mlp(norm(x)), or both from one x; each norm may be absent or
    stand on what is added instead."""

    def __init__(
        self, cfg: LayerConfig, kv_heads: int, columns: Columns, embed: int, dtype: jnp.dtype
    ):
        self.cfg = cfg
        names = cfg.norms

        def norm(source: str | None, eps: float = cfg.eps) -> Norm | None:
            return None if source is None else Norm(embed, eps, source, cfg.norm)

        def bias(source: str) -> nnx.Param:
            return param((embed,), ("embed",), (source,), dtype)

        post_eps = cfg.post_eps or cfg.eps
        self.attn_norm, self.post_attn_norm = norm(names.attn), norm(names.attn_post, post_eps)
        shared = cfg.parallel and names.mlp == names.attn
        self.mlp_norm = None if shared else norm(names.mlp)
        self.post_mlp_norm = norm(names.mlp_post, post_eps)
        self.qkv, self.out = attention(cfg, kv_heads, embed, dtype)
        chooses = isinstance(cfg.indexer, parts.BlockIndexer)
        self.indexer = BlockIndexer(cfg, kv_heads, embed, dtype) if chooses else None
        self.recurrent = mixer(cfg, columns.states, embed, dtype)
        self.head_norms = HeadNorms(cfg, kv_heads) if cfg.qk_norm else None
        self.rope = RopeTable(cfg.rope)
        self.relative = (
            None if cfg.relative is None else RelativeBias(cfg.relative, kv_heads, cfg.q_per_kv)
        )
        self.slopes = (
            param(
                (kv_heads, cfg.q_per_kv),
                ("kv_group", "head_rows"),
                (),
                jnp.dtype(jnp.float32),
                form="alibi",
            )
            if cfg.alibi
            else None
        )
        shape, axes = (kv_heads, cfg.q_per_kv), ("kv_group", "head_rows")
        source, f32 = ("attn_sinks.weight",), jnp.dtype(jnp.float32)
        self.gate = HeadsGate(cfg, kv_heads, embed, dtype) if cfg.out_gate else None
        self.sinks = param(shape, axes, source, f32, form="q_heads") if cfg.sinks else None
        self.out_bias = bias("attn_output.bias") if cfg.out_bias else None
        self.ffn = feed_forward(cfg, columns, embed, dtype) if cfg.mlp else None
        self.down_bias = bias("ffn_down.bias") if cfg.mlp_bias else None

    def remember(self, x: Array) -> tuple[Array, Array]:
        assert isinstance(self.qkv, KeysValues)
        return self.qkv(self._read(x))

    def project(self, x: Array) -> Heads:
        assert isinstance(self.qkv, QKV | LatentQKV)
        if type(self) is DecoderBlock and isinstance(self.qkv, QKV) and self.indexer is None:
            return self.qkv(x, self.attn_norm)
        read = self._read(x)
        q, k, v = self.qkv(read)
        return q, k, v if self.indexer is None or v is None else self.indexer(read, v)

    def _read(self, x: Array) -> Array:
        """What attention reads of the residual."""
        return x if self.attn_norm is None else self.attn_norm(x)

    def head_squares(self, heads: Heads) -> Array | None:
        if self.head_norms is None or not self.cfg.needs_squares:
            return None
        q, k, _ = heads
        return None if k is None else self.head_norms.squares(q, k)

    def before_attention(self, heads: Heads, squares: Array | None, positions: Array) -> Heads:
        q, k, v = heads
        if self.cfg.rope_first:
            q, k = self._turn(q, k, positions)
        if self.head_norms is not None:
            q, k = self.head_norms(q, k, squares)
        if not self.cfg.rope_first:
            q, k = self._turn(q, k, positions)
        if isinstance(self.qkv, LatentQKV) and k is not None and v is not None:
            k, v = self.qkv.turn(k, v, positions)
        if self.indexer is not None and k is not None and v is not None:
            k, v = self.indexer.turn(k, v, positions)
        if v is not None and self.cfg.v_norm:
            v = normalise(v.astype(jnp.float32), "rms", self.cfg.eps).astype(v.dtype)
        if self.cfg.temperature is not None:
            every, scale, offset = self.cfg.temperature
            steps = ((positions + offset) // every).astype(jnp.float32)
            factor = 1.0 + scale * jnp.log1p(steps)
            q = (q * factor[..., None, None, None]).astype(q.dtype)
        return q, k, v

    def _turn(self, q: Array, k: Array | None, positions: Array) -> tuple[Array, Array | None]:
        q, *ks = self.rope(positions, q, *(() if k is None else (k,)))
        return q, ks[0] if ks else None

    def after_attention(self, o: Array, x: Array) -> Array:
        assert self.out is not None
        o = self.out.heads(o)
        y = self.out(o if self.gate is None else self.gate(o, self._read(x)))
        factor = self.cfg.out_factor
        return y if factor == 1.0 else y * jnp.asarray(factor, y.dtype)

    def rest_of_layer(self, o: Array, x: Array) -> Array | None:
        if not self._ends_as_a_kernel(x):
            return None
        given = {"x": x[:, 0], "heads": o.reshape(len(o), -1)}
        products = Products(len(x), self.cfg.eps, given)
        self._add_rest(products)
        return products.made()["found"][:, None] if products.are_a_kernel() else None

    def whole_layer(
        self, x: Array, positions: Array, rings: Rings, qkv: Array | None = None
    ) -> Whole | None:
        cfg, rope, norm = self.cfg, self.rope.rope, self.attn_norm
        if not self._ends_as_a_kernel(x):
            return None
        products = Products(len(x), cfg.eps, {"x": x[:, 0]})
        if qkv is not None:
            products.arrays["qkv"] = qkv
        else:
            weight = None if norm is None else norm.only_weight()
            if rope is None or weight is None or not _begins_plainly(cfg):
                return None
            assert isinstance(self.qkv, QKV)
            cos, sin = self.rope.turns(rope, positions)
            products.arrays |= {"cos": cos[:, 0], "sin": sin[:, 0]}
            turned = Turned(cfg.q_per_kv, cfg.k_dim, rope.pairs == "halves", "cos", "sin")
            w = self.qkv.weight[...]
            products.step(w.reshape(-1, w.shape[-1]), "x", "qkv", weight, turned=turned)
        products.attend(rings, "heads")
        self._add_rest(products)
        if not products.are_a_kernel():
            return None
        made = products.made()
        return Whole(made["found"][:, None], made["k_ring"], made["v_ring"])

    def _ends_as_a_kernel(self, x: Array) -> bool:
        """Whether what follows on attention may be a kernel, of the residual x [B, T, D]."""
        norm, plain = self.mlp_norm, type(self) is DecoderBlock and _ends_plainly(self.cfg)
        weight = None if norm is None else norm.only_weight()
        return self.cfg.kernels and x.shape[1] == 1 and plain and weight is not None

    def _add_rest(self, products: Products) -> None:
        """Add what follows on attention to a kernel's steps."""
        assert isinstance(self.out, HeadsOut)
        assert isinstance(self.ffn, DenseMLP)
        assert self.mlp_norm is not None
        out, up, down = self.out.weight[...], self.ffn.up[...], self.ffn.down[...]
        out, up = out.reshape(out.shape[0], -1), up.reshape(-1, up.shape[-1])
        weight = self.mlp_norm.only_weight()
        assert weight is not None
        products.rest("heads", out, weight, up, down)

    def begin_recur(self, x: Array, state: tuple[Array, ...], counts: Array) -> Midway:
        assert isinstance(self.recurrent, SelectiveMixer)
        return Midway(*self.recurrent.begin(self._read(x), state, counts))

    def recur(
        self, x: Array, state: tuple[Array, ...], counts: Array, midway: Midway | None
    ) -> tuple[Array, tuple[Array, ...]]:
        assert self.recurrent is not None
        if isinstance(self.recurrent, SelectiveMixer):
            assert midway is not None
            return self.recurrent(*midway, state, counts)
        return self.recurrent(self._read(x), state, counts)

    def join_attention(self, x: Array, total: Array) -> tuple[Array, Array]:
        out = self.recurrent if self.out is None else self.out
        y = total if out is None else out.finish(total, x.dtype)
        joined = self._add(self._kept(x, self._read), y, self.out_bias, self.post_attn_norm)
        read = self._mlp_read(joined, x)
        if self.cfg.mlp_bare:
            joined = self._add(joined, activation(self.cfg)(read), None, self.post_mlp_norm)
        return joined, read

    def _kept(self, x: Array, read: Callable[[Array], Array]) -> Array:
        """What half a layer adds to: the residual x, or some times what it reads of it."""
        scale = self.cfg.read_residual
        return x if scale == 0.0 else read(x) * jnp.asarray(scale, x.dtype)

    def enter_mlp(self, x: Array) -> Array:
        return self._mlp_read(x, x)

    def _mlp_read(self, joined: Array, x: Array) -> Array:
        """What the MLP reads of the residual after attention, or of the one before it."""
        norm = self.mlp_norm
        if self.cfg.parallel:
            joined, norm = x, norm or self.attn_norm
        return joined if norm is None else norm(joined)

    def end_mlp(self, begun: Any, total: Array | None) -> Array:
        assert self.ffn is not None
        return self.ffn(begun)

    def join_mlp(self, x: Array, total: Array) -> Array:
        assert self.ffn is not None
        y = self.ffn.finish(total, x.dtype)
        x = self._kept(x, self.enter_mlp)
        return self._add(x, y, self.down_bias, self.post_mlp_norm)

    def _add(self, x: Array, y: Array, bias: nnx.Param | None, post_norm: Norm | None) -> Array:
        """The residual x and what is added to it."""
        y = y if bias is None else y + bias[...]
        y = y if post_norm is None else post_norm(y)
        scale = self.cfg.residual_scale
        return x + (y if scale == 1.0 else y * jnp.asarray(scale, y.dtype))
