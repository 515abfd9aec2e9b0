"""Shapes of well-known models, to measure with random weights where no file is at hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from jaxllm.models.config import ModelConfig


class Shape(NamedTuple):
    """A plain decoder: sizes as their papers and configurations give them."""

    layers: int
    embed: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    tied: bool


SHAPES = {
    "small": Shape(8, 512, 8, 4, 64, 1536, 8192, True),
    "llama-1b": Shape(16, 2048, 32, 8, 64, 8192, 128256, True),
    "llama-8b": Shape(32, 4096, 32, 8, 128, 14336, 128256, False),
    "llama-70b": Shape(80, 8192, 64, 8, 128, 28672, 128256, False),
}


def model_config(name: str, kind: str | None = None) -> ModelConfig:
    """The configuration of a shape, whose matrices are of a type that its name then says."""
    from jaxllm.models.config import LayerConfig, ModelConfig
    from jaxllm.models.parts import Rope

    shape = SHAPES[name]
    layer = LayerConfig(
        kv_heads=shape.kv_heads,
        q_per_kv=shape.heads // shape.kv_heads,
        k_dim=shape.head_dim,
        v_dim=shape.head_dim,
        mlp=shape.mlp,
        rope=Rope(theta=500000.0, dim=shape.head_dim, pairs="neighbours"),
        scale=shape.head_dim**-0.5,
        eps=1e-5,
    )
    return ModelConfig(
        architecture="random",
        embed=shape.embed,
        vocab=shape.vocab,
        layers=(layer,) * shape.layers,
        eps=1e-5,
        tied=shape.tied,
        ctx_train=0,
        name=" ".join(["random", name, *([kind] if kind else [])]),
    )
