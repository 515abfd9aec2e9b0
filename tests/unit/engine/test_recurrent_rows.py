"""Rows of models with recurrent layers: what a step leaves alone, reuse of prefixes, sessions."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.models.recurrent import DeltaNet
from support import assert_same_bytes, layer_config, make_llm, model_config, random_ids

PAGE = 16
ENGINES = {
    "fused": {},
    "staged": {"engine": "staged"},
    "host": {"kv": "host"},
    "host states": {"recurrent_state": "host"},
}
CUT = dict(devices=3, split_mode="tensor", attn_split="2,1,0", kv="host")


@cache
def _llm(engine: str = "fused", cut: bool = False) -> LLM:
    attention = layer_config(4, 2, 16, scale=0.25)
    net = DeltaNet(groups=5, v_heads=1, dim=8, kernel=4, tiled=True, joined=False)
    linear = layer_config(0, 1, 16, rope=None, recurrent=net)
    arguments = CUT if cut else ENGINES[engine]
    return make_llm(model_config([linear, attention]), parallel=2, **arguments)


def _run(llm: LLM, prompt: list[int], tokens: int = 4) -> tuple[tuple[int, ...], int]:
    [done] = llm.generate(prompt, SamplingParams(max_tokens=tokens, temperature=0.0))
    return done.token_ids, done.cached_tokens


@pytest.mark.parametrize("engine", ENGINES)
def test_rows_without_tokens_keep_their_state(engine: str):
    llm = _llm(engine)
    llm.forget()
    for row in range(2):
        tokens = np.asarray([random_ids(PAGE, seed=row)], np.int32)
        llm.engine.forward(tokens, row, np.zeros(1, np.int32), 5 + row)
    before = [llm.engine.read_states(row) for row in range(2)]
    llm.engine.forward(np.zeros((2, 1), np.int32), 0, np.asarray([-1, 6], np.int32))
    after = [llm.engine.read_states(row) for row in range(2)]
    for old, new in zip(before[0], after[0], strict=True):
        for a, b in zip(old, new, strict=True):
            assert_same_bytes(a, b)
    assert any((a != b).any() for a, b in zip(before[1][0], after[1][0], strict=True))
    for row in range(2):
        llm.engine.release(row)


@pytest.mark.parametrize("engine", ENGINES)
def test_padding_and_chunks_change_nothing(engine: str):
    """A chunk of five real tokens leaves what five steps of the same tokens leave."""
    llm = _llm(engine)
    llm.forget()
    ids = random_ids(PAGE)
    llm.engine.forward(np.asarray([ids], np.int32), 0, np.zeros(1, np.int32), 5)
    padded = llm.engine.read_states(0)
    other = [*ids[:5], *random_ids(PAGE - 5, seed=9)]
    llm.engine.forward(np.asarray([other], np.int32), 0, np.zeros(1, np.int32), 5)
    for old, new in zip(padded[0], llm.engine.read_states(0)[0], strict=True):
        assert_same_bytes(old, new)
    for at, token in enumerate(ids[:5]):
        llm.engine.forward(np.asarray([[token], [0]], np.int32), 0, np.asarray([at, -1], np.int32))
    for old, new in zip(padded[0], llm.engine.read_states(0)[0], strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-4, atol=1e-7)
    llm.engine.release(0)


@pytest.mark.parametrize("engine", ENGINES)
def test_prefixes_end_where_the_state_does(engine: str):
    llm = _llm(engine)
    prompt, more = random_ids(2 * PAGE), random_ids(7, seed=1)
    llm.forget()
    expected, _ = _run(llm, [*prompt, *more])
    llm.forget()
    _run(llm, prompt, tokens=1)  # ends at the prompt's end
    assert _run(llm, [*prompt, *more]) == (expected, 2 * PAGE)
    assert _run(llm, [*prompt, *more]) == (expected, 0)  # the row has gone on since
    llm.forget()


def test_sessions_of_any_plan(tmp_path: Path):
    """A session holds whole steps of a sequence, and goes on under another plan."""
    prompt = random_ids(2 * PAGE + 5)
    alone, cut = _llm(), _llm(cut=True)
    alone.forget()
    first, _ = _run(alone, prompt)
    alone.save_session(tmp_path / "session")
    after = [*prompt, *first, *random_ids(3, seed=2)]
    alone.forget()
    expected, _ = _run(alone, after)
    for llm in (alone, cut):
        llm.forget()
        assert llm.load_session(tmp_path / "session") == [*prompt, *first]
        assert _run(llm, after) == (expected, 2 * PAGE)
