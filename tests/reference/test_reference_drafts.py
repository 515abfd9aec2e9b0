"""Layers that predict tokens ahead (MTP) against llama.cpp's: along a prompt and in a chain."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from test_reference_archs import ENGINES, _load, _reference, _spec

from support import assert_same_bytes, feed, nmse

NAMES = "qwen35-mtp", "qwen35-mtp-accept", "qwen35moe-mtp", "qwen3next-mtp"
LIMIT = 1e-10
AT = np.zeros((1, 1), np.int32)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_draft(name: str, shared: Path):
    """On one device and cut 2,1,0, the caches in host memory and, byte for byte, on devices."""
    with np.load(shared / "archs" / "drafts" / f"{name}.npz") as file:
        expected = {key: file[key] for key in file.files}
    tokens = expected["tokens"].tolist()
    found = {}
    for engine in ("fused", "uneven", "resident"):
        cut = ENGINES["uneven"] | {"kv": "device"} if engine == "resident" else ENGINES[engine]
        llm = _load(_spec(name), spec_type="draft-mtp", **cut)
        rows = llm.draft_logits(tokens)
        assert nmse(rows, expected["mtp_logits"]) <= LIMIT
        assert nmse(feed(llm, 0, tokens), _reference(shared, name)["logits"]) <= LIMIT
        chain = llm.engine.ahead(expected["fed"][:1], np.asarray([len(tokens)], np.int32))
        steps = [llm.engine.draft.logits(hidden, AT, 0)[0] for hidden in islice(chain, 6)]
        assert nmse(np.asarray(steps), expected["draft_logits"]) <= LIMIT
        np.testing.assert_array_equal(np.argmax(steps, axis=-1), expected["draft_ids"])
        found[engine] = np.concatenate([rows, steps])
    assert_same_bytes(found["uneven"], found["resident"], "host against device")
