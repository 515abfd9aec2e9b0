"""Rows of a batch over recurrent layers against llama.cpp's logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import archs
from parity import SMALL, UNEVEN, load_model, reference
from support import feed, nmse, step


@pytest.mark.parity
@pytest.mark.skipif(archs.SHARED is None, reason="no folder of references")
@pytest.mark.parametrize("name", ["qwen35", "rwkv6-dense"])
@pytest.mark.parametrize("plan", [SMALL, UNEVEN], ids=["one", "uneven"])
def test_ragged_batch(name: str, plan: dict[str, Any]):
    """Rows of other lengths decode together; a row that takes no part keeps its state."""
    of = reference(name)
    llm = load_model(name, parallel=3, **plan)
    lengths = of["seq3_lens"].tolist()
    parts = np.split(of["tokens"], np.cumsum(lengths)[:-1])
    alone = [feed(llm, row, part.tolist()) for row, part in enumerate(parts)]
    assert nmse(np.concatenate(alone), of["seq3_logits_separate"]) <= 1e-9
    steps = of["seq3_greedy_ids"].T.tolist()
    for i, tokens in enumerate(steps[:8]):  # one row alone, then the others with it
        starts = [-1, lengths[1] + i, -1]
        llm.engine.forward(np.asarray(tokens, np.int32)[:, None], 0, np.asarray(starts, np.int32))
        llm.engine.settle(1, np.asarray([lengths[1] + i + 1]))
    chosen = []
    for i, tokens in enumerate(steps[:8]):
        fed = [tokens[0], steps[i + 8][1], tokens[2]]
        logits = step(llm, fed, [lengths[0] + i, lengths[1] + 8 + i, lengths[2] + i])
        chosen.append(logits.argmax(-1))
    found, ids = np.asarray(chosen).T, of["seq3_greedy_ids"]
    np.testing.assert_array_equal(found[[0, 2]], ids[[0, 2], 1:9])
    np.testing.assert_array_equal(found[1, :-1], ids[1, 9:])
