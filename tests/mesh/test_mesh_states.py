"""Recurrent states in host memory: the same bytes of every logit, and what goes over the links."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxllm import SamplingParams
from jaxllm.testing import random_llm
from mesh_models import MODELS
from support import PAGE, assert_same_bytes, random_ids

CUT = dict(devices=3, split_mode="tensor", attn_split="2,1,0", kv="host")


@pytest.mark.parametrize(
    "cut",
    [dict(devices=1), dict(devices=2, split_mode="layer"), CUT],
    ids=["one", "layer", "tensor"],
)
def test_where_states_are_changes_no_bit(cut: dict[str, Any]):
    """Every kind of mixer; a step sends the states of all rows once, and the plan counts them."""
    block, cfg = MODELS["recurrent"]
    prompts = [random_ids(2 * PAGE + 5), random_ids(7, seed=1)]
    near, far = (
        random_llm(cfg, block, **({"engine": "staged", "parallel": 2, "recurrent_state": at} | cut))
        for at in ("device", "host")
    )
    assert_same_bytes(near.logits(prompts[0]), far.logits(prompts[0]))
    greedy = SamplingParams(max_tokens=6, temperature=0.0)
    for params in (greedy, SamplingParams(max_tokens=6, seed=5)):
        expected = [done.token_ids for done in near.generate(prompts, params)]
        assert [done.token_ids for done in far.generate(prompts, params)] == expected
    far.forget()
    before = far.engine.link_bytes()
    far.engine.forward(np.zeros((1, PAGE), np.int32), 0, np.zeros(1, np.int32))
    sent = [b - a for a, b in zip(before, far.engine.link_bytes(), strict=True)]
    assert sent == [far.plan.state_bytes(i) for i in range(cut["devices"])]
    for device in range(cut["devices"]):
        whole, kept = (llm.plan.cache_bytes(device) for llm in (near, far))
        assert kept["device"] == whole["device"] - sent[device]
        assert kept["host"] == whole["host"] + sent[device]
