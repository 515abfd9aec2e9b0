"""Programs are compiled ahead by a warm-up, once, and for every model of the same plan."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.testing import random_llm, small_config
from support import compilations, random_ids

SPLIT = dict(devices=3, split_mode="tensor", attn_split="2,1,0", parallel=2)
KINDS: dict[str, dict[str, Any]] = {
    "fused": dict(devices=1),
    "fused on two": dict(devices=2, split_mode="tensor", engine="fused"),
    "host": dict(devices=1, kv="host"),
    "uneven, host": dict(SPLIT, kv="host"),
    "uneven, device": dict(SPLIT, kv="device"),
    "layers on two": dict(devices=2, split_mode="layer", parallel=2),
}
CONFIG = small_config(k_dim=16, embed=32, mlp=48)


def make(kind: str, **changes: Any) -> LLM:
    defaults = dict(ctx=1024, page=32, ubatch=64)
    return random_llm(CONFIG, **(defaults | KINDS[kind] | changes))


def use(llm: LLM, *budgets: int) -> None:
    """Prompts of several chunk sizes; rows that end at different times, drawn in several ways."""
    prompts = [random_ids(n, 128, seed=n) for n in (150, 3, 85)]
    for budget in budgets:
        llm.generate(prompts, SamplingParams(max_tokens=budget, temperature=0))
    llm.generate(prompts[1:], SamplingParams(max_tokens=40, seed=1))
    llm.generate([prompts[0]], SamplingParams(max_tokens=4, seed=1, repeat_penalty=1.1))
    llm.generate([prompts[0]], SamplingParams(max_tokens=4, seed=1, logprobs=3))
    llm.logits(prompts[0])


def test_a_compilation_is_heard():
    with compilations() as found:
        jax.jit(lambda x: x * 3 + 1)(2.0)
    assert found


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "uneven, device"])  # as host
def test_nothing_is_compiled_after_a_warm_up(kind: str):
    """Over 600 tokens, through pages, groups of pages and chunks of every size."""
    llm = make(kind)
    llm.warmup()
    with compilations() as found:
        use(llm, 600, 70)
    assert len(found) == 0


def test_pages_of_a_chunk_that_are_taken_apart_compile_nothing():
    """A chunk fills several, and a window has left a smaller group before them."""
    cfg = small_config(k_dim=16, embed=32, mlp=48, window=200)
    llm = random_llm(cfg, kv="host", ctx=1024, page=16, ubatch=256, group_pages=16)
    llm.warmup()
    with compilations() as found:
        llm.generate([[1] * 700], SamplingParams(max_tokens=1, temperature=0))
    assert len(found) == 0


def test_joins_of_pages_that_a_chunk_fills_together_compile_nothing():
    """A chunk fills a whole group, but decoding fills its pages one by one."""
    cfg = small_config(k_dim=24, embed=32, mlp=48)
    arguments: dict[str, Any] = dict(ctx=256, page=16, ubatch=128, group_pages=4)
    llm = random_llm(cfg, engine="staged", **arguments)
    llm.warmup()
    with compilations() as found:
        llm.generate([[1] * 3], SamplingParams(max_tokens=70, temperature=0))
    assert len(found) == 0


@pytest.mark.parametrize("together", [1, 4, 8, 64])
def test_a_warm_up_holds_no_more_than_a_context(together: int, monkeypatch: pytest.MonkeyPatch):
    """Also where tails keep all of it."""
    llm = make("host", ctx=128, tail_pages=together)
    [store], page = llm.engine.stores, llm.plan.page_bytes(0, 0)
    most, add = 0, store.add

    def held(*given: Any) -> None:
        nonlocal most
        add(*given)
        most = max(most, sum(store.held_bytes().values()))

    monkeypatch.setattr(store, "add", held)
    llm.warmup()
    assert 0 < most <= len(llm.plan.layers) * 128 // 32 * page


@pytest.mark.parametrize("kind", ["fused", "uneven, host"])
def test_windows_and_smaller_groups(kind: str):
    """Pages that leave a window cut their group."""
    cfg = small_config(k_dim=16, embed=32, mlp=48, window=100)
    llm = random_llm(cfg, ctx=1024, page=32, ubatch=64, group_pages=4, **KINDS[kind])
    llm.warmup()
    with compilations() as found:
        use(llm, 400)
    assert len(found) == 0


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "host"])  # as "uneven, host"
def test_an_equal_model_compiles_nothing(kind: str):
    use(make(kind, ctx=256), 50)
    with compilations() as found:
        use(make(kind, ctx=256), 50)
    assert len(found) == 0


def test_quantised_caches_compile_no_more():
    """Neither a second model of one shape nor what follows a warm-up."""
    arguments = dict(ctx=256, page=32, ubatch=64, cache_type_k="q8_0", cache_type_v="q4_0")
    cfg = small_config(k_dim=32, embed=32, mlp=48)
    random_llm(cfg, **arguments, **KINDS["host"]).warmup()
    with compilations() as found:
        use(random_llm(cfg, **arguments, **KINDS["host"]), 50)
    assert len(found) == 0


def test_a_warm_up_forgets_what_it_ran():
    for kind in ("fused", "host", "uneven, host"):
        llm, prompt = make(kind, ctx=256), random_ids(70, 128)
        params = SamplingParams(max_tokens=40, temperature=0)
        before = llm.generate([prompt], params)[0].token_ids
        llm.warmup()
        assert llm.generate([prompt], params)[0].token_ids == before
