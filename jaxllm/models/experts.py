"""A mixture of experts: each token goes through a few gated MLPs that a router picks for it.

Every device routes alike and holds its own columns of every expert, so an expert's output is a
partial like that of a dense MLP.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxllm.models.config import Columns, LayerConfig
from jaxllm.models.layers import Array, DenseMLP, Norm, activation, gated, linear, matrix, param
from jaxllm.models.parts import Experts

BLOCK_ROWS = 32  # tokens of one expert that are multiplied at a time in a prefill chunk
LEAST_SUM = 2.0**-14  # of the chosen scores: what they are divided by, at least
FLOAT = jnp.dtype(jnp.float32)


def _each(experts: int, source: str | None) -> nnx.Param | None:
    """One number an expert, if there is such a tensor."""
    return None if source is None else param((experts,), ("expert",), (source,), FLOAT)


class Router(nnx.Module):
    """Which experts a token goes through, and with what weights; see `Experts`."""

    def __init__(self, experts: Experts, embed: int):
        self.experts = experts
        n = experts.count
        source = ("ffn_gate_inp.weight",)
        self.weight = param((n, embed), ("expert", "embed"), source, FLOAT)
        self.bias = _each(n, "ffn_gate_inp.bias" if experts.router_bias else None)
        self.choice_bias = _each(n, experts.choice_bias)

    def __call__(self, rows: Array) -> tuple[Array, Array]:
        """rows [M, D] -> float32 weights and ids [M, used] of each row's experts."""
        experts = self.experts
        logits = linear(rows.astype(jnp.float32), self.weight[...])
        if self.bias is not None:
            logits = logits + self.bias[...]
        if experts.scores == "softmax":
            scores = jax.nn.softmax(logits, axis=-1)
        else:
            scores = jax.nn.sigmoid(logits) if experts.scores == "sigmoid" else logits
        chosen = self.choose(logits, scores)
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if experts.scores == "chosen":
            weights = jax.nn.softmax(weights, axis=-1)
        if experts.normalised:
            weights = weights / jnp.maximum(weights.sum(axis=-1, keepdims=True), LEAST_SUM)
        return weights * experts.scale, chosen

    def choose(self, logits: Array, scores: Array) -> Array:
        """Ids [M, used] of the best experts of each row of logits and scores [M, E]."""
        experts = self.experts
        if self.choice_bias is not None:
            scores = scores + self.choice_bias[...]
        elif experts.groups == 1:
            scores = logits  # in the same order, and distinct where scores are rounded to 1
        if experts.groups > 1:
            grouped = scores.reshape(len(scores), experts.groups, -1)
            best = lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(axis=-1)
            _, kept = lax.top_k(best, experts.groups_used)
            inside = (kept[..., None] == jnp.arange(experts.groups)).any(axis=1)
            scores = jnp.where(inside[..., None], grouped, -jnp.inf).reshape(scores.shape)
        return lax.top_k(scores, experts.used)[1]


class SharedMLP(nnx.Module):
    """The gated MLP beside a mixture that every token goes through: a partial."""

    def __init__(self, cfg: LayerConfig, columns: int, embed: int, dtype: jnp.dtype):
        assert cfg.experts is not None
        gate = cfg.experts.shared_gate
        suffix, cfg = cfg.experts.shared_suffix, replace(cfg, mlp_limit=cfg.experts.shared_limit)
        self.dense = DenseMLP(cfg, columns, embed, dtype, suffix, axis="shared_mlp")
        source = ("ffn_gate_inp_shexp.weight",)
        self.gate = param((embed,), ("embed",), source, FLOAT) if gate else None

    def __call__(self, x: Array) -> Array:
        """x [B, T, D] -> [B, T, D], to be summed over devices."""
        y = self.dense(x)
        if self.gate is None:
            return y
        logit = linear(x.astype(jnp.float32), self.gate[...][None])
        return (y * jax.nn.sigmoid(logit)).astype(x.dtype)


