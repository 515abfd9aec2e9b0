"""Routers and mixtures of experts against plain numpy, token by token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.errors import ModelError
from jaxllm.gguf.metadata import Metadata
from jaxllm.models.config import Columns
from jaxllm.models.experts import RoutedMLP, Router
from jaxllm.models.parts import Experts
from jaxllm.models.routing import Routing, read_experts
from jaxllm.models.sources import TensorSource
from jaxllm.models.weights import Slot
from support import layer_config, small_model

EMBED, COLUMNS, TOKENS = 16, 8, 11
F32 = jnp.dtype(jnp.float32)
SIX = Experts(6, 2)
BIASED = replace(SIX, choice_bias="exp_probs_b.bias", scores="sigmoid")


def _draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _softmax(x: np.ndarray) -> np.ndarray:
    p = np.exp(x - x.max())
    return p / p.sum()


def _router(experts: Experts, bias: np.ndarray | None = None) -> Router:
    router = Router(experts, EMBED)
    router.weight[...] = jnp.asarray(_draw(experts.count, EMBED, seed=1))
    for own in (router.bias, router.choice_bias):
        if own is not None:
            assert bias is not None
            own[...] = jnp.asarray(bias)
    return router


@pytest.mark.parametrize(
    "experts",
    [
        SIX,
        replace(SIX, normalised=False, scale=2.5),
        replace(SIX, scores="sigmoid"),
        replace(SIX, scores="chosen", normalised=False, router_bias=True),
        BIASED,
        replace(SIX, scores="sigmoid", groups=3, groups_used=2, used=3),
        replace(BIASED, groups=3, groups_used=1, normalised=False),
        replace(SIX, groups=6, groups_used=3),  # groups of one expert
    ],
)
def test_routers(experts: Experts):
    bias = np.asarray([0, 3, 0, -3, 1, 0], np.float32)
    x, router = _draw(TOKENS, EMBED), _router(experts, bias)
    weights, chosen = (np.asarray(a) for a in router(jnp.asarray(x)))
    for token in range(TOKENS):
        logits = x[token] @ _draw(experts.count, EMBED, seed=1).T
        logits = logits + bias if experts.router_bias else logits
        scores = {"softmax": _softmax(logits), "sigmoid": 1 / (1 + np.exp(-logits))}
        p = scores.get(experts.scores, logits)
        wanted = p + bias if experts.choice_bias else p
        groups = wanted.reshape(experts.groups, -1)
        best = np.argsort(-np.sort(groups)[:, -2:].sum(-1))[: experts.groups_used]
        outside = ~np.repeat(np.isin(np.arange(experts.groups), best), groups.shape[1])
        expected = np.argsort(-np.where(outside, -np.inf, wanted))[: experts.used]
        np.testing.assert_array_equal(chosen[token], expected)
        w = p[expected] if experts.scores != "chosen" else _softmax(logits[expected])
        w = w / w.sum() if experts.normalised else w
        np.testing.assert_allclose(weights[token], w * experts.scale, rtol=1e-5)


def test_scores_that_all_vanish_are_not_divided_by():
    router = _router(replace(SIX, scores="sigmoid"))
    router.weight[...] = jnp.full((6, EMBED), -10.0)
    weights, _ = router(jnp.ones((1, EMBED)))
    assert np.asarray(weights).max() < 1e-20


@pytest.mark.parametrize("tokens", [1, TOKENS])
@pytest.mark.parametrize(
    "experts",
    [
        SIX,
        replace(SIX, biases=True),
        replace(SIX, down_scale=True, biases=True),
        replace(SIX, scores="sigmoid", normalised=False, weigh_input=True),
    ],
)
def test_experts(experts: Experts, tokens: int):
    cfg = layer_config(1, 1, 16, mlp=COLUMNS, experts=experts, activation="silu")
    mixture = RoutedMLP(cfg, Columns(COLUMNS), EMBED, F32)
    n, values = experts.count, {}
    for name in ("gate_up", "down", "gate_up_bias", "down_bias", "down_scale"):
        own = getattr(mixture, name)
        if own is not None:
            values[name] = _draw(*own.shape, seed=len(name))
            own[...] = jnp.asarray(values[name])
    mixture.router.weight[...] = jnp.asarray(_draw(n, EMBED, seed=1))
    x = _draw(1, tokens, EMBED)
    found = np.asarray(mixture(jnp.asarray(x)))
    weights, chosen = (np.asarray(a) for a in mixture.router(jnp.asarray(x[0])))
    expected = np.zeros((tokens, EMBED))
    for token, row in enumerate(x[0]):
        for weight, e in zip(weights[token], chosen[token], strict=True):
            row_in = row * weight if experts.weigh_input else row
            gate, up = values["gate_up"][e] @ row_in
            if experts.biases:
                gate, up = values["gate_up_bias"][e] + [gate, up]
            y = values["down"][e] @ (gate / (1 + np.exp(-gate)) * up)
            y = y * values["down_scale"][e] if experts.down_scale else y
            y = y + values["down_bias"][e] if experts.biases else y
            expected[token] += y if experts.weigh_input else y * weight
    np.testing.assert_allclose(found[0], expected, rtol=2e-4, atol=1e-4)


def test_experts_without_gates_in_fewer_channels():
    """On two devices: what leads back to the model's width, norm and all, follows their sum."""
    narrow, shared = 12, 6
    experts = replace(SIX, narrow=narrow, narrow_name="ffn_latent", narrow_norm=True, shared=shared)
    cfg = layer_config(
        1, 1, 16, mlp=COLUMNS, experts=experts, mlp_gated=False, activation="relu2", eps=1e-5
    )
    x, total = _draw(1, TOKENS, EMBED), jnp.zeros(())
    up, down = _draw(6, COLUMNS, narrow, seed=2), _draw(6, narrow, COLUMNS, seed=3)
    beside = _draw(shared, EMBED, seed=4), _draw(EMBED, shared, seed=5)
    lead, back = _draw(narrow, EMBED, seed=6), _draw(EMBED, narrow, seed=7)
    for own, part in ((slice(0, 5), slice(0, 4)), (slice(5, 8), slice(4, 6))):
        columns = Columns(own.stop - own.start, part.stop - part.start)
        mixture = RoutedMLP(cfg, columns, EMBED, F32)
        mixture.router.weight[...] = jnp.asarray(_draw(6, EMBED, seed=1))
        mixture.gate_up[...] = jnp.asarray(up[:, None, own])
        mixture.down[...] = jnp.asarray(down[..., own])
        assert mixture.shared is not None and mixture.narrowing is not None
        mixture.shared.dense.up[...] = jnp.asarray(beside[0][part])
        mixture.shared.dense.down[...] = jnp.asarray(beside[1][:, part])
        mixture.narrowing.down[...], mixture.narrowing.up[...] = map(jnp.asarray, (lead, back))
        assert mixture.narrowing.norm is not None and mixture.narrowing.norm.weight is not None
        mixture.narrowing.norm.weight[...] = jnp.full(narrow, 1.5)
        total = total + mixture(jnp.asarray(x))
    found = np.asarray(mixture.finish(total, F32))
    weights, chosen = (np.asarray(a) for a in mixture.router(jnp.asarray(x[0])))
    for token, row in enumerate(x[0]):
        y = np.zeros(narrow)
        for weight, e in zip(weights[token], chosen[token], strict=True):
            y += weight * down[e] @ np.maximum(up[e] @ lead @ row, 0.0) ** 2
        y = back @ (1.5 * y / np.sqrt(np.mean(y * y) + 1e-5))
        y += beside[1] @ np.maximum(beside[0] @ row, 0.0) ** 2
        np.testing.assert_allclose(found[0, token], y, rtol=2e-4, atol=1e-3)


