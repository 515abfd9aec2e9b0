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

from jaxllm.models.config import LayerConfig
from jaxllm.models.parts import RMS, NormStyle, bias_of
from jaxllm.models.products import one_product
from jaxllm.models.quantised import Quantised
from jaxllm.models.sections import Section

Array: TypeAlias = jax.Array
Heads: TypeAlias = tuple[Array, Array | None, Array | None]  # queries, keys and values
Device: TypeAlias = Any  # jax.Device, which is no type to a type checker


def precision_of(x: Array) -> lax.Precision | None:
    """float32 stays float32 on every platform (GPUs would otherwise round to TF32)."""
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


VECTOR_PARTS = 8  # a matrix times one vector, in as many parallel parts
TILE = 1 << 16  # values of a quantised matrix that a CPU unpacks at a time


def linear(x: Array, w: Array | Quantised) -> Array:
    """x [..., in] times w [out, in] transposed: [..., out] in x's dtype. A device may have no
    columns of one of the MLPs of a layer; its product is zero."""
    if x.shape[-1] == 0:
        return jnp.zeros((*x.shape[:-1], w.shape[0]), x.dtype)
    rows = x.reshape(-1, x.shape[-1])
    y = quantised_product(rows, w) if isinstance(w, Quantised) else product(rows, w)
    return y.reshape(*x.shape[:-1], w.shape[0])


def product(rows: Array, w: Array) -> Array:
    """rows [M, in] times w [out, in] transposed: [M, out].

    CPUs have forms of their own, chosen when the program is lowered: XLA:CPU reads the weight in
    order when it is the left operand, and spreads a batch of products over its threads where it
    would leave a small product of one row to one of them. `docs/performance.md` has figures.
    """
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

    def summed(rows: Array, w: Array) -> Array:
        wide = w.astype(jnp.float32) * rows.astype(jnp.float32)
        return wide.sum(axis=-1)[None].astype(rows.dtype)

    single = len(rows) == 1 and out > 0
    on_cpu = one_row if single and out % VECTOR_PARTS == 0 else weight_left
    on_gpu = summed if single else weight_right
    return lax.platform_dependent(rows, w, cpu=on_cpu, cuda=on_gpu, default=weight_right)


