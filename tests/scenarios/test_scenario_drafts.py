"""Scenario 19: a draft under uneven splits changes no token of greedy decoding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jaxllm import SamplingParams
from jaxllm.models.config import Draft
from jaxllm.models.recurrent import DeltaNet
from support import layer_config, make_llm, model_config, random_ids

VOCAB = 130
ATTENTION = layer_config(8, 2, 16, mlp=64, scale=1.0)
NET = DeltaNet(groups=5, v_heads=1, dim=8, kernel=4, tiled=True, joined=False)
RECURRENT = layer_config(0, 1, 16, mlp=64, rope=None, recurrent=NET)
MODEL = model_config([RECURRENT, ATTENTION], draft=Draft(ATTENTION))
CUTS: dict[str, dict[str, Any]] = {
    "fused": {"devices": 1},
    "6,5": dict(devices=2, split_mode="tensor", attn_split="6,5", kv="host"),
}


@pytest.mark.parametrize("cut", ["6,5", pytest.param("fused", marks=pytest.mark.slow)])
def test_speculative_greedy_is_plain_greedy(cut: str, monkeypatch: pytest.MonkeyPatch):
    """16 query heads over 8 KV heads and a recurrent layer, whose state goes back with the tokens
    that are not taken; two rows that cross pages and multiples of ubatch. The draft of random
    weights is never right: here all but every fifth of what it says is put right."""
    prompts = [random_ids(20), random_ids(5, seed=1)]
    params = SamplingParams(max_tokens=24, temperature=0.0)
    llm = make_llm(MODEL, parallel=2, spec_type="draft-mtp", spec_draft_n_max=2, **CUTS[cut])
    monkeypatch.setattr(llm.engine, "count", 0)
    plain = llm.generate(prompts, params)
    assert not any(done.accepted_tokens for done in plain)
    whole = [(*ids, *done.token_ids, *range(3)) for ids, done in zip(prompts, plain, strict=True)]
    monkeypatch.undo()
    right = llm.engine.ahead

    def better(tokens: np.ndarray, starts: np.ndarray) -> Iterator[tuple[Any, np.ndarray]]:
        for i, (hidden, _) in enumerate(right(tokens, starts), start=1):
            pairs = zip(whole, (starts + i).tolist(), strict=True)
            yield hidden, np.asarray([(own[p] + (p % 5 == 0)) % VOCAB for own, p in pairs])

    monkeypatch.setattr(llm.engine, "ahead", better)
    found = llm.generate(prompts, params)
    assert [done.token_ids for done in found] == [done.token_ids for done in plain]
    assert all(8 <= done.accepted_tokens < 20 for done in found)
