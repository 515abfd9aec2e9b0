"""Real models against the float32 logits of transformers and against llama.cpp."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.engine.prefill import prefill

CASES = ("eng64", "code64", "long1500_last64")
PROMPTS = ("raw_capital", "raw_code", "chat_sky", "raw_multi", "long600", "long1500")
MODELS = [
    pytest.param(name, marks=[pytest.mark.slow, pytest.mark.xdist_group(name)])
    for name in ("smollm2-135m", "gemma3-270m")
]


@cache
def _load(path: Path) -> LLM:
    return LLM.from_gguf(path, devices=1, dtype="float32", ctx=2048, progress=False)


@pytest.fixture
def llm(name: str, request: pytest.FixtureRequest) -> LLM:
    """The model under test; one is loaded at a time."""
    fixture = {"smollm2-135m": "smollm2_path", "gemma3-270m": "gemma3_path"}[name]
    return _load(request.getfixturevalue(fixture))


def divergence(top_ids: np.ndarray, top: np.ndarray, lse: np.ndarray, found: np.ndarray) -> float:
    """Mean KL of a reference, given by its largest logits and the log-sum-exp of all, from logits
    [T, V]. What is not among the largest is one more outcome: without it a rounding of the
    log-sum-exp would show at first order."""
    found = found.astype(np.float64)
    log_p = top.astype(np.float64) - lse[:, None]
    log_q = np.take_along_axis(found, top_ids, 1) - np.logaddexp.reduce(found, 1)[:, None]
    p, q = np.exp(log_p), np.exp(log_q)
    p_rest, q_rest = 1 - p.sum(1), 1 - q.sum(1)
    rest = np.where((p_rest > 1e-12) & (q_rest > 1e-12), p_rest * np.log(p_rest / q_rest), 0.0)
    return float(np.mean((p * (log_p - log_q)).sum(1) + rest))


@pytest.mark.slow
@pytest.mark.xdist_group("smollm2-135m")
def test_quantised_weights_choose_the_same_tokens(smollm2_path: Path):
    """A file of Q4_1 and Q8_0, with rows of 576 values that no 256 divide."""
    found = []
    for weights in ("dequantised", "quantised"):
        llm = LLM.from_gguf(
            smollm2_path, devices=1, dtype="float32", ctx=2048, progress=False, weights=weights
        )
        (done,) = llm.generate(["The capital of France is"], SamplingParams(16, temperature=0))
        found.append(done.token_ids)
    held = sum(array.nbytes for array in llm.engine.weights())
    assert found[0] == found[1]
    assert held < 1.01 * smollm2_path.stat().st_size
    assert not any("dequantised" in note for note in llm.plan.notes)


@cache
def _last_logits(llm: LLM, ids: tuple[int, ...], count: int) -> np.ndarray:
    """Logits [count, V] after the last tokens; those of 1500 tokens would take gigabytes."""
    found, at = [], 0
    for hidden, used, _ in prefill(llm.engine, 0, ids, llm.plan.options.ubatch):
        places = np.arange(max(0, len(ids) - count - at), used)
        if len(places):
            found.append(llm.engine.logits(hidden, places[None], 0))
        at += used
    llm.engine.release(0)
    return np.concatenate(found)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("case", CASES)
def test_logits_of_transformers(name: str, case: str, llm: LLM, shared: Path):
    with np.load(shared / "refs" / f"{name}.hf.npz") as file:
        ids, top_ids = file[f"{case}/ids"], file[f"{case}/top_ids"]
        top, lse = file[f"{case}/top_logits"], file[f"{case}/lse"]
    found = _last_logits(llm, tuple(ids.tolist()), len(lse))
    assert np.abs(np.take_along_axis(found, top_ids, 1) - top).max() <= 1e-3
    assert abs(divergence(top_ids, top, lse, found)) <= 1e-8
    np.testing.assert_array_equal(found.argmax(1), top_ids[:, 0])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("case", CASES)
def test_logits_of_llama_cpp(name: str, case: str, llm: LLM, shared: Path):
    """llama.cpp rounds activations to eight bits, so this is a looser check of the same file."""
    with np.load(shared / "refs" / f"{name}.llama.npz") as file:
        ids = file[f"{case}/ids"]
        top_ids, top, lse = (
            file[f"{case}/f32_fa0/{kind}"] for kind in ("top_ids", "top_logits", "lse")
        )
    found = _last_logits(llm, tuple(ids.tolist()), len(lse))
    assert divergence(top_ids, top, lse, found) <= 0.02


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_tokens_of_transformers(name: str, prompt: str, llm: LLM, shared: Path):
    facts = json.loads((shared / "refs" / f"{name}.json").read_text())
    reference = facts["hf"]["generation"][prompt]
    margins = np.asarray(reference["margins"])
    clear = int(np.argmax(margins < 1e-3)) if (margins < 1e-3).any() else len(margins)
    ids, end = reference["ids"], set(facts["meta"]["eog_ids"])
    params = SamplingParams(max_tokens=len(ids), temperature=0)
    [completion] = llm.generate([facts["prompts"][prompt]["ids"]], params)
    expected = [token for token in ids[:clear] if token not in end]
    assert list(completion.token_ids[: len(expected)]) == expected
    if clear == len(ids):
        ended = any(token in end for token in ids)
        assert completion.finish_reason == ("stop" if ended else "length")


def test_divergence_of_equal_logits_is_zero():
    logits = np.random.default_rng(0).standard_normal((4, 100))
    ids = np.argsort(-logits, 1)[:, :64]
    top, lse = np.take_along_axis(logits, ids, 1), np.logaddexp.reduce(logits, 1)
    assert abs(divergence(ids, top, lse, logits)) < 1e-12
    assert divergence(ids, top, lse, logits + np.arange(100) / 100) > 1e-2
