"""Inputs of each layer, made with the embedding and carried beside the residual."""

from __future__ import annotations

from math import sqrt

import jax.numpy as jnp
from flax import nnx

from jaxllm.models.config import LayerConfig, ModelConfig
from jaxllm.models.layers import ACTIVATIONS, Array, Norm, linear, matrix
from jaxllm.models.quantised import values


class LayerInputs(nnx.Module):
    """A part of a token's own, from a second table, and a part projected from its embedding and
    normalised layer by layer: their sum over the root of two (Gemma 3n and 4)."""

    def __init__(self, cfg: ModelConfig, rows: int, dtype: jnp.dtype):
        self.cfg, width = cfg, cfg.layer_inputs * len(cfg.layers)
        table, proj = ("/per_layer_token_embd.weight",), ("/per_layer_model_proj.weight",)
        self.table = matrix((rows, width), ("vocab", "embed"), table, dtype)
        self.proj = matrix((width, cfg.embed), ("embed", "embed"), proj, dtype)
        self.norm = Norm(cfg.layer_inputs, cfg.eps, "/per_layer_proj_norm.weight")

    def __call__(self, x: Array, row: Array) -> Array:
        """x [B, T, D] and rows of the table [B, T] -> [B, T, layers * inputs]."""
        cfg = self.cfg
        own = values(self.table[...][row]) * jnp.asarray(sqrt(cfg.layer_inputs), x.dtype)
        made = linear(x, self.proj[...]) * jnp.asarray(1.0 / sqrt(cfg.embed), x.dtype)
        made = self.norm(made.reshape(*x.shape[:-1], -1, cfg.layer_inputs)).reshape(own.shape)
        return (own + made) * jnp.asarray(sqrt(0.5), x.dtype)


class LayerGate(nnx.Module):
    """norm(proj(gelu(gate(x)) * inputs)): what a layer adds from its own inputs."""

    def __init__(self, cfg: LayerConfig, inputs: int, embed: int, dtype: jnp.dtype):
        axes = ("embed", "embed")
        self.gate = matrix((inputs, embed), axes, ("inp_gate.weight",), dtype)
        self.proj = matrix((embed, inputs), axes, ("proj.weight",), dtype)
        self.norm = Norm(embed, cfg.eps, "post_norm.weight")

    def __call__(self, x: Array, inputs: Array) -> Array:
        """x [B, T, D] and inputs [B, T, P] -> [B, T, D]."""
        gated = ACTIVATIONS["gelu"](linear(x, self.gate[...])) * inputs
        return self.norm(linear(gated, self.proj[...]))
