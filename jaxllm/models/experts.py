"""A mixture of experts: each token goes through a few gated MLPs that a router picks for it.

Every device routes alike and holds its own columns of every expert, so an expert's output is a
partial like that of a dense MLP.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxllm.models.config import LayerConfig
from jaxllm.models.layers import ACTIVATIONS, Array, linear, param

BLOCK_ROWS = 32  # tokens of one expert that are multiplied at a time in a prefill chunk


class RoutedMLP(nnx.Module):
    """sum over the chosen experts of weight * down(act(gate(x)) * up(x)): a partial.

    The router's softmax is over all experts; the weights of the chosen are scaled to sum to one
    (Jiang et al. 2024, Mixtral).
    """

    def __init__(self, cfg: LayerConfig, columns: int, embed: int, dtype: jnp.dtype):
        self.activation, self.used = cfg.activation, cfg.experts_used
        n = cfg.experts
        router = ("ffn_gate_inp.weight",)
        self.router = param((n, embed), ("expert", "embed"), router, jnp.dtype(jnp.float32))
        self.gate_up = param(
            (n, 2, columns, embed),
            ("expert", "pair", "mlp", "embed"),
            ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
            dtype,
            form="experts_stack",
        )
        self.down = param(
            (n, embed, columns),
            ("expert", "embed", "mlp"),
            ("ffn_down_exps.weight",),
            dtype,
            form="experts_columns",
        )

    def __call__(self, x: Array) -> Array:
        """x [B, T, D] -> [B, T, D], to be summed over devices."""
        rows = x.reshape(-1, x.shape[-1])
        weights, chosen = self.route(rows)
        # A step of one token a row multiplies each alone: its bits depend on no other row.
        block = 1 if x.shape[1] == 1 else min(BLOCK_ROWS, len(rows))
        y = self.run(rows, chosen, block).astype(jnp.float32)
        return (y * weights[..., None]).sum(axis=1).astype(x.dtype).reshape(x.shape)

    def route(self, rows: Array) -> tuple[Array, Array]:
        """rows [M, D] -> float32 weights and ids [M, used] of each row's experts."""
        logits = linear(rows.astype(jnp.float32), self.router[...])
        weights, chosen = lax.top_k(jax.nn.softmax(logits, axis=-1), self.used)
        return weights / weights.sum(axis=-1, keepdims=True), chosen

    def run(self, rows: Array, chosen: Array, block: int) -> Array:
        """rows [M, D] through experts `chosen` [M, used]: [M, used, D].

        Pairs of row and expert are sorted by expert and multiplied in blocks of one expert each.
        A block may reach into the next expert's rows; that expert, coming later, writes them again.
        """
        experts = len(self.router[...])
        order = jnp.argsort(chosen.reshape(-1), stable=True)  # of pairs
        counts = jnp.bincount(chosen.reshape(-1), length=experts)
        ends = jnp.cumsum(counts)
        blocks_end = jnp.cumsum(-(-counts // block))  # blocks up to and with each expert
        padded = jnp.pad(rows[order // self.used], ((0, block), (0, 0)))

        def one(i: Array, out: Array) -> Array:
            expert = jnp.searchsorted(blocks_end, i, side="right")
            left = blocks_end[expert] - i  # blocks of this expert, this one included
            first = ends[expert] - counts[expert]
            first += (-(-counts[expert] // block) - left) * block
            part = lax.dynamic_slice_in_dim(padded, first, block)
            y = self.expert(part, self.gate_up[...][expert], self.down[...][expert])
            return lax.dynamic_update_slice_in_dim(out, y, first, axis=0)

        out = lax.fori_loop(0, blocks_end[-1], one, jnp.zeros_like(padded))
        back = jnp.zeros_like(order).at[order].set(jnp.arange(len(order)))
        return out[back].reshape(*chosen.shape, -1)

    def expert(self, rows: Array, gate_up: Array, down: Array) -> Array:
        """rows [M, D] through one expert: gate_up [2, F, D], down [D, F]."""
        gate, up = jnp.split(linear(rows, gate_up.reshape(-1, gate_up.shape[-1])), 2, axis=-1)
        return linear(ACTIVATIONS[self.activation](gate) * up, down)