def quantised_product(rows: Array, w: Quantised) -> Array:
    """rows [M, in] times w [out, in] transposed: [M, out].

    A few rows are multiplied by the codes as they are where the device has a kernel for that, one
    row on any accelerator. For more the matrix is unpacked first, when the rows are there: no two
    matrices are unpacked at a time. XLA:CPU would unpack them all at once, in both cases; there a
    loop unpacks a few rows that stay in the processor's cache.
    """
    out, size = w.shape
    tile = next((n for n in range(min(out, TILE // size), 0, -1) if out % n == 0), 1)

    def whole(rows: Array, w: Quantised) -> Array:
        kernel = one_product(rows, w)
        if kernel.are_a_kernel():
            return kernel.made()["found"]
        if len(rows) == 1:
            return w.product(rows[0])[None].astype(rows.dtype)
        rows, w = lax.optimization_barrier((rows, w))
        return product(rows, w.values())

    def in_tiles(rows: Array, w: Quantised) -> Array:
        tiles = w.reshape(out // tile, tile, size)
        y = lax.map(lambda part: product(rows, part.values()), tiles)  # [tiles, M, tile]
        return y.transpose(1, 0, 2).reshape(len(rows), out)

    return lax.platform_dependent(rows, w, cpu=in_tiles, default=whole)


def param(
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    source: tuple[str, ...],
    dtype: jnp.dtype,
    form: str = "plain",
    matrix: bool = False,
    sections: tuple[Section, ...] = (),
) -> nnx.Param:
    """A parameter that is only a description until `bind` or a loader gives it values."""
    return nnx.Param(
        jnp.zeros(shape, dtype),
        out_sharding=axes,
        eager_sharding=False,
        source=source,
        form=form,
        matrix=matrix,
        values=dtype,
        packs=1,
        kind=None,
        sections=sections,
    )


def matrix(
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    source: tuple[str, ...],
    dtype: jnp.dtype,
    form: str = "plain",
    sections: tuple[Section, ...] = (),
) -> nnx.Param:
    """A parameter [..., out, in] that is used in `linear` and by rows alone, so that it may also be
    held as a `QuantisedParam`."""
    return param(shape, axes, source, dtype, form, matrix=True, sections=sections)


class Norm(nnx.Module):
    """A norm over the last dim, in float32; `NormStyle` says which. Its bias is named after its
    weight."""

    def __init__(
        self,
        size: int,
        eps: float,
        source: str,
        style: NormStyle = RMS,
        axis: str = "embed",
    ):
        f32 = jnp.dtype(jnp.float32)
        self.kind, self.eps = style.kind, eps
        self.weight = param((size,), (axis,), (source,), f32) if style.weight else None
        bias = bias_of(source)
        biased = bias.removeprefix("/") in style.biases
        self.bias = param((size,), (axis,), (bias,), f32) if biased else None

    def only_weight(self) -> Array | None:
        """The weight of a root mean square's norm that has nothing else."""
        if self.kind != "rms" or self.weight is None or self.bias is not None:
            return None
        return self.weight[...]

    def __call__(self, x: Array) -> Array:
        y = normalise(x.astype(jnp.float32), self.kind, self.eps)
        y = y if self.weight is None else y * self.weight[...]
        return (y if self.bias is None else y + self.bias[...]).astype(x.dtype)


def normalise(y: Array, kind: str, eps: float) -> Array:
    """y over the root of its mean square along the last dim, or over its deviation."""
    if kind == "layer":
        y = y - jnp.mean(y, axis=-1, keepdims=True)
    return y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)


class SubNorm(nnx.Module):
    """An RMS norm over the whole width of what a projection reads, which devices share.

    The projection is linear: a device gives its partial of the weighted values and, in one channel
    more, its sum of squares; the root of the full sum then divides it.
    """

    def __init__(self, weight: nnx.Param, size: int, eps: float):
        self.weight, self.size, self.eps = weight, size, eps

    def project(
        self,
        x: Array,
        w: Array | Quantised,
        factor: Array | None = None,
        dtype: jnp.dtype | None = None,
    ) -> Array:
        """x [B, T, own channels] times w [D, own channels]: float32 [B, T, D + 1]. A factor of what
        is normalised comes before w; the product is made in x's dtype, or that given."""
        y = x.astype(jnp.float32)
        squares = jnp.sum(y * y, axis=-1, keepdims=True)
        y = y * self.weight[...].reshape(-1)
        partial = linear((y if factor is None else y * factor).astype(dtype or x.dtype), w)
        return jnp.concatenate([partial.astype(jnp.float32), squares], axis=-1)

    def finish(self, total: Array, dtype: jnp.dtype) -> Array:
        """The sum [B, T, D + 1] over devices -> [B, T, D]."""
        scale = lax.rsqrt(total[..., -1:] / self.size + self.eps)
        return (total[..., :-1] * scale).astype(dtype)


class QKV(nnx.Module):
    """Joint query, key and value projection of whole KV groups."""

    def __init__(self, cfg: LayerConfig, kv_heads: int, embed: int, dtype: jnp.dtype):
        self.cfg = cfg
        own = cfg.attn_names
        names, rows = [own.q], cfg.q_per_kv * cfg.k_dim
        if cfg.owns_cache:
            names, rows = [*names, own.k], rows + cfg.k_dim
            if not cfg.v_from_k:
                names, rows = [*names, own.v], rows + cfg.v_dim
        if cfg.qkv_joined:
            names = ["attn_qkv"]
        self.weight = matrix(
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

    def __call__(self, x: Array, norm: Norm | None = None) -> Heads:
        """x [B, T, D], normalised if there is a norm -> q [B, T, K, G, H], k [B, T, K, H],
        v [B, T, K, Hv]; k and v are None for a layer without a cache of its own."""
        cfg, w = self.cfg, self.weight[...]
        kv_heads, rows, embed = w.shape
        y = self._product(x, norm, w.reshape(kv_heads * rows, embed))
        y = y.reshape(*x.shape[:-1], kv_heads, rows)
        if self.bias is not None:
            y = y + self.bias[...]
        if cfg.qkv_clamp is not None:
            y = jnp.clip(y, -cfg.qkv_clamp, cfg.qkv_clamp)
        q_rows = cfg.q_per_kv * cfg.k_dim
        q = y[..., :q_rows].reshape(*y.shape[:-1], cfg.q_per_kv, cfg.k_dim)
        if not cfg.owns_cache:
            return q, None, None
        k = y[..., q_rows : q_rows + cfg.k_dim]
        return q, k, k if cfg.v_from_k else y[..., q_rows + cfg.k_dim :]

    def _product(self, x: Array, norm: Norm | None, w: Array | Quantised) -> Array:
        if norm is None:
            return linear(x, w)
        weight = norm.only_weight() if self.cfg.kernels else None
        if weight is not None:
            rows = x.reshape(-1, x.shape[-1])
            kernel = one_product(rows, w, weight, norm.eps)
            if kernel.are_a_kernel():
                return kernel.made()["found"].reshape(*x.shape[:-1], -1)
        return linear(norm(x), w)


class HeadsOut(nnx.Module):
    """Attention output projection: the partial of this device's own heads."""

    def __init__(self, cfg: LayerConfig, kv_heads: int, embed: int, dtype: jnp.dtype):
        self.weight = matrix(
            (embed, kv_heads, cfg.q_per_kv * cfg.v_dim),
            ("embed", "kv_group", "head_rows"),
            (f"{cfg.attn_names.out}.weight",),
            dtype,
            form="columns",
        )
        rows, f32 = cfg.q_per_kv * cfg.v_dim, jnp.dtype(jnp.float32)
        axes, source = ("kv_group", "head_rows"), ("attn_sub_norm.weight",)
        self.sub_norm = (
            SubNorm(
                param((kv_heads, rows), axes, source, f32, form="q_heads"),
                cfg.kv_heads * rows,
                cfg.eps,
            )
            if cfg.sub_norms
            else None
        )

    def heads(self, o: Array) -> Array:
        """What attention gives [B, T, K, G, Hv], as a gate and the projection read it."""
        return o

    def __call__(self, o: Array) -> Array:
        """o [B, T, K, G, Hv] -> [B, T, D], to be summed over devices (see `SubNorm`)."""
        w = self.weight[...]
        o, w = o.reshape(*o.shape[:2], -1), w.reshape(w.shape[0], -1)
        return linear(o, w) if self.sub_norm is None else self.sub_norm.project(o, w)

    def finish(self, total: Array, dtype: jnp.dtype) -> Array:
        """What is added to the residual [B, T, D], of the sum over devices."""
        return total if self.sub_norm is None else self.sub_norm.finish(total, dtype)


class DenseMLP(nnx.Module):
    """down(act(gate(x)) * up(x)) over this device's own columns, or down(act(up(x))): a partial
    (Shazeer 2020). `suffix` ends the names of its tensors; columns are cut along `axis`."""

    def __init__(
        self,
        cfg: LayerConfig,
        columns: int,
        embed: int,
        dtype: jnp.dtype,
        suffix: str = "",
        axis: str = "mlp",
    ):
        self.cfg = cfg
        names = ("ffn_gate", "ffn_up") if cfg.mlp_gated and not cfg.mlp_joined else ("ffn_up",)
        weights, biases = ([f"{n}{suffix}.{kind}" for n in names] for kind in ("weight", "bias"))
        lead, axes, form = ((2,), ("pair",), "stack") if cfg.mlp_gated else ((), (), "plain")
        shape, axes = (*lead, columns), (*axes, axis)
        self.up = matrix((*shape, embed), (*axes, "embed"), tuple(weights), dtype, form=form)
        self.bias = param(shape, axes, tuple(biases), dtype, form=form) if cfg.mlp_bias else None
        self.scales = (
            param((columns,), (axis,), ("ffn.act.scales",), dtype) if cfg.mlp_scales else None
        )
        source = (f"ffn_down{suffix}.weight",)
        self.down = matrix((embed, columns), ("embed", axis), source, dtype, form="columns")
        norm, f32 = ("ffn_sub_norm.weight",), jnp.dtype(jnp.float32)
        self.sub_norm = (
            SubNorm(param((columns,), ("mlp",), norm, f32), cfg.mlp, cfg.eps)
            if cfg.sub_norms
            else None
        )

    def __call__(self, x: Array) -> Array:
        """x [B, T, D] -> [B, T, D], to be summed over devices (see `SubNorm`)."""
        y, w = self.hidden(self.columns(x)), self.down[...]
        return linear(y, w) if self.sub_norm is None else self.sub_norm.project(y, w)

    def finish(self, total: Array, dtype: jnp.dtype) -> Array:
        """What is added to the residual [B, T, D], of the sum over devices."""
        return total if self.sub_norm is None else self.sub_norm.finish(total, dtype)

    def columns(self, x: Array) -> Array:
        """x [B, T, D] -> [B, T, own columns], of gate and up one after the other if it is gated."""
        w = self.up[...]
        y = linear(x, w.reshape(-1, w.shape[-1]))
        return y if self.bias is None else y + self.bias[...].reshape(-1)

    def hidden(self, y: Array) -> Array:
        """What `columns` gives -> [B, T, own columns] as the down projection reads them."""
        if self.cfg.mlp_gated:
            y = gated(self.cfg, *jnp.split(y, 2, axis=-1))
        else:
            y = activation(self.cfg)(y)
        if self.scales is not None:
            scales = self.scales[...]
            y = y / jnp.where(scales == 0.0, 1.0, scales)  # zero where a slice is padded
        return y


def _gelu_tanh(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=True)


def _relu_squared(x: Array) -> Array:
    return jnp.square(jax.nn.relu(x))


def _xielu(x: Array, alpha_n: float, alpha_p: float, beta: float, eps: float) -> Array:
    """Huang and Schlag 2024: quadratic above zero, an integrated ELU below."""
    above = jax.nn.softplus(alpha_p) * x * x
    below = (jnp.expm1(jnp.minimum(x, eps)) - x) * (beta + jax.nn.softplus(alpha_n))
    return jnp.where(x > 0, above, below) + beta * x


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": _gelu_tanh,
    "relu": jax.nn.relu,
    "relu2": _relu_squared,
}


def activation(cfg: LayerConfig) -> Callable[[Array], Array]:
    """The activation of a layer's MLP."""
    if cfg.activation == "xielu":
        return lambda x: _xielu(x, *cfg.xielu)
    return ACTIVATIONS[cfg.activation]


def gated(cfg: LayerConfig, gate: Array, up: Array) -> Array:
    """The hidden values of a layer's gated MLP from its two halves."""
    if cfg.activation == "situ":  # Kimi K3: SiLU of a bounded gate, and a bounded linear half
        bound, other = cfg.situ
        up = other * jnp.tanh(up / other) if other > 0.0 else up
        return bound * jnp.tanh(gate / bound) * jax.nn.sigmoid(gate) * up
    if cfg.activation != "clamped_swiglu":
        gate, limit = activation(cfg)(gate), cfg.mlp_limit
        if limit:
            gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return gate * up
    # gpt-oss: both halves bounded, a steeper sigmoid, and one added to the linear half.
    gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
    return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1.0)
