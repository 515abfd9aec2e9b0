"""Every cut of one small model: the same bytes wherever the cache lives, one device's results."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from support import (
    PLACES,
    Trace,
    assert_close,
    assert_same_bytes,
    make_llm,
    planned_bytes,
    random_ids,
    run,
    small_model,
    with_layers,
)

PROMPT, STEPS = 40, 8
# Shares of attention, and whether weights have the same or others.
SPLITS = {
    "1,1": [True],
    "2,1": [True, False],
    "1,0": [True, False],
    ".33,.67": [True],
    "7,1": [False],
    "1,1,1": [True, False],
    "2,1,0": [True, False],
    "1,0,1": [True, False],
    "1,1,1,1,1": [False],
    "3,1,0,2,1": [True, False],
    "1,1,1,1,1,1,1,1": [True],
    "1,0,0,2,0,0,0,1": [False],
}
CASES = [
    pytest.param(attn, same, marks=marks)
    for attn, weights in SPLITS.items()
    for same in weights
    for marks in [
        [
            pytest.mark.xdist_group(f"matrix-{attn}"),
            *[pytest.mark.smoke] * (attn == "2,1,0" and same),
        ]
    ]
]


def _weights(attn: str, same: bool) -> str:
    """Weight shares: those of attention, or others that no device can confuse with them."""
    if same:
        return attn
    shares = attn.split(",")
    if len(set(shares)) > 1:
        return ",".join(reversed(shares))
    return ",".join(str(i + 1) for i in range(len(shares)))


@cache
def _alone(tied: bool) -> tuple[Trace, tuple[int, ...]]:
    """One device's logits, and the tokens that greedy decoding gives it."""
    llm = make_llm(small_model(tied=tied))
    token = int(run(llm, random_ids(PROMPT), []).prompt[-1].argmax())
    forced = [token]
    for _ in range(STEPS - 1):
        forced.append(int(run(llm, random_ids(PROMPT), forced).steps[-1].argmax()))
    return run(llm, random_ids(PROMPT), forced), tuple(forced)


def _scattered(device: int, layer: int, first: int) -> str:
    """Places that neighbours in no direction share."""
    return PLACES[(device + 2 * layer + first // 16) % 3]


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("together", [2, 4])
def test_pages_leave_a_tail_together(together: int, window: int | None):
    """The bytes that are sent, and logits: the same in every place, and nearly those of pages that
    leave one by one."""
    model = small_model() if window is None else with_layers(small_model(), window=window)
    cut = dict(devices=2, split_mode="tensor", attn_split="1,1", ctx=256, group_pages=4)
    prompt, forced = random_ids(90), [1] * 50
    expected = run(make_llm(model, engine="staged", **cut), prompt, forced)
    found = []
    for arguments in (dict(kv="host"), dict(engine="staged"), dict(kv="host", place=_scattered)):
        llm = make_llm(model, tail_pages=together, **cut, **arguments)
        found.append(run(llm, prompt, forced))
        if arguments == dict(kv="host"):
            np.testing.assert_array_equal(found[0].sent, planned_bytes(llm, 90, 50))
            assert found[0].sent.any()
        assert_same_bytes(found[-1].logits, found[0].logits, str(arguments))
    assert_close(found[0].logits, expected.logits, what="together against one by one")


@pytest.mark.parametrize(("attn", "same"), CASES)
def test_place_changes_no_bit(attn: str, same: bool):
    devices, tied = attn.count(",") + 1, same  # both kinds of head
    cut = dict(
        devices=devices, split_mode="tensor", attn_split=attn, tensor_split=_weights(attn, same)
    )
    reference, forced = _alone(tied)
    model = small_model(tied=tied)
    resident = make_llm(model, engine="staged", kv="device", **cut)
    expected = run(resident, random_ids(PROMPT), forced)
    assert_close(expected.logits, reference.logits, what="staged against one device")
    assert not expected.sent.any(), "pages on the device were sent"

    def same_bytes(what: str, **arguments) -> Trace:
        llm = make_llm(model, engine="staged", **cut, **arguments)
        found = run(llm, random_ids(PROMPT), forced)
        assert_same_bytes(found.logits, expected.logits, what)
        return found

    streamed = make_llm(model, kv="host", **cut)
    found = run(streamed, random_ids(PROMPT), forced)
    assert_same_bytes(found.logits, expected.logits, "host against device")
    planned = planned_bytes(streamed, PROMPT, STEPS)
    np.testing.assert_array_equal(found.sent, planned)
    idle = [d for d, share in enumerate(attn.split(",")) if float(share) == 0]
    assert not found.sent[:, idle].any()
    assert all(found.sent[-1, d] for d in range(devices) if d not in idle)
    same_bytes("pageable", kv="host", place=lambda *_: "pageable")
    same_bytes("scattered", kv="host", place=_scattered)
    same_bytes("one copy at a time", kv="host", prefetch=1)
    same_bytes("four copies ahead", kv="host", prefetch=4)

    fused = make_llm(model, engine="fused", **cut)
    both = run(fused, random_ids(PROMPT), forced)
    assert_close(both.logits, expected.logits, what="fused against staged")
    assert_close(both.logits, reference.logits, what="fused against one device")
