"""How requests begin, run together and end, and that whatever ends them frees their rows."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import LLM, ModelError, OptionError, PromptError, SamplingParams
from jaxllm.cache.attention import decode_spans
from jaxllm.engine import fused, staged_step
from jaxllm.engine.fused import FusedEngine
from jaxllm.engine.generate import Request
from jaxllm.engine.staged import StagedEngine
from jaxllm.models.sources import RandomSource
from support import assert_close, make_llm, random_ids, small_model, with_layers

CTX = 48
KINDS: dict[str, dict[str, Any]] = {
    "fused": {},
    "host": dict(kv="host"),
    "uneven": dict(devices=3, split_mode="tensor", attn_split="2,1,0", kv="host"),
}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)


@cache
def _llm(kind: str) -> LLM:
    return make_llm(small_model(), ctx=CTX, parallel=2, prefix_cache=False, **KINDS[kind])


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0)


def drawn(count: int) -> SamplingParams:
    """With logits on the host at every step."""
    return SamplingParams(max_tokens=count, temperature=0.7, seed=3)


def work_off(llm: LLM, requests: list[Request]) -> list[tuple[Request, int | None]]:
    """All events of requests that run through the engine of an LLM."""
    return list(llm._run(requests))


def assert_empty(llm: LLM) -> None:
    """No page is held and no row has begun."""
    if isinstance(llm.engine, StagedEngine):
        assert not llm.engine.floor.any()
        assert not llm.engine.trimmed
        for store in llm.engine.stores:
            assert not any(store.held_bytes().values())


def assert_usable(llm: LLM) -> None:
    """Nothing is held, and a new request gets what it gets from an LLM of its own."""
    assert_empty(llm)
    prompt = random_ids(20, seed=9)
    expected = make_llm(small_model(), ctx=CTX).generate([prompt], greedy(5))[0].token_ids
    assert [c.token_ids for c in llm.generate([prompt] * 3, greedy(5))] == [expected] * 3
    assert_empty(llm)


# Ends


@EVERY_KIND
def test_a_completion_of_the_length_asked_for(kind: str):
    for count in (1, 2, 17):
        (done,) = _llm(kind).generate([random_ids(20)], greedy(count))
        assert (len(done.token_ids), done.finish_reason) == (count, "length")


@EVERY_KIND
@pytest.mark.parametrize("length", [1, 15, 16, 17, CTX - 1, CTX])
def test_a_full_context_ends_a_completion(kind: str, length: int):
    """Tokens are fed back until all positions are taken; the last one is not fed any more."""
    (done,) = _llm(kind).generate([random_ids(length)], greedy(1000))
    assert (len(done.token_ids), done.finish_reason) == (CTX - length + 1, "context")
    assert done.prompt_tokens == length


@EVERY_KIND
def test_length_comes_before_context(kind: str):
    (done,) = _llm(kind).generate([random_ids(CTX)], greedy(1))
    assert done.finish_reason == "length"
    (done,) = _llm(kind).generate([random_ids(40)], greedy(CTX - 40 + 1))
    assert done.finish_reason == "length"


@EVERY_KIND
def test_a_token_that_ends_generation(kind: str):
    """It is not part of the completion, and frees the row for the next request."""
    llm, prompt = _llm(kind), random_ids(20)
    tokens = llm.generate([prompt], greedy(12))[0].token_ids
    end = next(i for i, token in enumerate(tokens) if i >= 3 and token not in tokens[:i])
    requests = [Request(i, prompt, greedy(12), frozenset([tokens[end]])) for i in range(3)]
    work_off(llm, requests)
    for request in requests:
        assert request.finish_reason == "stop"
        assert tuple(request.token_ids) == tokens[:end]
    assert_empty(llm)


def test_a_first_token_that_ends_generation():
    llm, prompt = _llm("host"), random_ids(20)
    first = llm.generate([prompt], greedy(1))[0].token_ids[0]
    request = Request(0, prompt, greedy(12), frozenset([first]))
    assert work_off(llm, [request]) == [(request, None)]
    assert (request.token_ids, request.finish_reason) == ([], "stop")


def test_ends_that_are_ignored():
    llm, prompt = _llm("host"), random_ids(20)
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    request = Request(0, prompt, params, frozenset(range(130)))
    work_off(llm, [request])
    assert (len(request.token_ids), request.finish_reason) == (6, "length")


def test_logprobs_are_of_the_tokens_of_a_completion():
    llm, prompt = _llm("host"), random_ids(20)
    tokens = llm.generate([prompt], greedy(9))[0].token_ids
    end = next(i for i, token in enumerate(tokens) if i >= 3 and token not in tokens[:i])
    params = SamplingParams(max_tokens=9, temperature=0, logprobs=0)
    request = Request(0, prompt, params, frozenset([tokens[end]]))
    work_off(llm, [request])
    assert [p.token_id for p in request.logprobs] == list(tokens[:end])


# Prompts


@EVERY_KIND
@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([0] * (CTX + 1), f"{CTX + 1} tokens and the context {CTX}"),
        ([], "empty"),
        ([3, 130], "130"),
        ([-1, 3], "-1"),
        ("text", "tokenizer"),
    ],
)
def test_a_bad_prompt_is_refused_before_any_work(
    kind: str, prompt: Any, message: str, monkeypatch: pytest.MonkeyPatch
):
    llm = _llm(kind)

    def forward(*args: Any) -> None:
        raise AssertionError("a step has begun")

    monkeypatch.setattr(llm.engine, "forward", forward)
    with pytest.raises(PromptError, match=message):
        llm.generate([[1, 2], prompt])
    with pytest.raises(PromptError, match=message):
        llm.stream(prompt)
    if not isinstance(prompt, str):
        with pytest.raises(PromptError, match=message):
            llm.logits(prompt)


def test_what_needs_a_tokenizer():
    with pytest.raises(OptionError, match="stop texts"):
        _llm("fused").generate([[1]], SamplingParams(stop="a"))
    with pytest.raises(PromptError, match="chat"):
        _llm("fused").chat([{"role": "user", "content": "Hello"}])


def test_forms_of_prompts():
    llm, prompt = _llm("fused"), random_ids(6)
    expected = llm.generate([prompt], greedy(3))[0].token_ids
    forms: list[Any] = [prompt, tuple(prompt), np.asarray(prompt), [np.asarray(prompt)]]
    for form in forms:
        assert [c.token_ids for c in llm.generate(form, greedy(3))] == [expected]
    assert llm.generate([], greedy(3)) == []


@EVERY_KIND
def test_more_prompts_than_slots(kind: str):
    llm = _llm(kind)
    prompts = [random_ids(n, seed=n) for n in (30, 5, 41, 17, 48, 1, 16)]
    together = llm.generate(prompts, greedy(9))
    for prompt, found in zip(prompts, together, strict=True):
        (alone,) = llm.generate([prompt], greedy(9))
        assert found.token_ids == alone.token_ids
        assert found.finish_reason == alone.finish_reason
    assert_empty(llm)


# What a completion tells


@EVERY_KIND
def test_facts_of_a_completion(kind: str):
    llm = _llm(kind)
    long, short = llm.generate([random_ids(20), random_ids(3)], greedy(8))
    for done, length in ((long, 20), (short, 3)):
        assert done.text == "" and len(done.token_ids) == 8
        assert done.prompt_tokens == length
        assert done.prompt_rate > 0 and done.generation_rate > 0
        assert done.logprobs is None
    labels = [d.label for d in llm.plan.mesh.devices]
    if kind == "fused":
        assert long.link_bytes == {}
    else:
        assert list(long.link_bytes) == labels
    assert llm.generate([[1]], greedy(1))[0].generation_rate == 0


@pytest.mark.parametrize("kind", ["host", "uneven"])
def test_link_bytes_are_those_of_the_steps(kind: str):
    llm = _llm(kind)
    (done,) = llm.generate([random_ids(20)], greedy(9))
    for device, sent in enumerate(done.link_bytes.values()):
        prefill = llm.plan.link_bytes(device, 16)
        assert sent == prefill + sum(llm.plan.link_bytes(device, 20 + i) for i in range(8))


@EVERY_KIND
def test_a_stream_is_the_completion(kind: str):
    llm, prompt = _llm(kind), random_ids(20)
    (expected,) = llm.generate([prompt], greedy(9))
    *others, last = llm.stream(prompt, greedy(9))
    assert [t for piece in [*others, last] for t in piece.token_ids] == list(expected.token_ids)
    assert all(piece.finish_reason is None and piece.completion is None for piece in others)
    assert last.finish_reason == "length" and last.completion is not None
    assert last.completion.token_ids == expected.token_ids
    assert last.completion.link_bytes == expected.link_bytes


# Requests that do not get to their end


def events(llm: LLM, count: int = 20) -> Iterator[tuple[Request, int | None]]:
    """Two requests that run together."""
    requests = [Request(i, random_ids(20 + i), greedy(count), frozenset()) for i in range(2)]
    return llm._run(requests)


@EVERY_KIND
@pytest.mark.parametrize("seen", [1, 2, 7])
def test_closing_early_frees_the_rows(kind: str, seen: int):
    llm = _llm(kind)
    running = events(llm)
    for _ in range(seen):
        next(running)
    running.close()  # type: ignore[attr-defined]
    assert_usable(llm)


def test_a_stream_that_is_dropped(monkeypatch: pytest.MonkeyPatch):
    llm = _llm("host")
    monkeypatch.setattr(llm, "tokenizer", Letters())
    pieces = llm.stream(random_ids(20), greedy(20))
    assert next(pieces).text == "a"
    assert any(llm.engine.stores[0].held_bytes().values())  # type: ignore[attr-defined]
    pieces.close()  # type: ignore[attr-defined]
    monkeypatch.undo()
    assert_usable(llm)


def test_an_exception_in_the_consumer(monkeypatch: pytest.MonkeyPatch):
    llm = _llm("host")

    def consume() -> None:
        for piece in llm.stream(random_ids(20), greedy(20)):
            raise ValueError(piece.text)

    monkeypatch.setattr(llm, "tokenizer", Letters())
    with pytest.raises(ValueError, match="a"):
        consume()
    monkeypatch.undo()
    assert_usable(llm)


def test_an_exception_thrown_into_the_iterator():
    llm = _llm("host")
    running = events(llm)
    next(running)
    with pytest.raises(ValueError):
        running.throw(ValueError("no more"))  # type: ignore[attr-defined]
    assert_usable(llm)


@EVERY_KIND
@pytest.mark.parametrize("step", [0, 1, 2, 6])
@pytest.mark.parametrize("method", ["forward", "settle", "greedy"])
def test_an_interrupt_leaves_a_usable_llm(
    kind: str, step: int, method: str, monkeypatch: pytest.MonkeyPatch
):
    """In a prefill or a decode step, before or after it ran."""
    llm, calls = _llm(kind), 0
    original = getattr(llm.engine, method)

    def interrupted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > step:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(llm.engine, method, interrupted)
    params = greedy(20) if method == "greedy" else drawn(20)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([random_ids(20), random_ids(33)], params)
    monkeypatch.undo()
    assert_usable(llm)


@pytest.mark.parametrize("kind", ["host", "uneven"])
def test_an_interrupt_between_two_layers(kind: str, monkeypatch: pytest.MonkeyPatch):
    """Copies are on their way and rings half written."""
    llm, calls = _llm(kind), 0
    stream = llm.engine.streams[0]  # type: ignore[attr-defined]
    done = stream.done

    def interrupted(result: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 8:
            raise KeyboardInterrupt
        done(result)

    monkeypatch.setattr(stream, "done", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([random_ids(20), random_ids(33)], greedy(15))
    monkeypatch.undo()
    assert_usable(llm)


class Letters:
    """A tokenizer whose every token is the letter a."""

    eog: frozenset[int] = frozenset()

    def piece(self, token: int, skip_special: bool = False) -> bytes:
        return b"a"


def test_a_stop_text_ends_a_request(monkeypatch: pytest.MonkeyPatch):
    llm = _llm("host")
    monkeypatch.setattr(llm, "tokenizer", Letters())
    params = SamplingParams(max_tokens=20, temperature=0, stop="aaa")
    for done in llm.generate([random_ids(n) for n in (20, 3, 9)], params):
        assert (done.text, done.finish_reason, len(done.token_ids)) == ("", "stop", 3)
    *_, last = llm.stream(random_ids(20), params)
    assert (last.text, last.finish_reason, len(last.token_ids)) == ("", "stop", 3)
    assert_empty(llm)


class _Damaged(RandomSource):
    """A token's embedding is no number."""

    token = 0

    def _draw(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        values = super()._draw(name, shape)
        if name == "token_embd.weight":
            values[self.token] = np.nan
        return values


@pytest.mark.parametrize("kind", [*KINDS, "mesh"])
def test_logits_that_are_no_numbers_are_no_token(kind: str, monkeypatch: pytest.MonkeyPatch):
    """In the middle of a completion; other devices' logits may be numbers."""
    how = KINDS.get(kind, dict(devices=2, split_mode="tensor", engine="fused"))
    model, prompt = small_model(tied=False), [7, 8, 9]
    said = make_llm(model, ctx=CTX).generate([prompt], greedy(8))[0].token_ids
    _Damaged.token = next(t for t in said[2:] if t not in prompt + [*said[:2]])
    monkeypatch.setattr("jaxllm.llm.RandomSource", _Damaged)
    llm = make_llm(model, ctx=CTX, **how)
    with pytest.raises(ModelError, match="logits are not numbers"):
        llm.generate([prompt], greedy(8))
    assert llm.generate([prompt], greedy(2))[0].token_ids == said[:2]


# Steps and logits without requests


@pytest.mark.parametrize("types", [{}, dict(cache_type_k="q8_0", cache_type_v="q4_0")])
def test_a_pure_step_in_a_scan_is_greedy_generation(types: dict[str, str]):
    llm = make_llm(with_layers(small_model(), k_dim=32, v_dim=32), ctx=CTX, parallel=2, **types)
    step, params, cache = llm.step_fn()
    prompts = [random_ids(13, seed=1), random_ids(13, seed=2)]

    @jax.jit
    def decode(params: Any, cache: Any, tokens: jax.Array) -> jax.Array:
        zero = jnp.zeros(2, jnp.int32)
        logits, cache = step(params, cache, tokens, zero)

        def body(carry: Any, at: jax.Array) -> tuple[Any, jax.Array]:
            cache, token = carry
            logits, cache = step(params, cache, token[:, None], zero + at)
            following = logits[:, 0].argmax(-1).astype(jnp.int32)
            return (cache, following), following

        first = logits[:, -1].argmax(-1).astype(jnp.int32)
        _, rest = jax.lax.scan(body, (cache, first), 13 + jnp.arange(14, dtype=jnp.int32))
        return jnp.concatenate([first[None], rest]).T

    found = np.asarray(decode(params, cache, jnp.asarray(prompts, jnp.int32)))
    for row, done in zip(found, llm.generate(prompts, greedy(15)), strict=True):
        assert row.tolist() == list(done.token_ids)


def test_a_pure_step_out_of_bounds_gives_no_numbers():
    """Where a ring would end, or the context does; the other row is as it should be."""
    llm = _llm("fused")
    ubatch = llm.plan.options.ubatch
    step, params, cache = llm.step_fn()
    tokens = jnp.ones((2, 4), jnp.int32)
    for bad in (ubatch - 3, CTX - 1, -1):
        logits, _ = step(params, cache, tokens, jnp.asarray([0, bad], jnp.int32))
        assert np.isfinite(logits[0]).all() and np.isnan(logits[1]).all()
    with pytest.raises(OptionError, match="longer than ubatch"):
        step(params, cache, jnp.ones((2, ubatch + 1), jnp.int32), jnp.zeros(2, jnp.int32))


def test_a_pure_step_of_an_unknown_token_gives_no_numbers():
    llm = _llm("fused")
    step, params, cache = llm.step_fn()
    tokens = np.ones((2, 4), np.int32)
    for bad in (-1, llm.config.vocab, 2**30):
        tokens[1, 2] = bad
        logits, _ = step(params, cache, jnp.asarray(tokens), jnp.zeros(2, jnp.int32))
        assert np.isfinite(logits[0]).all() and np.isnan(logits[1]).all()


def test_a_pure_step_needs_one_device():
    with pytest.raises(OptionError, match="step_fn"):
        _llm("host").step_fn()


@EVERY_KIND
def test_logits_of_lists(kind: str):
    llm = _llm(kind)
    prompts = [random_ids(n, seed=n) for n in (1, 16, 30, CTX)]
    found = llm.logits(prompts)
    for prompt, logits in zip(prompts, found, strict=True):
        assert logits.shape == (len(prompt), 130) and logits.dtype == np.float32
        np.testing.assert_array_equal(logits, llm.logits(tuple(prompt)))
        assert_close(logits, _llm("fused").logits(prompt))
    assert_empty(llm)


def test_an_interrupt_after_a_donating_program_loses_no_engine(monkeypatch: pytest.MonkeyPatch):
    """It comes when the rings are given away and their successors are not yet kept."""
    programs = ("fused", fused, "greedy_step"), ("host", staged_step, "run_stages")
    for kind, module, name in programs:
        llm = _llm(kind)
        expected = llm.generate([random_ids(20)], greedy(5))[0].token_ids
        right, calls = getattr(module, name), iter(range(100))

        def interrupted(*args: Any, right: Any = right, calls: Any = calls, **kw: Any) -> Any:
            result = right(*args, **kw)
            if next(calls) == 3:
                raise KeyboardInterrupt
            return result

        with monkeypatch.context() as patch:
            patch.setattr(module, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.generate([random_ids(20)], greedy(5))
        assert llm.generate([random_ids(20)], greedy(5))[0].token_ids == expected


@pytest.mark.parametrize(
    "cut, steps", [({}, 1), ({}, 3), (dict(devices=2, split_mode="tensor"), 1)]
)
def test_running_ahead_changes_no_token(
    cut: dict[str, Any], steps: int, monkeypatch: pytest.MonkeyPatch
):
    """As on a GPU: steps begin before the last is read, or several at once, and a ring is read at
    once. More requests than rows, of unlike lengths; one is drawn, one is penalised, one ends by
    its own token."""
    right, spans, ran_ahead, at_once = fused.greedy_step, [], [], []

    def watched(leaves: Any, cache: Any, tokens: jax.Array, *args: Any, **kw: Any) -> Any:
        spans.append(kw["span"])
        at_once.append(kw["steps"])
        ran_ahead.append(any(tokens is made for made in unread))
        (ids, last), cache = right(leaves, cache, tokens, *args, **kw)
        unread.append(last)
        return (ids, last), cache

    monkeypatch.setattr(fused, "greedy_step", watched)
    unread: list[jax.Array] = []
    prompts = [random_ids(n, seed=n) for n in (5, 19, 30, 11, 7, 23)]
    params: list[SamplingParams] = [greedy(12), greedy(1), greedy(9), greedy(40)]
    params.append(SamplingParams(max_tokens=6, temperature=0.9, seed=4))
    params.append(SamplingParams(max_tokens=6, temperature=0, repeat_penalty=1.3))

    def answers() -> list[tuple[list[int], str]]:
        llm = make_llm(small_model(), ctx=CTX, parallel=2, engine="fused", **cut)
        assert isinstance(llm.engine, FusedEngine)
        llm.engine.runs_ahead, llm.engine.spans = ahead, decode_spans(CTX) if ahead else ()
        llm.engine.greedy_steps = steps if ahead else 1
        eog = frozenset(ends)
        requests = [
            Request(i, p, q, eog) for i, (p, q) in enumerate(zip(prompts, params, strict=True))
        ]
        work_off(llm, requests)
        work_off(llm, again := [Request(0, prompts[0], params[0], eog)])  # may reuse a prefix
        return [(r.token_ids, str(r.finish_reason)) for r in (*requests, *again)]

    ahead, ends = False, []
    ends = [answers()[2][0][4]]  # the fifth token of the third request
    plain = answers()
    assert plain[2][1] == "stop"
    assert not any(ran_ahead) and not any(spans)
    ahead = True
    spans.clear()
    assert answers() == plain
    assert sum(ran_ahead) > 20 // steps and all(spans)
    assert {*at_once} == {1, steps}


@pytest.fixture
def heeds_interrupts() -> Iterator[None]:
    """Ctrl-C as Python has it, whatever the tests were started from."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@EVERY_KIND
@pytest.mark.usefixtures("heeds_interrupts")
def test_an_interrupt_that_a_callback_drops_ends_generation(
    kind: str, monkeypatch: pytest.MonkeyPatch
):
    """In a chunk of the prompt, and in decode steps, drawn or greedy."""

    class Dropping:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(sys, "unraisablehook", lambda lost: None)
    llm = _llm(kind)
    prompts = [random_ids(40)]
    places = (("forward", drawn(5), 0), ("forward", drawn(5), 5), ("read", greedy(5), 2))
    for name, params, at in places:
        expected = llm.generate(prompts, params)[0].token_ids
        method, calls = getattr(llm.engine, name), iter(range(100))

        def dropping(*args: Any, method: Any = method, calls: Any = calls, at: int = at) -> Any:
            if next(calls) == at:
                Dropping()
            return method(*args)

        with monkeypatch.context() as patch:
            patch.setattr(llm.engine, name, dropping)
            with pytest.raises(KeyboardInterrupt):
                llm.generate(prompts, params)
        assert next(calls) == at + 1
        assert llm.generate(prompts, params)[0].token_ids == expected
