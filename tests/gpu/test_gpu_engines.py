"""Both engines on GPUs, with their kernels: the same bytes in every place, and float32's tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.bench.shapes import model_config
from jaxllm.engine import folding
from jaxllm.engine.folding import TOGETHER
from jaxllm.models.config import ModelConfig
from jaxllm.runtime import has_kernels
from support import compilations

pytestmark = pytest.mark.skipif(
    not has_kernels(jax.devices()[0]), reason="no GPU that the attention kernel is for"
)
IDS = np.random.default_rng(0).integers(0, 8192, 700).tolist()
BF16 = 2e-3  # NMSE of logits of bfloat16 against float32


def _config() -> ModelConfig:
    """Two kinds of layers, one with a window."""
    cfg = model_config("small")
    window = replace(cfg.layers[0], window=200)
    return replace(cfg, layers=(cfg.layers[0], window) * 2)


def _llm(**arguments: Any) -> LLM:
    settings: dict[str, Any] = {"ctx": 1024, "page": 128, "ubatch": 256, "group_pages": 4}
    settings["devices"] = 1
    return LLM.from_config(_config(), **(settings | arguments))


PROMPTS = (IDS, IDS[:300], IDS[:90], IDS[:600])


def _run(llm: LLM) -> tuple[np.ndarray, list[tuple[int, ...]], list[Any]]:
    """Logits of a prompt; greedy tokens after prompts of several lengths, and what follows one of
    them alone, with their logprobs."""
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, logprobs=2)
    *together, alone = PROMPTS
    found = llm.generate(together, params) + llm.generate([alone], params)
    logprobs = [completion.logprobs for completion in found]
    return llm.logits(IDS), [completion.token_ids for completion in found], logprobs


def _nmse(found: np.ndarray, want: np.ndarray) -> float:
    return float(np.square(found - want).sum() / np.square(want).sum())


@pytest.fixture(scope="module")
def exact() -> np.ndarray:
    cpu = jax.devices("cpu")[:1]
    return _llm(devices=cpu, dtype="float32").logits(IDS)


@pytest.fixture(scope="module")
def fused() -> tuple[np.ndarray, list[tuple[int, ...]]]:
    return _run(_llm(parallel=3))


def test_bfloat16_is_as_near_to_float32_as_its_rounding(
    exact: np.ndarray, fused: tuple[np.ndarray, list[tuple[int, ...]]]
) -> None:
    assert _nmse(fused[0], exact) < BF16


def test_plain_jnp_is_as_near(exact: np.ndarray) -> None:
    assert _nmse(_llm(impl="jnp").logits(IDS), exact) < BF16


def test_decoded_tokens_are_as_likely_as_float32_says(
    fused: tuple[np.ndarray, list[tuple[int, ...]]],
) -> None:
    """Each is the likeliest, or as near to it as two logits of bfloat16 may be."""
    llm = _llm(devices=jax.devices("cpu")[:1], dtype="float32")
    for prompt, tokens in zip(PROMPTS, fused[1], strict=True):
        logits = llm.logits([*prompt, *tokens])[len(prompt) - 1 : -1]
        chosen = logits[np.arange(len(tokens)), list(tokens)]
        assert (logits.max(axis=1) - chosen < 0.1 * logits.std(axis=1)).all()


def test_float32_is_exact(exact: np.ndarray) -> None:
    assert _nmse(_llm(dtype="float32").logits(IDS), exact) < 1e-9


PLACES: dict[int, list[dict[str, Any]]] = {  # by pages that leave a tail together
    1: [
        {"kv": "device", "engine": "staged"},
        {"kv": "host", "kv_gpu_layers": 2},
        {"kv": "host", "prefetch": 0, "kv_pinned": False},
    ],
    4: [{"kv": "device", "engine": "staged"}, {"kv": "host", "prefetch": 2}],
}


@pytest.mark.parametrize("kind", ["bf16", "q8_0"])
@pytest.mark.parametrize("tail", PLACES)
def test_where_pages_live_changes_no_bit(exact: np.ndarray, kind: str, tail: int) -> None:
    types = {"cache_type_k": kind, "cache_type_v": kind, "parallel": 3, "tail_pages": tail}
    host = _run(_llm(kv="host", prefetch=16, **types))
    for other in PLACES[tail]:
        found = _run(_llm(**types, **other))
        assert found[0].tobytes() == host[0].tobytes(), other
        assert found[1:] == host[1:], other
    assert _nmse(host[0], exact) < BF16


def test_stages_that_run_together_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without windows all layers have groups alike."""
    cfg = model_config("small")
    cfg = replace(cfg, layers=(cfg.layers[0],) * 7)
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, logprobs=2)
    settings: dict[str, Any] = {"page": 128, "ubatch": 256, "group_pages": 4, "tail_pages": 1}
    found = []
    for most in (1, TOGETHER):
        monkeypatch.setattr(folding, "TOGETHER", most)
        for prefetch in (4, 16):
            llm = LLM.from_config(cfg, kv="host", ctx=1024, prefetch=prefetch, **settings)
            made = [llm.generate([IDS[:n]], params)[0] for n in (100, 200, 500)]
            found.append([(c.token_ids, c.logprobs) for c in made])
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("tail", [1, 4])
def test_nothing_is_compiled_after_warming_up(tail: int) -> None:
    llm = _llm(kv="host", tail_pages=tail)
    llm.warmup()
    params = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
    with compilations() as found:
        llm.generate([IDS], params)
        llm.generate([IDS[:150]], params)
    assert len(found) == 0


def test_neighbours_change_no_token() -> None:
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    for arguments in ({}, {"kv": "host"}):
        llm = _llm(parallel=3, prefix_cache=False, **arguments)
        together = llm.generate([IDS, IDS[:300], IDS[:90]], params)
        alone = [llm.generate([ids], params)[0] for ids in (IDS, IDS[:300], IDS[:90])]
        assert [c.token_ids for c in together] == [c.token_ids for c in alone], arguments


@pytest.mark.skipif(jax.device_count() < 2, reason="one GPU")
@pytest.mark.parametrize(
    "arguments",
    [
        {"split_mode": "tensor"},
        {"split_mode": "tensor", "tensor_split": (3, 1), "kv": "host"},
        {"split_mode": "tensor", "tensor_split": (1, 1), "attn_split": (1, 0), "kv": "host"},
        {"split_mode": "layer", "kv": "host"},
    ],
    ids=str,
)
def test_two_gpus(exact: np.ndarray, arguments: dict[str, Any]) -> None:
    assert _nmse(_llm(devices=2, dtype="float32", **arguments).logits(IDS), exact) < 1e-9
    host = _llm(devices=2, parallel=3, **arguments)
    logits, tokens = _run(host)
    assert _nmse(logits, exact) < BF16
    if arguments.get("kv") == "host":
        other = _run(_llm(devices=2, parallel=3, kv_gpu_layers=2, **arguments))
        assert other[0].tobytes() == logits.tobytes()
        assert other[1] == tokens
