"""Layers that predict tokens ahead (MTP) against llama.cpp's: along a prompt and in a chain."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archs
from jaxllm import SamplingParams
from parity import UNEVEN, load_model, reference
from support import assert_same_bytes, feed, nmse

NAMES = "qwen35-mtp", "qwen35-mtp-accept", "qwen35moe-mtp", "qwen3next-mtp"
LIMIT = 1e-10
AT = np.zeros((1, 1), np.int32)
PLANS: dict[str, dict[str, Any]] = {
    "one": {},
    "uneven": UNEVEN,
    "resident": UNEVEN | {"kv": "device"},
}


def drafts(name: str) -> dict[str, np.ndarray]:
    """What llama.cpp drafts after the prompt of a model's reference."""
    assert archs.SHARED is not None
    with np.load(archs.SHARED / "archs" / "drafts" / f"{name}.npz") as file:
        return {key: file[key] for key in file.files}


@pytest.mark.parity
@pytest.mark.parametrize("name", NAMES)
def test_draft(name: str, shared: Path):
    """On one device and cut unevenly, the caches in host memory and, byte for byte, on devices."""
    expected = drafts(name)
    tokens = expected["tokens"].tolist()
    found = {}
    for plan, cut in PLANS.items():
        llm = load_model(name, spec_type="draft-mtp", **cut)
        rows = llm.draft_logits(tokens)
        assert nmse(rows, expected["mtp_logits"]) <= LIMIT
        assert nmse(feed(llm, 0, tokens), reference(name)["logits"]) <= LIMIT
        chain = llm.engine.ahead(expected["fed"][:1], np.asarray([len(tokens)], np.int32))
        steps, ids = zip(*islice(chain, 6), strict=True)
        steps = [llm.engine.draft.logits(hidden, AT, 0)[0] for hidden in steps]
        assert nmse(np.asarray(steps), expected["draft_logits"]) <= LIMIT
        np.testing.assert_array_equal(np.concatenate(ids), expected["draft_ids"])
        found[plan] = np.concatenate([rows, steps])
    assert_same_bytes(found["uneven"], found["resident"], "host against device")


@pytest.mark.parity
@pytest.mark.parametrize("plan", ["one", "uneven"])
def test_rounds(plan: str, shared: Path, monkeypatch: pytest.MonkeyPatch):
    """32 greedy tokens in llama.cpp's rounds of three drafts: how many are accepted in each, what
    comes next, and the tokens of plain greedy decoding."""
    expected = drafts("qwen35-mtp-accept")
    llm = load_model("qwen35-mtp-accept", spec_type="draft-mtp", **PLANS[plan])
    rounds, right = [], llm.engine.advance

    def noted(*args: Any) -> list[list[int]]:
        found = right(*args)
        rounds.append(found[0])
        return found

    monkeypatch.setattr(llm.engine, "advance", noted)
    params = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
    [done] = llm.generate([expected["tokens"].tolist()], params)
    np.testing.assert_array_equal(done.token_ids, expected["rounds_plain_ids"])
    accepted = [len(found) - 1 for found in rounds]
    np.testing.assert_array_equal(accepted, expected["rounds_accepted"])
    np.testing.assert_array_equal([found[-1] for found in rounds], expected["rounds_next"])
    assert done.accepted_tokens == sum(accepted)
