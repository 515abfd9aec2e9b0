"""Samplers against plain loops, the reduced logits against all of them, and bad settings."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxllm import LLM, OptionError, SamplingParams
from jaxllm.engine.base import merge_top
from jaxllm.engine.local import Top, head_logits
from jaxllm.engine.sampling import Sampler, common_top
from support import make_llm, random_ids, small_model

VOCAB = 130
PLAIN = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
SETTINGS = {
    "plain": dict(PLAIN),
    "greedy": dict(temperature=0),
    "defaults": {},
    "top_k": dict(PLAIN, top_k=7),
    "top_p": dict(PLAIN, top_p=0.6),
    "min_p": dict(PLAIN, min_p=0.2),
    "cold": dict(PLAIN, temperature=0.3),
    "hot": dict(PLAIN, temperature=3.0),
    "all": dict(temperature=1.7, top_k=20, top_p=0.8, min_p=0.1),
    "repeat": dict(PLAIN, repeat_penalty=1.5),
    "presence": dict(PLAIN, presence_penalty=2.0),
    "frequency": dict(PLAIN, frequency_penalty=0.7, repeat_last_n=-1),
    "penalties": dict(
        repeat_penalty=1.3, presence_penalty=0.5, frequency_penalty=-0.4, repeat_last_n=5, top_k=9
    ),
    "penalties of none": dict(PLAIN, repeat_penalty=1.5, presence_penalty=2, repeat_last_n=0),
    "greedy with penalties": dict(temperature=0, repeat_penalty=3.0, frequency_penalty=1.0),
}


class Always:
    """A generator that draws one number for ever."""

    def __init__(self, value: float):
        self.value = value

    def random(self) -> float:
        return self.value


def weights(values: dict[int, float]) -> dict[int, float]:
    """Softmax."""
    largest = max(values.values())
    raised = {i: math.exp(v - largest) for i, v in values.items()}
    total = sum(raised.values())
    return {i: w / total for i, w in raised.items()}


def naive(logits: np.ndarray, history: list[int], p: SamplingParams) -> dict[int, float]:
    """The probability of every token that may be drawn, from the most likely on."""
    values = dict(enumerate(logits.tolist()))
    recent = history if p.repeat_last_n == -1 else history[max(0, len(history) - p.repeat_last_n) :]
    for token in set(recent):
        divide = values[token] > 0
        values[token] *= 1 / p.repeat_penalty if divide else p.repeat_penalty
        values[token] -= recent.count(token) * p.frequency_penalty + p.presence_penalty
    values = {i: values[i] for i in sorted(values, key=lambda i: (-values[i], i))}
    if p.temperature == 0:
        return {next(iter(values)): 1.0}
    if p.top_k > 0:
        values = {i: values[i] for i in list(values)[: p.top_k]}
    kept, mass = {}, 0.0
    for i, weight in weights(values).items():
        kept[i] = values[i]
        mass += weight
        if p.top_p < 1 and mass >= p.top_p:
            break
    likely = weights(kept)
    floor = p.min_p * max(likely.values())
    kept = {i: v / p.temperature for i, v in kept.items() if likely[i] >= floor}
    return weights(kept)


def random_logits(seed: int, scale: float = 2.0) -> np.ndarray:
    values = np.random.default_rng(seed).normal(0, scale, (1, VOCAB))
    return values.astype(np.float32)


def reduced(logits: np.ndarray, top: int) -> Top:
    """What the devices make of logits [1, V]."""
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :top]
    lse = np.log(np.sum(np.exp(logits.astype(np.float64)), axis=1)).astype(np.float32)
    return Top(np.take_along_axis(logits, ids, axis=1), ids, lse)


@pytest.mark.parametrize("name", SETTINGS)
@settings(deadline=None)
@given(seed=st.integers(0, 10**6), drawn=st.floats(0, 1, exclude_max=True))
def test_a_draw_is_the_naive_one(name: str, seed: int, drawn: float):
    """The token at `drawn` of the cumulated probabilities."""
    params = SamplingParams(**SETTINGS[name])
    logits, history = random_logits(seed), random_ids(12, 20, seed=seed)
    expected = naive(logits[0], history, params)
    edges = np.cumsum(list(expected.values()))
    assume(np.abs(edges - drawn).min() > 1e-9)
    sampler = Sampler(params, history)
    sampler.random = Always(drawn)  # type: ignore[assignment]
    token, logprob = sampler.next(logits, 0)
    assert token == list(expected)[int(np.sum(edges < drawn))]
    assert logprob is None
    assert sampler.history == [*history, token]


@pytest.mark.parametrize("name", SETTINGS)
def test_frequencies_are_the_probabilities(name: str):
    params = SamplingParams(seed=5, **SETTINGS[name])
    logits, history, count = random_logits(3), random_ids(12, 20), 4000
    sampler = Sampler(params, history)
    found = np.zeros(VOCAB)
    for _ in range(count):
        found[sampler.next(logits, 0)[0]] += 1
        sampler.history[:] = history
    expected = np.zeros(VOCAB)
    for token, weight in naive(logits[0], history, params).items():
        expected[token] = weight * count
    assert not found[expected == 0].any()
    common = expected >= 5
    tests = int(common.sum())
    squares = np.sum((found - expected)[common] ** 2 / expected[common])
    assert squares <= tests + 4 * math.sqrt(2 * tests)


def test_a_growing_history_is_penalised():
    """Drawn tokens count, and those that leave the last n no longer do."""
    logits = np.asarray([[3.0, 2.5, 2.0, -9.0]], np.float32)
    sampler = Sampler(
        SamplingParams(temperature=0, presence_penalty=5.0, repeat_last_n=2), prompt=[3]
    )
    assert [sampler.next(logits, 0)[0] for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("row", [0, 1, 2])
def test_the_row_asked_for(row: int):
    logits = np.eye(3, 8, dtype=np.float32) * 50
    sampler = Sampler(SamplingParams(seed=0), [0])
    assert sampler.next(logits, row)[0] == row
    assert sampler.next(reduced(logits, 5), row)[0] == row


@pytest.mark.parametrize("temperature", [5e-324, 1e-3, 1e-30])
def test_a_cold_draw_is_greedy(temperature: float):
    logits = random_logits(1)
    sampler = Sampler(SamplingParams(temperature=temperature, seed=1, top_k=0), [0])
    assert {sampler.next(logits, 0)[0] for _ in range(50)} == {int(logits.argmax())}


def test_top_p_of_zero_and_min_p_of_one_keep_the_most_likely():
    logits = random_logits(2)
    for cut in (dict(top_p=0.0), dict(min_p=1.0), dict(top_k=1)):
        sampler = Sampler(SamplingParams(**{**PLAIN, "temperature": 9.0, **cut}, seed=1), [0])
        assert {sampler.next(logits, 0)[0] for _ in range(50)} == {int(logits.argmax())}


def test_seeds():
    """The same seed the same tokens, another seed or none others."""

    def drawn(seed: int | None) -> list[int]:
        sampler = Sampler(SamplingParams(seed=seed, **PLAIN), [0])
        return [sampler.next(random_logits(i), 0)[0] for i in range(40)]

    assert drawn(7) == drawn(7)
    assert drawn(0) == drawn(0)
    assert drawn(7) != drawn(8)
    assert drawn(None) != drawn(None)


# The reduced logits


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("logprobs", [None, 0, 3, 64])
def test_reduced_logits_draw_the_same(name: str, logprobs: int | None):
    params = SamplingParams(seed=11, logprobs=logprobs, **SETTINGS[name])
    if params.top == 0:
        assert params.penalised or params.top_k == 0
        return
    whole, few = Sampler(params, [1, 2]), Sampler(params, [1, 2])
    for seed in range(60):
        logits = random_logits(seed)
        token, expected = whole.next(logits, 0)
        again, found = few.next(reduced(logits, params.top), 0)
        assert token == again
        if expected is None or found is None:
            assert logprobs is None and expected is found
            continue
        assert [i for i, _ in found.top] == [i for i, _ in expected.top]
        np.testing.assert_allclose(found.logprob, expected.logprob, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "top"),
    [
        (dict(temperature=0), 1),
        (dict(temperature=0, logprobs=0), 64),
        (dict(top_k=1), 1),
        (dict(top_k=40), 64),
        (dict(top_k=64), 64),
        (dict(top_k=65), 0),
        (dict(top_k=0), 0),
        (dict(temperature=0, repeat_penalty=1.1), 0),
        (dict(temperature=0, repeat_penalty=1.1, repeat_last_n=0), 1),
    ],
)
def test_how_many_of_the_largest_logits_are_enough(changes: dict[str, Any], top: int):
    assert SamplingParams(**changes).top == top


def test_one_reduction_for_a_batch():
    greedy, some, all_of_them = (SamplingParams(top_k=k) for k in (1, 40, 0))
    assert common_top([greedy, greedy]) == 1
    assert common_top([greedy, some]) == 64
    assert common_top([greedy, all_of_them, some]) == 0


@pytest.mark.parametrize("top", [0, 1, 4, 64])
def test_ties_go_to_the_lower_id(top: int):
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, [90, 17, 55]] = 2.0
    given = reduced(logits, top) if top else logits
    assert Sampler(SamplingParams(temperature=0), [0]).next(given, 0)[0] == 17
    if top != 1:
        sampler = Sampler(SamplingParams(**{**PLAIN, "top_k": 2}, seed=3), [0])
        assert {sampler.next(given, 0)[0] for _ in range(60)} == {17, 55}


class Identity:
    """Ends whose logits are the hidden states."""

    def logits(self, x: Any, vocab: Any) -> Any:
        return x


@pytest.mark.parametrize("top", [1, 5, 64])
@pytest.mark.parametrize("cuts", [(0, 130), (0, 50, 130), (0, 1, 64, 130), (0, 43, 43, 130)])
def test_devices_find_the_largest(top: int, cuts: tuple[int, ...]):
    """Slices padded to the largest one, with many ties, give what sorting all of them gives."""
    logits = np.random.default_rng(4).integers(0, 9, (3, VOCAB)).astype(np.float32)
    largest = max(b - a for a, b in zip(cuts, cuts[1:], strict=False))
    parts = []
    for start, stop in zip(cuts, cuts[1:], strict=False):
        if start < stop:
            own = np.full((3, 1, largest), 99, np.float32)
            own[:, 0, : stop - start] = logits[:, start:stop]
            vocab = jnp.asarray([start, stop - start], jnp.int32)
            at = jnp.zeros((3, 1), jnp.int32)
            part = head_logits(Identity(), jnp.asarray(own), at, vocab, top)  # type: ignore
            parts.append(Top(*(None if p is None else np.asarray(p) for p in part)))
    found, expected = merge_top(parts, top), reduced(logits, top)
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_array_equal(found.values, expected.values)
    if top > 1:
        np.testing.assert_allclose(found.lse, expected.lse, rtol=1e-6)


# Whole models

MESHES = {
    "fused": {},
    "fused-3": dict(devices=3, split_mode="tensor", tensor_split="2,1,1", engine="fused"),
    "staged-3": dict(devices=3, split_mode="tensor", attn_split="2,1,0", kv="host"),
}


@cache
def _llm(mesh: str, vocab: int = VOCAB) -> LLM:
    return make_llm(small_model(vocab=vocab), **MESHES[mesh])


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("changes", [dict(temperature=0), dict(seed=3, temperature=2.0)])
def test_a_model_draws_the_same_from_reduced_logits(
    mesh: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    params = SamplingParams(max_tokens=20, **changes)
    found = _llm(mesh).generate([random_ids(20)], params)[0].token_ids
    monkeypatch.setattr(SamplingParams, "top", property(lambda self: 0))
    assert found == _llm(mesh).generate([random_ids(20)], params)[0].token_ids


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ["greedy", "defaults", "plain", "penalties"])
def test_logprobs_are_those_of_the_model(mesh: str, name: str):
    """Of all tokens, before any sampler."""
    llm, prompt = _llm(mesh), random_ids(20)
    params = SamplingParams(max_tokens=12, logprobs=5, seed=2, **SETTINGS[name])
    (done,) = llm.generate([prompt], params)
    logits = llm.logits([*prompt, *done.token_ids])[len(prompt) - 1 : -1].astype(np.float64)
    expected = logits - np.log(np.sum(np.exp(logits), axis=1, keepdims=True))
    assert done.logprobs is not None and len(done.logprobs) == 12
    for token, found, row in zip(done.token_ids, done.logprobs, expected, strict=True):
        assert found.token_id == token
        np.testing.assert_allclose(found.logprob, row[token], atol=1e-4)
        assert [i for i, _ in found.top] == np.argsort(-row, kind="stable")[:5].tolist()
        np.testing.assert_allclose([v for _, v in found.top], np.sort(row)[:-6:-1], atol=1e-4)


@pytest.mark.parametrize("mesh", MESHES)
def test_rows_after_the_last_token_are_never_drawn(mesh: str):
    """As of the vocabulary of MiniMax-01, whose last rows only fill it."""
    llm, prompt = make_llm(small_model(drawn=70), **MESHES[mesh]), random_ids(9, 70)
    logits = llm.logits(prompt)
    np.testing.assert_array_equal(logits[:, 70:], -np.inf)
    np.testing.assert_array_equal(logits[:, :70], _llm(mesh).logits(prompt)[:, :70])
    params = SamplingParams(max_tokens=60, temperature=50.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)
    assert max(llm.generate([prompt], params)[0].token_ids) < 70


@pytest.mark.parametrize("mesh", MESHES)
def test_a_vocabulary_smaller_than_the_reduction(mesh: str):
    """Every logprob asked for is of a token that exists."""
    params = SamplingParams(max_tokens=6, temperature=0, logprobs=64)
    (done,) = _llm(mesh, 41).generate([random_ids(9, 41)], params)
    assert done.logprobs is not None
    for found in done.logprobs:
        assert sorted(i for i, _ in found.top) == list(range(41))
        assert math.isclose(sum(math.exp(v) for _, v in found.top), 1, rel_tol=1e-4)


# Settings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("top_k", -1),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repeat_penalty", 0.0),
        ("repeat_penalty", -1.0),
        ("repeat_penalty", math.inf),
        ("repeat_last_n", -2),
        ("presence_penalty", math.nan),
        ("frequency_penalty", -math.inf),
        ("seed", -1),
        ("logprobs", -1),
        ("logprobs", 65),
        ("stop", ("a", "")),
        ("stop", ""),
    ],
)
def test_a_bad_setting_is_named(name: str, value: Any):
    with pytest.raises(OptionError, match=name):
        SamplingParams(**{name: value})


def test_settings_are_values():
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]) == SamplingParams(stop=("a", "b"))  # type: ignore
    assert hash(SamplingParams()) == hash(SamplingParams())
