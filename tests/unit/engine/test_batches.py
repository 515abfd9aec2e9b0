"""-b: how much of prompts runs between two steps of sequences that run. No result depends on it."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.engine.generate import Request
from jaxllm.engine.staged import StagedEngine
from sharding import PlanError
from support import (
    PAGE,
    compilations,
    layer_config,
    make_llm,
    model_config,
    random_ids,
    small_model,
)

SLOTS, HUGE = 3, 1 << 20
WINDOWS = model_config([layer_config(8, 2, 16, window=24), layer_config(8, 2, 16)])
KINDS: dict[str, dict[str, Any]] = {
    "fused": {},
    "mesh": dict(devices=2, split_mode="tensor", engine="fused"),
    "device": dict(engine="staged"),
    "host": dict(kv="host"),
    "uneven": dict(kv="host", devices=3, split_mode="tensor", attn_split="2,1,0"),
    "long tail": dict(kv="host", tail_pages=4),
}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
LENGTHS = (20, 90, 3, 64, 33, 101, 16)
BUDGETS = (9, 4, 17, 1, 8, 6, 12)
Event = tuple[str, int]  # "chunk" and its tokens, or "step" and the rows that take part


@cache
def _llm(kind: str, batch: int, keep: bool = False, windows: bool = False) -> LLM:
    model = WINDOWS if windows else small_model()
    how = KINDS[kind]
    return make_llm(model, parallel=SLOTS, batch=batch, prefix_cache=keep, **how)


def _params(count: int, **more: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": count, "temperature": 0} | more))


def _run(llm: LLM, prompts: list[list[int]], *params: SamplingParams) -> list[Any]:
    """Tokens, ends and logarithms of probabilities of requests that run together."""
    requests = [
        Request(i, *each, frozenset()) for i, each in enumerate(zip(prompts, params, strict=True))
    ]
    for _ in llm._run(requests):
        pass
    return [(r.token_ids, r.finish_reason, r.logprobs) for r in requests]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Chunks and steps of an LLM, in their order, from now on."""

    def watch(llm: LLM) -> list[Event]:
        events: list[Event] = []
        forward, greedy = llm.engine.forward, llm.engine.greedy

        def forwards(tokens: Any, row: int, starts: Any, used: Any = None, *more: Any) -> Any:
            chunk = tokens.shape[1] > 1
            events.append(("chunk", used) if chunk else ("step", int((starts >= 0).sum())))
            return forward(tokens, row, starts, used, *more)

        def steps(tokens: Any, starts: Any, count: int) -> Any:
            if not isinstance(llm.engine, StagedEngine):  # whose greedy calls forward
                events.append(("step", int((starts >= 0).sum())))
            return greedy(tokens, starts, count)

        monkeypatch.setattr(llm.engine, "forward", forwards)
        monkeypatch.setattr(llm.engine, "greedy", steps)
        return events

    return watch


def _between(events: list[Event]) -> list[int]:
    """Tokens of prompts before each step but the first, which nobody waits for."""
    sums, running = [0], False
    for name, count in events:
        if name == "step":
            sums.append(0)
            running = True
        elif running:
            sums[-1] += count
    return sums[1:]


@EVERY_KIND
@pytest.mark.parametrize("windows", [False, True])
def test_no_bit_depends_on_it(kind: str, windows: bool):
    """Requests of unlike lengths, greedy ones with and without probabilities, drawn ones."""
    prompts = [random_ids(n, seed=n) for n in LENGTHS]
    logprobs = [_params(n, logprobs=2) for n in BUDGETS]
    drawn = [_params(n, temperature=0.7, seed=n) for n in BUDGETS]
    plain = [_params(n) for n in BUDGETS]
    mixed = [*plain[:2], *drawn[2:5], *plain[5:]]
    for params in (plain, logprobs, mixed):
        found = [_run(_llm(kind, b, windows=windows), prompts, *params) for b in (16, 32, 50, HUGE)]
        assert all(each == found[-1] for each in found)


@EVERY_KIND
@pytest.mark.parametrize("batch", [16, 32, 50])
@pytest.mark.parametrize("temperature", [0, 0.7])
def test_those_that_run_wait_for_no_more(kind: str, batch: int, temperature: float, watched: Any):
    """A long prompt comes while others run: they take a step after so many of its tokens, and
    nothing but whole chunks runs between."""
    llm = _llm(kind, batch)
    events = watched(llm)
    prompts = [random_ids(n, seed=n) for n in (20, 5, 101, 90)]
    _run(llm, prompts, *(_params(n, temperature=temperature, seed=1) for n in (30, 2, 8, 8)))
    sums = _between(events)
    assert max(sums) == batch // 16 * 16
    assert sum(count for name, count in events if name == "chunk") == sum(map(len, prompts))
    assert {count for name, count in events if name == "chunk"} <= {16, 4, 5, 10}


def test_nobody_waits_where_nobody_runs(watched: Any):
    """The first prompt, and prompts of one token after them, are computed at once."""
    llm = _llm("fused", 16)
    events = watched(llm)
    prompts = [random_ids(100, seed=i) for i in range(3)]
    _run(llm, prompts, *[_params(1)] * 3)
    assert [name for name, _ in events] == ["chunk"] * 21
    events.clear()
    _run(llm, prompts[:1], _params(3))
    assert [name for name, _ in events] == ["chunk"] * 7 + ["step"] * 2


