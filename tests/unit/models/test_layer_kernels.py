"""Which layers end in one kernel, and that it stands for what blocks and engines do without one.
Its products are made by jnp here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.engine import forward, fused, fused_step, stages
from jaxllm.models.block import block_def
from jaxllm.models.config import Columns, LayerConfig
from jaxllm.models.decoder import DecoderBlock
from jaxllm.models.layers import normalise
from jaxllm.models.parts import Norms, NormStyle, Rope
from jaxllm.models.products import Products
from jaxllm.models.ptx.attention_sums import Attend
from jaxllm.models.ptx.share import Turned
from jaxllm.models.talkie import TalkieBlock
from support import (
    assert_close,
    layer_config,
    make_llm,
    random_ids,
    run,
    small_model,
    with_layers,
)

EMBED, HEADS, COLUMNS = 64, 4, 96


def attended(step: Attend, values: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """What attention makes, and the rings after it."""
    places, qkv = values[step.places], values[step.qkv]
    starts, first, n = places[:-1], places[-1], len(places) - 1
    each = qkv.reshape(n, step.heads, -1)
    cuts = [step.per_head * step.k_dim, (step.per_head + 1) * step.k_dim]
    q, *own = jnp.split(each, cuts, axis=-1)
    at = jnp.where(starts < 0, step.capacity, starts % step.capacity)
    rows, rings = first + jnp.arange(n), {}
    for name, new in zip((step.k_ring, step.v_ring), own, strict=True):
        rings[name] = values[name].at[rows, :, at].set(new, mode="drop")
    k, v = (ring[rows] for ring in rings.values())
    slots = starts[:, None] - (starts[:, None] - jnp.arange(step.capacity)) % step.capacity
    seen = (slots >= 0) & (starts[:, None] - slots < (step.window or step.capacity))
    q = q.reshape(n, step.heads, step.per_head, step.k_dim)
    scores = jnp.einsum("nkgh,nkph->nkgp", q, k) * step.scale
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -1e30))
    found = jnp.einsum("nkgp,nkph->nkgh", weights, v)
    return rings | {step.found: found.reshape(n, -1)}


def turned(y: jax.Array, turns: Turned, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Queries and keys of heads [N, ...] with each pair turned."""
    shape, axis = ((2, -1), -2) if turns.halves else ((-1, 2), -1)
    each = y.reshape(len(y), -1, turns.per_head + 2, turns.rows)
    each = each.reshape(*each.shape[:3], *shape)
    a, b = (jnp.take(each[:, :, :-1], i, axis) for i in range(2))
    cos, sin = cos[:, None, None], sin[:, None, None]
    pairs = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis)
    return jnp.concatenate([pairs, each[:, :, -1:]], axis=2).reshape(y.shape)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What products that would be a kernel have written, by names of their steps."""
    seen: list[list[str]] = []

    def by_jnp(self: Products) -> dict[str, jax.Array]:
        values = dict(self.arrays)
        for step in self.steps:
            if isinstance(step, Attend):
                values |= attended(step, values)
                continue
            x = values[step.x]
            if step.norm:
                x = normalise(x, "rms", self.eps) * values[step.norm]
            y = x @ values[step.parts[0]].T
            if step.gated:
                gate, linear = jnp.split(y, 2, axis=-1)
                y = jax.nn.silu(gate) * linear
            if step.turned:
                y = turned(y, step.turned, values[step.turned.cos], values[step.turned.sin])
            values[step.found] = y + values[step.added] if step.added else y
        seen.append([step.found for step in self.steps])
        return {name: values[name] for name in (*self.changed, *self.new)}

    monkeypatch.setattr(Products, "made", by_jnp)
    monkeypatch.setattr(Products, "are_a_kernel", lambda self: self.n == 1)
    return seen


def block_of(cfg: LayerConfig, kind: type[DecoderBlock] = DecoderBlock) -> Any:
    """With random values in all its parameters."""
    definition = block_def(kind, cfg, HEADS, Columns(COLUMNS), EMBED, "float32", ())
    random = np.random.default_rng(0)
    leaves = [random.standard_normal(definition.variables[p].shape) / 8 for p in definition.paths]
    return definition.bind(tuple(jnp.asarray(leaf, jnp.float32) for leaf in leaves))


def inputs(tokens: int = 1) -> tuple[jax.Array, jax.Array]:
    """What attention gives, and the residual."""
    random = np.random.default_rng(1)
    shapes = (1, tokens, HEADS, 2, 16), (1, tokens, EMBED)
    o, x = (jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in shapes)
    return o, x


def layer(**changes: Any) -> LayerConfig:
    return layer_config(HEADS, 2, 16, mlp=COLUMNS, kernels=True, **changes)


def by_pieces(block: Any, o: jax.Array, x: jax.Array) -> jax.Array:
    x, read = block.join_attention(x, block.after_attention(o, x))
    begun, _ = block.begin_mlp(read)
    return block.join_mlp(x, block.end_mlp(begun, None))


BEFORE = [{}, {"window": 8}, {"qkv_bias": True}, {"qk_norm": True}, {"sinks": True}]
AFTER: list[dict[str, Any]] = [
    {"kernels": False},
    {"norm": NormStyle("layer", biases=("attn_norm.bias", "ffn_norm.bias"))},
    {"norms": Norms(mlp_post="post_ffw_norm.weight")},
    {"norms": Norms(attn_post="post_attention_norm.weight")},
    {"norms": Norms(mlp=None)},
    {"parallel": True},
    {"residual_scale": 0.5},
    {"read_residual": 2.0},
    {"out_bias": True},
    {"out_factor": 2.0},
    {"out_gate": 1},
    {"sub_norms": True},
    {"activation": "gelu_tanh"},
    {"mlp_gated": False},
    {"mlp_sparsity": 0.5},
    {"mlp_limit": 1.0},
    {"mlp_bias": True},
    {"mlp_scales": True},
]


@pytest.mark.parametrize("changes", BEFORE, ids=str)
def test_a_layer_that_ends_as_llamas_is_one_kernel(changes: dict[str, Any], made: list[list[str]]):
    block, (o, x) = block_of(layer(**changes)), inputs()
    found = block.rest_of_layer(o, x)
    assert made == [["joined", "hidden", "found"]]
    np.testing.assert_allclose(found, by_pieces(block, o, x), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("changes", AFTER, ids=str)
def test_any_other_end_is_made_of_pieces(changes: dict[str, Any], made: list[list[str]]):
    block, (o, x) = block_of(replace(layer(), **changes)), inputs()
    assert block.rest_of_layer(o, x) is None
    assert not made


def test_chunks_and_blocks_of_another_kind_are_made_of_pieces(made: list[list[str]]):
    assert block_of(layer()).rest_of_layer(*inputs(2)) is None
    assert block_of(layer(), TalkieBlock).rest_of_layer(*inputs()) is None
    assert not made


@pytest.mark.parametrize("changes", [{}, {"qkv_bias": True}], ids=str)
def test_a_norm_is_part_of_the_product_after_it(changes: dict[str, Any], made: list[list[str]]):
    _, x = inputs()
    block = block_of(layer(**changes))
    heads = block.project(x)
    assert made == [["found"]]
    right = block.qkv(block.attn_norm(x))
    for own, other in zip(heads, right, strict=True):
        np.testing.assert_allclose(own, other, rtol=2e-5, atol=2e-5)


def clear_programs() -> None:
    stages.layer_of.cache_clear()
    for program in (forward._layer, fused_step.whole_step, fused_step.greedy_step):
        program.clear_cache()


@pytest.fixture
def kernels(made: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """All devices have kernels, but attention is as ever."""
    monkeypatch.setattr("jaxllm.planning.has_kernels", lambda device: True)
    monkeypatch.setattr(forward, "flashes_context", lambda *_: False)
    monkeypatch.setattr(fused, "flashes_context", lambda *_: False)
    monkeypatch.setattr(stages, "flashes", lambda *_: False)
    clear_programs()  # those of layers with other functions
    yield made
    clear_programs()


@pytest.mark.parametrize(
    "arguments, whole",
    [
        ({}, True),
        ({"kv": "host"}, True),
        ({"devices": 2, "split_mode": "layer", "kv": "host"}, True),
        ({"devices": 2, "split_mode": "tensor"}, False),
        ({"devices": 2, "split_mode": "tensor", "kv": "host"}, False),
    ],
    ids=str,
)
def test_engines_use_it_where_one_device_has_all_of_a_layer(
    arguments: dict[str, Any], whole: bool, request: pytest.FixtureRequest
):
    prompt, forced = random_ids(20), random_ids(12, seed=1)
    right = run(make_llm(small_model(), **arguments), prompt, forced)
    made = request.getfixturevalue("kernels")
    found = run(make_llm(small_model(), **arguments), prompt, forced)
    assert_close(found.logits, right.logits)
    assert (["joined", "hidden", "found"] in made) == whole
    assert ["found"] in made


WHOLE = ["qkv", "heads", "joined", "hidden", "found"]


@pytest.mark.parametrize(
    ("changes", "arguments", "steps"),
    [
        ({}, {}, WHOLE),
        ({"rope": Rope(1e4, 16, "halves")}, {}, WHOLE),
        ({"window": 20}, {}, WHOLE),
        ({"rope": Rope(1e4, 8, "neighbours")}, {}, WHOLE[1:]),
        ({"rope": None}, {}, WHOLE[1:]),
        ({"qkv_bias": True}, {}, WHOLE[1:]),
        ({"qk_norm": True}, {}, WHOLE[1:]),
        ({"activation": "gelu"}, {}, ["found"]),
        ({}, {"devices": 2, "split_mode": "tensor"}, ["found"]),
        ({}, {"parallel": 3}, ["found"]),
    ],
    ids=str,
)
def test_attention_of_a_token_is_in_the_kernel(
    changes: dict[str, Any],
    arguments: dict[str, Any],
    steps: list[str],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
):
    cfg, prompt, forced = with_layers(small_model(), **changes), random_ids(20), random_ids(30)
    right = run(make_llm(cfg, **arguments), prompt, forced)
    made = request.getfixturevalue("kernels")
    monkeypatch.setattr(forward, "attends_token", lambda cfg, count, *_: count == 1)
    found = run(make_llm(cfg, **arguments), prompt, forced)
    assert_close(found.logits, right.logits)
    assert steps in made
    assert steps == WHOLE or WHOLE not in made
