"""Quantised caches under cuts of one small model: the same bytes wherever they live."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxllm import ModelConfig
from support import (
    PLACES,
    assert_close,
    assert_same_bytes,
    layer_config,
    make_llm,
    model_config,
    nmse,
    planned_bytes,
    random_ids,
    run,
)

PROMPT, STEPS = 70, 8
CUTS: dict[str, dict[str, Any]] = {
    "one": dict(devices=1),
    "2,1,0": dict(devices=3, split_mode="tensor", attn_split="2,1,0", tensor_split="1,1,2"),
}
CASES = [
    pytest.param("q4_0", "q4_0", "one", marks=pytest.mark.smoke),
    ("f32", "q8_0", "one"),
    ("q8_0", "q4_0", "2,1,0"),
]


def _model() -> ModelConfig:
    """Keys of 64 with values of 32, and a window that drops pages."""
    shape = dict(kv_heads=4, q_per_kv=2, k_dim=64, v_dim=32, scale=2.0)
    return model_config([layer_config(**shape), layer_config(**shape, window=30)])


def _scattered(device: int, layer: int, first: int) -> str:
    return PLACES[(device + 2 * layer + first // 16) % 3]


@pytest.mark.parametrize(("k", "v", "cut"), CASES)
def test_place_changes_no_bit(k: str, v: str, cut: str):
    types: dict[str, Any] = dict(cache_type_k=k, cache_type_v=v)
    arguments = types | CUTS[cut]
    prompt, forced = random_ids(PROMPT), random_ids(STEPS, seed=1)
    resident = run(make_llm(_model(), engine="staged", **arguments), prompt, forced)

    def streamed(what: str, **more: Any) -> np.ndarray:
        llm = make_llm(_model(), kv="host", **arguments, **more)
        found = run(llm, prompt, forced)
        assert_same_bytes(found.logits, resident.logits, what)
        if "place" not in more:
            np.testing.assert_array_equal(found.sent, planned_bytes(llm, PROMPT, STEPS))
        return found.sent

    sent = streamed("four ahead", prefetch=4)
    streamed("when needed", prefetch=0)
    streamed("pageable", place=lambda *_: "pageable")
    streamed("scattered", place=_scattered)

    # At position 70 the first layer has four full pages and the second the two that it sees.
    block = {"q8_0": 34, "q4_0": 18, "f32": 32 * 4}
    groups = [4] if cut == "one" else [3, 1, 0]
    assert sent[0].tolist() == [n * 16 * (4 + 2) * (2 * block[k] + block[v]) for n in groups]

    alone = run(make_llm(_model(), **types), prompt, forced)
    assert_close(resident.logits, alone.logits, 1e-6, "against one device")


@pytest.mark.parametrize(
    ("k", "v", "rotate", "limit"), [("q8_0", "q8_0", True, 2e-2), ("f32", "q4_0", False, 5e-2)]
)
def test_what_was_stored_is_read(k: str, v: str, rotate: bool, limit: float):
    """Also a chunk's own keys, in both engines, on two devices, in chunks of two sizes."""
    prompt = random_ids(300)
    arguments: dict[str, Any] = dict(ctx=512, ubatch=256, page=32)
    exact = make_llm(_model(), **arguments).logits(prompt)
    arguments |= dict(cache_type_k=k, cache_type_v=v, kv_rotate=rotate)
    fused = make_llm(_model(), **arguments).logits(prompt)
    host = make_llm(_model(), kv="host", **arguments).logits(prompt)
    assert_close(host, fused, 1e-6)
    assert 1e-8 < nmse(fused, exact) < limit
    other = arguments | dict(ubatch=32, devices=2, split_mode="tensor", engine="fused")
    assert_close(make_llm(_model(), **other).logits(prompt), fused, 1e-6)
