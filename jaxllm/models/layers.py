"""The parts that families are built from, each as one device sees it.

Every parameter is an `nnx.Param` that carries three facts: `out_sharding`, the named axis of each
of its dims (`sharding.axes` says which share an axis follows); `source`, the names of the GGUF
tensors it is made of; and `form`, how they are laid together. Nothing here asks how many devices
there are: sizes are those of a device's own slice, and an output projection returns a partial.

Weights are stored [out, in], the order of GGUF. Query, key and value rows of one KV group stand
together (`qkv`), so that a group is one contiguous slice; gate and up are one tensor likewise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxllm.models.config import LayerConfig, Rope

Array: TypeAlias = jax.Array
Device: TypeAlias = Any  # jax.Device, which is no type to a type checker


def precision_of(x: Array) -> lax.Precision | None:
    """float32 stays float32 on every platform (GPUs would otherwise round to TF32)."""
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


VECTOR_PARTS = 8  # a matrix times one vector, in as many parallel parts


def linear(x: Array, w: Array) -> Array:
    """x [..., in] times w [out, in] transposed: [..., out] in x's dtype.

    CPUs have forms of their own, chosen when the program is lowered: XLA:CPU reads the weight in
    order when it is the left operand, and spreads a batch of products over its threads where it
    would leave a small product of one row to one of them. `docs/performance.md` has figures.
    """
    rows = x.reshape(-1, x.shape[-1])
    exact = precision_of(rows)
    out = w.shape[0]

    def one_row(rows: Array, w: Array) -> Array:
        parts = w.reshape(VECTOR_PARTS, out // VECTOR_PARTS, w.shape[1])
        vectors = jnp.broadcast_to(rows, (VECTOR_PARTS, w.shape[1]))
        batch = (((2,), (1,)), ((0,), (0,)))
        return lax.dot_general(parts, vectors, batch, precision=exact).reshape(1, out)

    def weight_left(rows: Array, w: Array) -> Array:
        return lax.dot_general(w, rows, (((1,), (1,)), ((), ())), precision=exact).T

    def weight_right(rows: Array, w: Array) -> Array:
        return lax.dot_general(rows, w, (((1,), (1,)), ((), ())), precision=exact)

    alone = len(rows) == 1 and out > 0 and out % VECTOR_PARTS == 0
    on_cpu = one_row if alone else weight_left
    y = lax.platform_dependent(rows, w, cpu=on_cpu, default=weight_right)
    return y.reshape(*x.shape[:-1], out)


def param(
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    source: tuple[str, ...],
    dtype: jnp.dtype,
    form: str = "plain",
) -> nnx.Param:
    """A parameter that is only a description until `bind` or a loader gives it values."""
    return nnx.Param(
        jnp.zeros(shape, dtype),
        out_sharding=axes,
        eager_sharding=False,
        source=source,
        form=form,
    )


class RMSNorm(nnx.Module):
    """x / rms(x) * weight over the last dim, in float32 (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, eps: float, source: str, axis: str = "embed"):
        self.weight = param((size,), (axis,), (source,), jnp.dtype(jnp.float32))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        y = x.astype(jnp.float32)
        y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return (y * self.weight[...]).astype(x.dtype)


class QKV(nnx.Module):
    """Joint query, key and value projection of whole KV groups."""

    def __init__(self, cfg: LayerConfig, kv_heads: int, embed: int, dtype: jnp.dtype):
        self.cfg = cfg
        rows = cfg.q_per_kv * cfg.k_dim + cfg.k_dim + cfg.v_dim
        names = ("attn_q", "attn_k", "attn_v")
        self.weight = param(
            (kv_heads, rows, embed),
            ("kv_group", "head_rows", "embed"),
            tuple(f"{n}.weight" for n in names),
            dtype,
            form="qkv",
        )
        biases = tuple(f"{n}.bias" for n in names)
        axes = ("kv_group", "head_rows")
        self.bias = (
            param((kv_heads, rows), axes, biases, dtype, form="qkv") if cfg.qkv_bias else None
        )

    def __call__(self, x: Array) -> tuple[Array, Array, Array]:
        """x [B, T, D] -> q [B, T, K, G, H], k [B, T, K, H], v [B, T, K, Hv]."""
        cfg, w = self.cfg, self.weight[...]
        kv_heads, rows, embed = w.shape
        y = linear(x, w.reshape(kv_heads * rows, embed)).reshape(*x.shape[:-1], kv_heads, rows)
        if self.bias is not None:
            y = y + self.bias[...]
        q_rows = cfg.q_per_kv * cfg.k_dim
        q = y[..., :q_rows].reshape(*y.shape[:-1], cfg.q_per_kv, cfg.k_dim)
        return q, y[..., q_rows : q_rows + cfg.k_dim], y[..., q_rows + cfg.k_dim :]


