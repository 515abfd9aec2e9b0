"""A saved sequence goes on where it was, under its own plan byte for byte, under others alike."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from jaxllm import LLM, ModelConfig, OptionError, Rope, SamplingParams, SessionError
from jaxllm.engine.rows import LayerRow
from jaxllm.models.decoder import DecoderBlock
from jaxllm.models.parts import Latent
from support import (
    assert_close,
    assert_same_bytes,
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
PLANS: dict[str, dict[str, Any]] = {
    "fused": {},
    "fused on two": dict(devices=2, split_mode="tensor", engine="fused"),
    "fused, padded": dict(engine="fused", **UNEVEN),
    "device": dict(engine="staged"),
    "host": dict(kv="host", parallel=2),
    "uneven": dict(kv="host", **UNEVEN),
    "small pages": dict(kv="host", page=8, ubatch=32),
}
MODELS = {
    "plain": small_model(),
    "windows": model_config([layer_config(8, 2, 16, window=24), layer_config(8, 2, 16)]),
    "blocks": with_layers(small_model(), k_dim=32, v_dim=64),
}
TYPES = {"plain": {}, "windows": {}, "blocks": dict(cache_type_k="q8_0", cache_type_v="q4_0")}
PROMPT, STEPS = 45, 6
CTX = 96


@cache
def _llm(name: str, kind: str) -> LLM:
    arguments = {"ctx": CTX} | TYPES[name] | PLANS[kind]
    return make_llm(MODELS[name], **arguments)


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0, logprobs=1)


def _run(llm: LLM, tokens: list[int]) -> None:
    """A prompt and some steps in row 0."""
    feed(llm, 0, tokens[:PROMPT])
    for i, token in enumerate(tokens[PROMPT : PROMPT + STEPS]):
        _step(llm, token, PROMPT + i)


def _step(llm: LLM, token: int, position: int) -> np.ndarray:
    slots = llm.plan.options.slots
    idle = [0] * (slots - 1)
    return step(llm, [token, *idle], [position, *idle])[0]


def _go_on(llm: LLM, tokens: list[int]) -> np.ndarray:
    return np.stack([_step(llm, tokens[i], i) for i in range(PROMPT + STEPS, len(tokens))])


def _empty(llm: LLM) -> None:
    for row in range(llm.plan.options.slots):
        llm.engine.release(row)


# The engine's interface


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", PLANS)
def test_a_row_read_and_written_back_goes_on_byte_for_byte(kind: str, name: str):
    llm, tokens = _llm(name, kind), random_ids(CTX - 20, seed=4)
    _run(llm, tokens)
    saved = llm.engine.read_row(0, PROMPT + STEPS)
    expected = _go_on(llm, tokens)
    for row in range(llm.plan.options.slots):
        _empty(llm)
        llm.engine.write_row(row, saved, PROMPT + STEPS)
        for found, before in zip(llm.engine.read_row(row, PROMPT + STEPS), saved, strict=True):
            assert found.first == before.first or MODELS[name].layers[0].window
            assert _same(found, before)
    _empty(llm)
    llm.engine.write_row(0, saved, PROMPT + STEPS)
    assert_same_bytes(_go_on(llm, tokens), expected)
    _empty(llm)


def _same(a: LayerRow, b: LayerRow) -> bool:
    """Equal bytes of the positions that both have."""
    first = max(a.first, b.first)
    a, b = a.positions(first, a.end), b.positions(first, b.end)
    return a.end == b.end and all(
        x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in zip(a[:2], b[:2], strict=True)
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("other", [kind for kind in PLANS if kind != "uneven"])
def test_a_row_moves_to_any_other_plan(other: str, name: str):
    """And back: the bytes of it that the other plan holds are the same."""
    llm, target, tokens = _llm(name, "uneven"), _llm(name, other), random_ids(CTX - 20, seed=5)
    _run(llm, tokens)
    saved = llm.engine.read_row(0, PROMPT + STEPS)
    expected = _go_on(llm, tokens)
    _empty(llm), _empty(target)
    target.engine.write_row(0, saved, PROMPT + STEPS)
    moved = target.engine.read_row(0, PROMPT + STEPS)
    assert all(map(_same, moved, saved))
    for cfg, row in zip(MODELS[name].layers, moved, strict=True):
        assert row.first <= (0 if cfg.window is None else PROMPT + STEPS - cfg.window + 1)
    limit = 1e-6 if TYPES[name] else 1e-10
    assert_close(_go_on(target, tokens), expected, limit, other)
    _empty(llm), _empty(target)
    llm.engine.write_row(0, moved, PROMPT + STEPS)
    assert_same_bytes(_go_on(llm, tokens), expected)
    _empty(llm)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 48, CTX])
@pytest.mark.parametrize("kind", ["fused", "uneven"])
def test_rows_of_any_length(kind: str, length: int):
    llm = _llm("plain", kind)
    feed(llm, 0, random_ids(length))
    saved = llm.engine.read_row(0, length)
    assert {row.k.shape for row in saved} == {(8, length, 16)}
    _empty(llm)
    llm.engine.write_row(0, saved, length)
    assert all(map(_same, llm.engine.read_row(0, length), saved))
    _empty(llm)


# Files


@pytest.mark.parametrize("kind", ["fused", "fused, padded", "uneven"])
@pytest.mark.parametrize("name", ["plain", "blocks"])
def test_a_session_goes_on_as_without_it(kind: str, name: str, tmp_path: Path):
    """The same plan: no bit differs between kept, saved and never kept."""
    llm, path = _llm(name, kind), tmp_path / "a.session"
    llm.forget()
    prompt = random_ids(40)
    (first,) = llm.generate([prompt], greedy(20))
    ids = [*prompt, *first.token_ids]
    llm.save_session(path)
    (kept,) = llm.generate([ids], greedy(8))
    llm.forget()
    assert llm.load_session(path) == ids
    (loaded,) = llm.generate([ids], greedy(8))
    llm.forget()
    (anew,) = llm.generate([ids], greedy(8))
    assert (kept.cached_tokens, loaded.cached_tokens, anew.cached_tokens) == (32, 32, 0)
    assert kept.logprobs == loaded.logprobs == anew.logprobs
    assert [p.name for p in tmp_path.iterdir()] == ["a.session"]


@pytest.mark.parametrize("name", MODELS)
def test_a_session_goes_on_under_every_plan(name: str, tmp_path: Path):
    llm, path = _llm(name, "uneven"), tmp_path / "a.session"
    prompt = random_ids(40)
    (whole,) = llm.generate([prompt], greedy(20))
    llm.forget()
    (first,) = llm.generate([prompt], greedy(9))
    llm.save_session(path)
    for kind in PLANS:
        other = _llm(name, kind)
        other.forget()
        ids = other.load_session(path)
        assert ids == [*prompt, *first.token_ids]
        (done,) = other.generate([ids], greedy(11))
        assert done.token_ids == whole.token_ids[9:], kind
        if name != "windows":
            assert done.cached_tokens == 32
        other.forget()


def test_latent_vectors_are_stored_once_and_without_values(tmp_path: Path):
    """Two devices have a copy each; a session holds one, and another plan goes on from it."""
    rope, latent = Rope(10000.0, 8, "neighbours"), Latent(q_rank=0, nope=16, v_dim=12)
    model = model_config([layer_config(1, 4, 40, v_dim=32, rope=rope, latent=latent)])
    cut = dict(devices=2, split_mode="tensor", kv_replicate=True, kv="host")
    ids, path = random_ids(PROMPT), tmp_path / "latent.session"
    first = make_llm(model, ctx=CTX, **cut)
    expected = first.generate(ids, greedy(2 * STEPS))[0].token_ids
    [begun] = first.generate(ids, greedy(STEPS))
    first.save_session(path)
    with safe_open(path, "np") as file:
        k, v = (file.get_tensor(f"{side}.0") for side in "kv")
    assert k.shape[0] == v.shape[0] == 1 and k.shape[2] == 40 and v.shape[2] == 0
    second = make_llm(model, ctx=CTX)
    [done] = second.generate([second.load_session(path)], greedy(STEPS))
    assert (*begun.token_ids, *done.token_ids) == expected


def test_the_sequence_that_finished_last_is_saved(tmp_path: Path):
    llm, path = _llm("plain", "host"), tmp_path / "a.session"
    llm.forget()
    done = llm.generate([random_ids(40), random_ids(20, seed=1)], greedy(4))
    llm.save_session(path)
    assert llm.load_session(path) == [*random_ids(20, seed=1), *done[1].token_ids]
    llm.generate([random_ids(30, seed=2)], greedy(4))
    llm.save_session(path)
    assert llm.load_session(path)[:30] == random_ids(30, seed=2)


def test_bfloat16_is_stored_as_it_is(tmp_path: Path):
    llm = make_llm(small_model(), ctx=CTX, cache_type_k="bf16", cache_type_v="bf16")
    llm.generate([random_ids(20)], greedy(2))
    llm.save_session(tmp_path / "a")
    before = llm.engine.read_row(0, 21)
    llm.forget()
    llm.load_session(tmp_path / "a")
    after = llm.engine.read_row(0, 21)
    assert before[0].k.dtype == jnp.bfloat16
    assert all(map(_same, after, before))


# Files that are refused


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    llm = _llm("blocks", "fused")
    llm.generate([random_ids(40)], greedy(4))
    llm.save_session(tmp_path / "good")
    return tmp_path / "good"


def _refused(path: Path, message: str, llm: LLM | None = None) -> None:
    llm = llm or _llm("blocks", "fused")
    with pytest.raises(SessionError, match=message) as caught:
        llm.load_session(path)
    text = str(caught.value)
    assert str(path) in text and "\n" not in text
    assert llm.generate([random_ids(4)], greedy(2))[0].token_ids


def _rewritten(path: Path, **changes: Any) -> Path:
    """The file with other metadata; a change to None leaves a field out."""
    with safe_open(path, "np") as file:
        facts, tensors = file.metadata(), {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118
    facts = {n: v for n, v in (facts | changes).items() if v is not None}
    save_file(tensors, path, metadata=facts)
    return path


class _Block(DecoderBlock):
    """Of the same sizes as another."""


def _other(**changes: Any) -> LLM:
    model: ModelConfig = changes.pop("model", MODELS["blocks"])
    return make_llm(model, **({"ctx": CTX} | TYPES["blocks"] | changes))


def test_a_session_of_something_else(saved: Path):
    named = replace(MODELS["blocks"], name="other")
    _refused(saved, "random .random, 2 layers. and this is other", _other(model=named))
    wide = with_layers(MODELS["blocks"], mlp=96)
    _refused(saved, "load the model that it was saved from", _other(model=wide))
    _refused(saved, "load the model that it was saved from", _other(block=_Block))
    _refused(saved, "other weights of random .* load the file that it", _other(seed=1))
    _refused(saved, "q4_0 rotated and this model's.*q8_0 rotated", _other(cache_type_v="q8_0"))
    _refused(saved, "q8_0 rotated/.* as q8_0/q4_0", _other(kv_rotate=False))
    _refused(saved, "43 positions and the context 32; raise ctx", _other(ctx=32))


def test_a_file_that_is_damaged_or_foreign(saved: Path, tmp_path: Path):
    data = saved.read_bytes()
    bad = tmp_path / "bad"
    for content in (b"", b"GGUF", data[:7], data[:200], data[:-1], data[:-5000]):
        bad.write_bytes(content)
        _refused(bad, "damaged or no session")
    save_file({"a": np.zeros(3)}, bad)
    _refused(bad, "no session")
    _refused(tmp_path / "missing", "cannot read")
    _refused(tmp_path, "is a folder")


def test_changed_bytes_are_found(saved: Path, tmp_path: Path):
    """Those of the header too, but for names that are only told."""
    data, bad = saved.read_bytes(), tmp_path / "bad"
    rng, llm = np.random.default_rng(0), _llm("blocks", "fused")
    right = llm.load_session(saved)
    tensors = len(data) - sum(a.nbytes for a in load_file(saved).values())
    for at in (*rng.integers(0, tensors, 60), *rng.integers(tensors, len(data), 60)):
        changed = bytearray(data)
        changed[at] ^= 1 << int(rng.integers(8))
        bad.write_bytes(changed)
        if at < tensors:
            with suppress(SessionError):
                assert llm.load_session(bad) == right
        else:
            with pytest.raises(SessionError, match="damaged"):
                llm.load_session(bad)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(version="1"), "version 1 of the format and this is version 3"),
        (dict(cached=None), "damaged"),
        (dict(cached="many"), "damaged"),
        (dict(cached="42"), "damaged"),
        (dict(cached="0", firsts="[0, 0]"), "damaged"),
        (dict(prefilled="90"), "damaged"),
        (dict(firsts="[0]"), "damaged"),
        (dict(firsts="[3, 3]"), "damaged"),
        (dict(firsts="{"), "damaged"),
        (dict(cache="[]"), "damaged"),
    ],
    ids=str,
)
def test_facts_that_contradict_the_tensors(saved: Path, changes: dict[str, Any], message: str):
    _refused(_rewritten(saved, **changes), message)


def test_a_file_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What was there before stays."""
    llm, path = _llm("plain", "fused"), tmp_path / "a"
    llm.generate([random_ids(20)], greedy(2))
    nowhere = tmp_path / "no folder" / "a"
    with pytest.raises(SessionError) as refused:
        llm.save_session(nowhere)
    reason = "No such file or directory"
    assert str(refused.value) == f"cannot write the session {str(nowhere)!r}: {reason}"
    for refuse in (llm.save_session, llm.load_session):
        with pytest.raises(SessionError, match="is a folder; give the path of a file"):
            refuse(tmp_path)
    llm.save_session(path)
    before = path.read_bytes()

    def full(*args: Any, **more: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jaxllm.session.save_file", full)
    with pytest.raises(SessionError, match="No space left"):
        llm.save_session(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_without_a_sequence_or_without_rows_that_keep_it(tmp_path: Path):
    llm = make_llm(small_model())
    with pytest.raises(SessionError, match="no session to save"):
        llm.save_session(tmp_path / "a")
    llm.generate([[1, 2, 3]], greedy(2))
    llm.save_session(tmp_path / "a")
    plain = make_llm(small_model(), prefix_cache=False)
    plain.generate([[1, 2, 3]], greedy(2))
    with pytest.raises(SessionError, match="no session to save"):
        plain.save_session(tmp_path / "b")
    with pytest.raises(OptionError, match="prefix_cache"):
        plain.load_session(tmp_path / "a")


def test_the_header_says_what_is_in_it(saved: Path):
    with safe_open(saved, "np") as file:
        facts = file.metadata()
        assert facts["format"] == "jaxllm session" and facts["version"] == "3"
        assert json.loads(facts["cache"]) == ["q8_0 rotated/q4_0 rotated"] * 2
        assert (facts["cached"], facts["prefilled"]) == ("43", "40")
        assert file.get_tensor("k.0").shape == (8, 43, 34)
        assert file.get_tensor("v.1").shape == (8, 43, 36)
        assert len(file.get_tensor("tokens")) == 44
