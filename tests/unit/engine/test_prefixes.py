"""Rows keep what they hold, prompts that begin alike take it over, and no result changes a bit."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM, Completion, ModelConfig, SamplingParams
from jaxllm.engine.prefixes import Held, Rows, Start
from jaxllm.engine.staged import StagedEngine
from support import (
    PAGE,
    compilations,
    feed,
    layer_config,
    make_llm,
    model_config,
    random_ids,
    small_model,
    step,
    with_layers,
)

UNEVEN = dict(devices=3, split_mode="tensor", attn_split="2,1,0")
QUANTISED = dict(cache_type_k="q8_0", cache_type_v="q8_0")
KINDS: dict[str, dict[str, Any]] = {
    "fused": {},
    "fused on two": dict(devices=2, split_mode="tensor", engine="fused"),
    "device": dict(engine="staged"),
    "host": dict(kv="host"),
    "uneven": dict(kv="host", **UNEVEN),
    "long tail": dict(kv="host", tail_pages=4),
    "part resident": dict(kv="host", kv_gpu_layers=1, link_gbps="1,1,1", **UNEVEN),
    "q8_0": dict(kv="host", **QUANTISED),
    "fused q8_0": QUANTISED,
}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
WINDOWS = model_config([layer_config(8, 2, 16, window=24), layer_config(8, 2, 16)])
PARAMS = SamplingParams(max_tokens=6, temperature=0, logprobs=2)


def _model(kind: str) -> ModelConfig:
    return with_layers(small_model(), k_dim=32, v_dim=32) if "q8" in kind else small_model()


@cache
def _llm(kind: str, keep: bool = True, windows: bool = False) -> LLM:
    model = WINDOWS if windows else _model(kind)
    return make_llm(model, parallel=2, prefix_cache=keep, **KINDS[kind])


def results(done: list[Completion]) -> list[Any]:
    """What must not depend on reuse, logarithms of probabilities to the last bit."""
    return [(c.token_ids, c.finish_reason, c.logprobs) for c in done]


def check(kind: str, *calls: list[list[int]], windows: bool = False) -> list[list[int]]:
    """Each call gives what it gives without reuse; the cached tokens of its completions."""
    llm, plain = _llm(kind, True, windows), _llm(kind, False, windows)
    llm.forget()
    cached = []
    for prompts in calls:
        found, expected = llm.generate(prompts, PARAMS), plain.generate(prompts, PARAMS)
        assert results(found) == results(expected)
        assert [c.cached_tokens for c in expected] == [0] * len(prompts)
        cached.append([c.cached_tokens for c in found])
        within_plan(llm)
    return cached


def within_plan(llm: LLM) -> None:
    """No store holds more than the plan gives it, and without rows nothing."""
    if isinstance(llm.engine, StagedEngine):
        for device, store in enumerate(llm.engine.stores):
            held, planned = store.held_bytes(), llm.plan.cache_bytes(device)
            assert held["pinned"] + held["pageable"] <= planned["host"]
            assert sum(held.values()) <= sum(planned.values())


@EVERY_KIND
def test_a_prompt_goes_on_from_an_earlier_one(kind: str):
    base = random_ids(70)
    other = [*base[:40], *random_ids(30, seed=1)]
    calls = [base], [base], [[*base, *random_ids(40, seed=2)]], [other], [base[:20]], [base[:16]]
    assert check(kind, *calls) == [[0], [64], [64], [32], [16], [0]]


@EVERY_KIND
def test_prompts_of_one_call_share_pages(kind: str):
    """The second row begins while the first one decodes; later ones in whichever is free."""
    base = random_ids(50)
    prompts = [[*base, *random_ids(n, seed=n)] for n in (9, 1, 30, 14)]
    cached = check(kind, prompts, prompts[::-1])
    assert cached[0] == [0, 48, 48, 48] and all(n >= 48 for n in cached[1])


@EVERY_KIND
def test_a_conversation(kind: str):
    """A completion that becomes part of a prompt is prefilled then, and kept from then on."""
    llm, prompt = _llm(kind), random_ids(40)
    llm.forget()
    for turn in range(3):
        (done,) = llm.generate([prompt], PARAMS)
        assert done.cached_tokens == [0, 32, 48][turn]
        (plain,) = _llm(kind, False).generate([prompt], PARAMS)
        assert results([done]) == results([plain])
        prompt = [*prompt, *done.token_ids, *random_ids(8, seed=turn)]


@pytest.mark.parametrize("kind", ["host", "device", "uneven"])
def test_shared_pages_are_shared(kind: str):
    """A group of shared pages takes memory once; releasing one row leaves the other's."""
    engine = _llm(kind).engine
    assert isinstance(engine, StagedEngine)
    _llm(kind).generate([random_ids(67)], PARAMS)
    (row,) = _llm(kind)._rows.holding()
    store = engine.stores[0]
    before = store.held_bytes()
    pages = list(store.row_pages(0, row))
    engine.reuse(row, 1 - row, 64)
    assert store.held_bytes() == before
    engine.release(row)
    left = list(store.row_pages(0, 1 - row))
    assert [first for first, _ in left] == list(range(0, 64, PAGE))
    for (_, old), (_, new) in zip(pages, left, strict=False):
        assert [p.tobytes() for p in old] == [p.tobytes() for p in new]
    engine.release(1 - row)
    _llm(kind).forget()
    assert not any(store.held_bytes().values())