class HeadsOut(nnx.Module):
    """Attention output projection: the partial of this device's own heads."""

    def __init__(self, cfg: LayerConfig, kv_heads: int, embed: int, dtype: jnp.dtype):
        self.weight = param(
            (embed, kv_heads, cfg.q_per_kv * cfg.v_dim),
            ("embed", "kv_group", "head_rows"),
            ("attn_output.weight",),
            dtype,
            form="columns",
        )

    def __call__(self, o: Array) -> Array:
        """o [B, T, K, G, Hv] -> [B, T, D], to be summed over devices."""
        w = self.weight[...]
        return linear(o.reshape(*o.shape[:2], -1), w.reshape(w.shape[0], -1))


class GatedMLP(nnx.Module):
    """down(act(gate(x)) * up(x)) over this device's own columns: a partial (Shazeer 2020)."""

    def __init__(self, cfg: LayerConfig, columns: int, embed: int, dtype: jnp.dtype):
        self.activation = cfg.activation
        self.gate_up = param(
            (2, columns, embed),
            ("pair", "mlp", "embed"),
            ("ffn_gate.weight", "ffn_up.weight"),
            dtype,
            form="stack",
        )
        self.down = param(
            (embed, columns), ("embed", "mlp"), ("ffn_down.weight",), dtype, form="columns"
        )

    def __call__(self, x: Array) -> Array:
        """x [B, T, D] -> [B, T, D], to be summed over devices."""
        w = self.gate_up[...]
        y = linear(x, w.reshape(-1, w.shape[-1]))
        gate, up = jnp.split(y, 2, axis=-1)
        return linear(ACTIVATIONS[self.activation](gate) * up, self.down[...])


def _gelu_tanh(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=True)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"silu": jax.nn.silu, "gelu": _gelu_tanh}


class RopeTable(nnx.Module):
    """Rotation of queries and keys; holds the frequency factors where a model has them."""

    def __init__(self, rope: Rope):
        self.rope = rope
        shape, source = (rope.dim // 2,), ("/rope_freqs.weight",)
        self.factors = (
            param(shape, ("rope",), source, jnp.dtype(jnp.float32)) if rope.factors else None
        )

    def __call__(self, positions: Array, *xs: Array) -> tuple[Array, ...]:
        """Rotate each x [B, T, ..., H] at positions [B, T]; dims past `rope.dim` pass through."""
        rope = self.rope
        freq = rope.theta ** (-jnp.arange(0, rope.dim, 2, dtype=jnp.float32) / rope.dim)
        if self.factors is not None:
            freq = freq / self.factors[...]
        angle = (positions.astype(jnp.float32) / rope.scale)[..., None] * freq  # [B, T, dim/2]
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        return tuple(self._rotate(x, cos, sin) for x in xs)

    def _rotate(self, x: Array, cos: Array, sin: Array) -> Array:
        rope = self.rope
        y = x[..., : rope.dim].astype(jnp.float32)
        middle = (1,) * (x.ndim - 3)
        cos = cos.reshape(*cos.shape[:2], *middle, -1)
        sin = sin.reshape(*sin.shape[:2], *middle, -1)
        if rope.pairs == "halves":
            a, b = jnp.split(y, 2, axis=-1)
            y = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
        else:
            a, b = y[..., 0::2], y[..., 1::2]
            y = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(y.shape)
        y = y.astype(x.dtype)
        return y if rope.dim == x.shape[-1] else jnp.concatenate([y, x[..., rope.dim :]], axis=-1)