def test_short_prompts_share_what_there_is(watched: Any):
    """Two that fit together run before the next step, a third after it."""
    llm = _llm("host", 32)
    events = watched(llm)
    prompts = [random_ids(n, seed=n) for n in (10, 16, 16)]
    _run(llm, prompts, *[_params(4)] * 3)
    assert events[:4] == [("chunk", 10), ("chunk", 16), ("chunk", 16), ("step", 3)]
    events.clear()
    _run(llm, [random_ids(n, seed=n) for n in (10, 16, 17)], *[_params(4)] * 3)
    assert events[:5] == [("chunk", 10), ("chunk", 16), ("chunk", 16), ("step", 2), ("chunk", 1)]


@pytest.mark.parametrize("kind", ["host", "uneven"])
def test_a_prompt_that_waits_is_not_sent(kind: str):
    """Steps of others send nothing of it, whatever -b is."""
    sent = []
    for batch in (16, HUGE):
        llm = _llm(kind, batch)
        before = np.asarray(llm.engine.link_bytes())
        _run(llm, [random_ids(20), random_ids(101)], _params(2), _params(1))
        sent.append(np.asarray(llm.engine.link_bytes()) - before)
    np.testing.assert_array_equal(*sent)


@EVERY_KIND
def test_a_prompt_half_way_is_shared_when_it_is_whole(kind: str):
    """One that begins like it waits for its end, and computes only the rest."""
    base = random_ids(96)
    prompts = [random_ids(18, seed=1), base, [*base[:80], *random_ids(20, seed=2)], base[:50]]
    params = _params(12, logprobs=1)
    for keep in (True, False):
        for batch in (16, 48):
            llm = _llm(kind, batch, keep)
            llm.forget()
            found = llm.generate(prompts, params)
            assert [c.cached_tokens for c in found] == ([0, 0, 80, 48] if keep else [0] * 4)
            expected = _llm(kind, HUGE).generate(prompts, params)
            for a, b in zip(found, expected, strict=True):
                assert (a.token_ids, a.logprobs) == (b.token_ids, b.logprobs)


@EVERY_KIND
def test_a_stop_text_while_a_prompt_waits(kind: str):
    """The one that runs is cancelled by who reads it; its row is free for a third."""
    found = []
    for batch in (16, HUGE):
        llm = _llm(kind, batch)
        prompts = [random_ids(20), random_ids(101, seed=1), random_ids(40, seed=2)]
        requests = [Request(i, p, _params(12), frozenset()) for i, p in enumerate(prompts)]
        for request, _ in llm._run(requests):
            request.cancelled = request.index == 0 and len(request.token_ids) == 4
        assert len(requests[0].token_ids) == 4
        found.append([r.token_ids for r in requests])
    assert found[0] == found[1]


@EVERY_KIND
@pytest.mark.parametrize("how", ["closed", "interrupted", "failed"])
def test_an_end_while_a_prompt_waits(kind: str, how: str, monkeypatch: pytest.MonkeyPatch):
    """All rows are free again; of those kept, none holds what was half done."""
    llm, prompts = _llm(kind, 16, True), [random_ids(20), random_ids(101, seed=1)]
    llm.forget()
    requests = [Request(i, p, _params(12), frozenset()) for i, p in enumerate(prompts)]
    running = llm._run(requests)
    [next(running) for _ in range(3)]
    assert len(requests[0].token_ids) == 3 and not requests[1].token_ids
    if how == "closed":
        running.close()  # type: ignore[attr-defined]
    else:
        error = KeyboardInterrupt if how == "interrupted" else ValueError
        step = llm.engine.forward

        def stopped(tokens: Any, *more: Any) -> Any:
            result = step(tokens, *more)
            if tokens.shape[1] > 1:
                raise error
            return result

        monkeypatch.setattr(llm.engine, "forward", stopped)
        with pytest.raises(error):
            list(running)
        monkeypatch.undo()
    found = llm.generate(prompts, _params(5))
    assert [c.cached_tokens for c in found] == [16 if how == "closed" else 0, 0]
    expected = _llm(kind, HUGE).generate(prompts, _params(5))
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    llm.forget()
    if isinstance(llm.engine, StagedEngine):
        for store in llm.engine.stores:
            assert not any(store.held_bytes().values())


@EVERY_KIND
def test_nothing_compiles_for_it(kind: str):
    llm = make_llm(small_model(), parallel=SLOTS, batch=16, **KINDS[kind])
    llm.warmup()
    with compilations() as compiled:
        llm.generate([random_ids(n, seed=n) for n in LENGTHS], _params(9))
    assert not compiled


@pytest.mark.parametrize(
    ("given", "batch", "ubatch"),
    [
        ({}, 2048, 512),
        (dict(batch=4096), 4096, 512),
        (dict(batch=300), 300, 256),
        (dict(ubatch=4096), 4096, 4096),
        (dict(batch=np.int64(64), ubatch=64), 64, 64),
    ],
)
def test_one_goes_with_the_other(given: dict[str, Any], batch: int, ubatch: int):
    options = LLM.from_config(small_model(), devices=1, ctx=PAGE, **given).plan.options
    assert (options.prompt_batch, options.ubatch) == (batch, ubatch)


def test_a_chunk_is_no_more_than_a_batch():
    with pytest.raises(PlanError, match="--batch-size/-b is 100; .* --ubatch-size/-ub 512"):
        make_llm(small_model(), batch=100, ubatch=512)
    with pytest.raises(PlanError, match="--batch-size/-b is 0"):
        make_llm(small_model(), batch=0)