@pytest.mark.parametrize("kind", ["uneven", "part resident", "q8_0"])
def test_shared_pages_are_sent_once_a_step(kind: str):
    """What the plan says of every row's position, less what they share: as long as they share it,
    whatever each row adds."""
    llm, lengths = _llm(kind), [69, 48]
    devices = range(len(llm.plan.mesh))

    def planned(*positions: int) -> np.ndarray:
        return np.asarray([sum(llm.plan.link_bytes(d, n) for n in positions) for d in devices])

    llm.forget()
    feed(llm, 0, random_ids(69))
    llm.engine.reuse(0, 1, 48)
    try:
        for _ in range(40):
            before = np.asarray(llm.engine.link_bytes())
            step(llm, [1, 2], lengths)
            sent = np.asarray(llm.engine.link_bytes()) - before
            np.testing.assert_array_equal(sent, planned(*lengths) - planned(48))
            lengths = [n + 1 for n in lengths]
        assert planned(48).any()
        llm.engine.park(0)
        before = np.asarray(llm.engine.link_bytes())
        step(llm, [1, 2], [-1, lengths[1]])
        sent = np.asarray(llm.engine.link_bytes()) - before
        np.testing.assert_array_equal(sent, planned(lengths[1]))
    finally:
        for row in (0, 1):
            llm.engine.release(row)


@pytest.mark.parametrize("kind", ["host", "uneven"])
def test_kept_rows_are_not_sent(kind: str):
    """A step sends pages of the rows that run; what others hold stays where it is."""
    llm, prompt = _llm(kind), random_ids(40, seed=7)
    llm.forget()
    (alone,) = llm.generate([prompt], PARAMS)
    llm.forget()
    llm.generate([random_ids(90, seed=8), random_ids(20)], PARAMS)
    (found,) = llm.generate([prompt], PARAMS)
    assert found.link_bytes == alone.link_bytes
    (again,) = llm.generate([prompt], PARAMS)
    assert again.cached_tokens == 32
    steps = [llm.plan.link_bytes(0, 40 + i) for i in range(5)]
    assert next(iter(again.link_bytes.values())) == llm.plan.link_bytes(0, 32) + sum(steps)


@pytest.mark.parametrize("kind", ["fused", "fused on two", "device", "uneven"])
def test_windows_are_restored_together_or_not(kind: str):
    """A window of 24: the ring of the fused engine has 48 positions, the store what is seen."""
    base = random_ids(64)
    longer = [*base, *random_ids(30, seed=3)]
    first, again, short = check(kind, [base[:18]], [base], [base[:40]], windows=True)
    assert (first, again) == ([0], [16])
    assert short == [0]
    cached = check(kind, [longer, longer, base], [longer[:90]], windows=True)
    assert cached[0][0] == 0
    for n in cached[0][1:] + cached[1]:
        assert n in (0, 64, 80)
    if kind.startswith("fused"):
        assert cached[0][1] == 80