class _Arrays(TensorSource):
    """Tensors given as arrays."""

    def __init__(self, arrays: dict[str, np.ndarray]):
        super().__init__(small_model())
        self.arrays = arrays

    def copy(
        self, name: str, shape: tuple[int, ...], rows: slice, columns: slice, out: np.ndarray
    ) -> None:
        tensor = self.arrays[name]
        assert tensor.shape == shape
        out[...] = tensor.reshape(-1, shape[-1])[rows, columns].reshape(out.shape)


@pytest.mark.parametrize("dims", [(EMBED,), ()])
def test_joined_gate_and_up_are_what_two_tensors_are(dims: tuple[int, ...]):
    """Weights, and biases; columns 2 to 5 of them."""
    joined = _draw(3, 2 * COLUMNS, *dims)
    apart = joined.reshape(3, 2, COLUMNS, *dims)
    source = _Arrays({"both": joined, "gate": apart[:, 0], "up": apart[:, 1]})
    shape, axes = (3, 2, COLUMNS, *dims), ("expert", "pair", "mlp", "embed")[: 3 + len(dims)]
    own = slice(2, 5)
    index = (slice(0, 3), slice(0, 2), own, *(slice(0, n) for n in dims))
    for names in (("both",), ("gate", "up")):
        slot = Slot("ffn.gate_up", 0, shape, axes, names, "experts_stack", F32, False, None, ())
        out = np.zeros((3, 2, 3, *dims), np.float32)
        source.fill(slot, index, out)
        np.testing.assert_array_equal(out, apart[:, :, own])


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"expert_used_count": 9}, "expert_used_count is 9"),
        ({"expert_gating_func": 4}, "expert_gating_func is 4"),
        ({"expert_group_count": 3}, "8 experts in 3 groups"),
        ({"expert_group_count": 4, "expert_group_used_count": 1, "expert_used_count": 3}, "give 3"),
        ({}, "ffn_down_exps.weight is missing"),
    ],
)
def test_metadata_that_routes_nowhere(metadata: dict[str, Any], message: str):
    values = {"expert_count": 8, "expert_used_count": 2} | metadata
    meta = Metadata({f"moe.{key}": value for key, value in values.items()}, "moe")
    tensors: Any = {"blk.0.ffn_gate_inp.weight": None}
    with pytest.raises(ModelError, match=message):
        read_experts(meta, tensors, 0, Routing(scores_key=True))
    assert read_experts(meta, tensors, 1, Routing()) == {}
    with pytest.raises(ModelError, match="not supported"):
        read_experts(meta, tensors, 0, None)