class Narrowing(nnx.Module):
    """Two projections around experts that work in fewer channels, which every device has whole:
    what leads back follows the sum over devices, and maybe a norm."""

    def __init__(self, cfg: LayerConfig, embed: int, dtype: jnp.dtype):
        assert cfg.experts is not None
        self.width, name = cfg.experts.narrow, cfg.experts.narrow_name
        shape, axes = (self.width, embed), ("latent", "embed")
        self.down = matrix(shape, axes, (f"{name}_down.weight",), dtype)
        self.up = matrix(shape[::-1], axes[::-1], (f"{name}_up.weight",), dtype)
        norm = Norm(self.width, cfg.eps, f"{name}_norm.weight", axis="latent")
        self.norm = norm if cfg.experts.narrow_norm else None

    def finish(self, total: Array) -> Array:
        """The sum over devices of what experts gave [B, T, narrow] and, after it, of what a MLP
        beside them did [B, T, D] -> [B, T, D]."""
        y, shared = jnp.split(total, (self.width,), axis=-1)
        y = linear(y if self.norm is None else self.norm(y), self.up[...])
        return y + shared if shared.shape[-1] else y


class ExpertMLPs(nnx.Module):
    """sum over the chosen experts of weight * down(act(gate(x)) * up(x)), or without the gate: a
    partial (Shazeer et al. 2017, with gated experts as in Jiang et al. 2024). `suffix` ends the
    names of their tensors; columns are cut along `axis`."""

    def __init__(
        self,
        cfg: LayerConfig,
        experts: Experts,
        columns: int,
        embed: int,
        dtype: jnp.dtype,
        suffix: str = "_exps",
        axis: str = "mlp",
    ):
        self.cfg, self.experts = cfg, experts
        n, pair = experts.count, 2 if cfg.mlp_gated else 1
        names = ("ffn_gate_up",) if experts.joined else ("ffn_gate", "ffn_up")[-pair:]
        gate_up = tuple(f"{name}{suffix}" for name in names)
        self.gate_up = matrix(
            (n, pair, columns, embed),
            ("expert", "pair", axis, "embed"),
            tuple(f"{name}.weight" for name in gate_up),
            dtype,
            form="experts_stack",
        )
        self.down = matrix(
            (n, embed, columns),
            ("expert", "embed", axis),
            (f"ffn_down{suffix}.weight",),
            dtype,
            form="experts_columns",
        )
        biases = tuple(f"{name}.bias" for name in gate_up)
        shape, axes = (n, pair, columns), ("expert", "pair", axis)
        wanted = experts.biases
        self.gate_up_bias = param(shape, axes, biases, FLOAT, "experts_stack") if wanted else None
        axes, biases = ("expert", "embed"), (f"ffn_down{suffix}.bias",)
        self.down_bias = param((n, embed), axes, biases, FLOAT, "once") if wanted else None
        self.down_scale = _each(n, f"ffn_down{suffix}.scale" if experts.down_scale else None)

    def mix(self, x: Array, weights: Array, chosen: Array) -> Array:
        """x [B, T, D] through experts `chosen` [B T, used] with their weights: [B, T, D]."""
        rows = x.reshape(-1, x.shape[-1])
        # A step of one token a row multiplies each alone: its bits depend on no other row.
        block = 1 if x.shape[1] == 1 else min(BLOCK_ROWS, len(rows))
        y = self.run(rows, weights, chosen, block)
        return y.sum(axis=1).astype(x.dtype).reshape(x.shape)

    def run(self, rows: Array, weights: Array, chosen: Array, block: int) -> Array:
        """rows [M, D] through experts `chosen` [M, used], weighted: float32 [M, used, D].

        Pairs of row and expert are sorted by expert and multiplied in blocks of one expert each.
        A block may reach into the next expert's rows; that expert, coming later, writes them again.
        """
        used, weigh_input = self.experts.used, self.experts.weigh_input
        order = jnp.argsort(chosen.reshape(-1), stable=True)  # of pairs
        counts = jnp.bincount(chosen.reshape(-1), length=self.experts.count)
        ends = jnp.cumsum(counts)
        blocks_end = jnp.cumsum(-(-counts // block))  # blocks up to and with each expert
        given = rows[order // used]
        if weigh_input:
            given = (given * weights.reshape(-1)[order][:, None]).astype(rows.dtype)
        padded = jnp.pad(given, ((0, block), (0, 0)))

        def one(i: Array, out: Array) -> Array:
            expert = jnp.searchsorted(blocks_end, i, side="right")
            left = blocks_end[expert] - i  # blocks of this expert, this one included
            first = ends[expert] - counts[expert]
            first += (-(-counts[expert] // block) - left) * block
            y = self.expert(lax.dynamic_slice_in_dim(padded, first, block), expert)
            return lax.dynamic_update_slice_in_dim(out, y, first, axis=0)

        out = lax.fori_loop(0, blocks_end[-1], one, jnp.zeros_like(padded))
        back = jnp.zeros_like(order).at[order].set(jnp.arange(len(order)))
        y = out[back].reshape(*chosen.shape, -1).astype(jnp.float32)
        if self.down_scale is not None:
            y = y * self.down_scale[...][chosen][..., None]
        if self.down_bias is not None:
            y = y + self.down_bias[...][chosen]
        return y if weigh_input else y * weights[..., None]

    def expert(self, rows: Array, expert: Array) -> Array:
        """rows [M, D] through the expert of that index: [M, D] without scale and bias."""
        gate_up = self.gate_up[...][expert]
        y = linear(rows, gate_up.reshape(-1, gate_up.shape[-1]))
        if self.gate_up_bias is not None:
            y = (y + self.gate_up_bias[...][expert].reshape(-1)).astype(rows.dtype)
        if self.cfg.mlp_gated:
            y = gated(self.cfg, *jnp.split(y, 2, axis=-1))
        else:
            y = activation(self.cfg)(y)
        return linear(y, self.down[...][expert])


class RoutedMLP(ExpertMLPs):
    """A mixture of experts in the place of an MLP, with an MLP beside it where the layer has one:
    a partial."""

    def __init__(self, cfg: LayerConfig, columns: Columns, embed: int, dtype: jnp.dtype):
        experts = cfg.experts
        assert experts is not None
        super().__init__(cfg, experts, columns.mlp, experts.narrow or embed, dtype)
        self.narrowing = Narrowing(cfg, embed, dtype) if experts.narrow else None
        self.router = Router(experts, embed)
        self.shared = SharedMLP(cfg, columns.shared, embed, dtype) if experts.shared else None

    def __call__(self, x: Array) -> Array:
        """x [B, T, D] -> [B, T, D], to be summed over devices (or see `Narrowing`)."""
        if self.narrowing is not None:
            y = self.routed(linear(x, self.narrowing.down[...]), x)
            return y if self.shared is None else jnp.concatenate([y, self.shared(x)], axis=-1)
        y = self.routed(x, x)
        y = y if self.shared is None else y + self.shared(x)
        return y if self.experts.blend == 1.0 else y * jnp.asarray(self.experts.blend, y.dtype)

    def finish(self, total: Array, dtype: jnp.dtype) -> Array:
        """What is added to the residual [B, T, D], of the sum over devices."""
        return total if self.narrowing is None else self.narrowing.finish(total)

    def routed(self, x: Array, route: Array) -> Array:
        """The mixture alone, of x [B, T, D]; the router reads `route` [B, T, D]."""
        return self.mix(x, *self.router(route.reshape(-1, route.shape[-1])))


def feed_forward(
    cfg: LayerConfig, columns: Columns, embed: int, dtype: jnp.dtype
) -> DenseMLP | RoutedMLP:
    """The MLP of a layer's slice: a mixture of experts or a single one."""
    if cfg.experts is None:
        return DenseMLP(cfg, columns.mlp, embed, dtype)
    return RoutedMLP(cfg, columns, embed, dtype)