@EVERY_KIND
def test_an_error_leaves_rows_that_are_certain(kind: str, monkeypatch: pytest.MonkeyPatch):
    """The row in use is forgotten; another one is as it was."""
    llm = _llm(kind)
    llm.forget()
    kept, other = random_ids(40), random_ids(40, seed=1)
    llm.generate([kept], PARAMS)
    forward, calls = llm.engine.forward, 0

    def interrupted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt
        return forward(*args)

    monkeypatch.setattr(llm.engine, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([other], PARAMS)
    monkeypatch.undo()
    found = llm.generate([kept, other], PARAMS)
    assert [c.cached_tokens for c in found] == [32, 0]
    assert results(found) == results(_llm(kind, False).generate([kept, other], PARAMS))


@pytest.mark.parametrize("kind", ["fused", "host"])
def test_a_closed_stream_is_kept(kind: str):
    llm, prompt = _llm(kind), random_ids(40)
    llm.forget()
    running = llm._run([llm._prompts.request(0, prompt, PARAMS)])
    next(running), next(running)
    running.close()  # type: ignore[attr-defined]
    assert check_again(llm, prompt) == 32


def check_again(llm: LLM, prompt: list[int]) -> int:
    (done,) = llm.generate([prompt], PARAMS)
    return done.cached_tokens


@pytest.mark.parametrize("kind", ["fused", "host"])
def test_logits_reuse_nothing(kind: str):
    llm, prompt = _llm(kind), random_ids(40)
    expected = _llm(kind, False).logits(prompt)
    llm.generate([prompt, prompt], PARAMS)
    np.testing.assert_array_equal(llm.logits(prompt), expected)
    assert check_again(llm, prompt) == 32  # the row that logits did not take


@pytest.mark.parametrize("kind", ["fused", "fused on two", "device", "host", "long tail"])
def test_nothing_is_compiled_after_a_warm_up(kind: str):
    """Prefixes of the row itself, of a busy one and of a kept one; groups that are cut."""
    llm = make_llm(_model(kind), parallel=2, ctx=256, **KINDS[kind])
    llm.warmup()
    base = random_ids(130)
    with compilations() as found:
        for lengths in ((130, 100, 130), (50, 70), (130,), (37, 130, 90)):
            done = llm.generate([base[:n] for n in lengths], PARAMS)
    assert len(found) == 0 and done[-1].cached_tokens == 80


# The bookkeeping alone


def everything(row: int, length: int) -> bool:
    return True


def test_the_longest_prefix_in_whole_steps():
    rows = Rows(3, 4)
    for row, tokens in enumerate(("abcdefghij", "abcdefghxyz", "zzzz")):
        rows.hold(row, Held(list(map(ord, tokens)), len(tokens), len(tokens)))

    def start(prompt: str, *free: int) -> Start:
        return rows.choose(list(map(ord, prompt)), free, everything)

    assert start("abcdefghijklm", 0, 1, 2) == Start(1, 1, 8)  # the newer of two alike
    assert start("abcdefghijklm", 0, 2) == Start(0, 0, 8)
    assert start("abcdefghijklm", 2) == Start(2, 1, 8)
    assert start("abcdefgh", 0, 1, 2) == Start(1, 1, 4)  # one token is left
    assert start("abcd", 0, 1, 2) == Start(0, 0, 0)
    assert start("zzzz!", 0, 1) == Start(0, 2, 4)
    assert rows.choose(list(map(ord, "zzzz!")), [0, 1], lambda row, n: row != 2).length == 0


def test_only_prefilled_positions_count():
    rows = Rows(1, 4)
    rows.hold(0, Held([1] * 20, 19, 9, ended=True))
    assert rows.choose([1] * 30, [0], everything).length == 8


def test_the_row_that_waited_longest_is_spare():
    rows = Rows(3, 4)
    rows.hold(0, Held([1], 1, 1, ended=True))
    rows.hold(2, Held([2], 1, 1))
    assert rows.spare([0, 1, 2]) == 1
    rows.hold(1, Held([3], 1, 1, ended=True))
    assert rows.spare([0, 1, 2]) == 0
    assert rows.latest() == (1, Held([3], 1, 1, ended=True))
    rows.forget(1)
    rows.hold(0, Held([4], 1, 1, ended=True))
    latest = rows.latest()
    assert latest is not None and latest[0] == 0
