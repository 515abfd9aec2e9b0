"""Sequences of a batch are what they are alone, in any slot, order and company."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.engine.prefill import prefill
from jaxllm.models.config import Draft
from jaxllm.models.decoder import DecoderBlock
from jaxllm.models.recurrent import DeltaNet
from mesh_models import MODELS
from support import (
    PLACES,
    assert_close,
    assert_same_bytes,
    feed,
    layer_config,
    make_llm,
    model_config,
    random_ids,
    step,
)

SLOTS = 3
LENGTHS = (50, 17, 33, 5)
BUDGETS = (3, 9, 6, 14)  # the longest prompt finishes first
PROMPTS = [random_ids(n, 128, seed=n) for n in LENGTHS]
FORCED = [random_ids(n, 128, seed=100 + n) for n in BUDGETS]
ATTENTION = layer_config(8, 2, 16, mlp=64)
NET = DeltaNet(groups=5, v_heads=1, dim=8, kernel=4, tiled=True, joined=False)
RECURRENT = layer_config(0, 1, 16, mlp=64, rope=None, recurrent=NET)
DRAFTED = DecoderBlock, model_config([RECURRENT, ATTENTION], draft=Draft(ATTENTION))
MODEL = model_config([layer_config(4, 2, 32, window=24), layer_config(4, 2, 32)], vocab=128)


def _place(device: int, layer: int, first: int) -> str:
    return PLACES[(device + layer + first // 16) % 3]


KINDS = {
    "fused": dict(engine="fused"),
    "device": dict(engine="staged"),
    "host-0": dict(kv="host", prefetch=0),
    "host-1": dict(kv="host", prefetch=1),
    "host-4": dict(kv="host", prefetch=4),
    "mixed": dict(kv="host", place=_place),
    "uneven": dict(kv="host", devices=3, split_mode="tensor", attn_split="2,1,0", prefetch=4),
}


@cache
def _llm(kind: str, slots: int = SLOTS) -> LLM:
    return make_llm(MODEL, parallel=slots, group_pages=2, **KINDS[kind])


def _serve(llm: LLM, order: tuple[int, ...], slots: list[int]) -> dict[int, np.ndarray]:
    """Work off sequences in `order`, `slots` the rows to use; every logit of each, [T, V]."""
    waiting = list(order)
    rows: dict[int, tuple[int, int]] = {}  # row -> sequence, tokens fed after its prompt
    found: dict[int, list[np.ndarray]] = {}
    try:
        while waiting or rows:
            for row in slots:
                if row not in rows and waiting:
                    sequence = waiting.pop(0)
                    found[sequence] = [feed(llm, row, PROMPTS[sequence])]
                    rows[row] = (sequence, 0)
            tokens, lengths = [0] * SLOTS, [0] * SLOTS
            for row, (sequence, fed) in rows.items():
                tokens[row] = FORCED[sequence][fed]
                lengths[row] = LENGTHS[sequence] + fed
            logits = step(llm, tokens, lengths)
            for row, (sequence, fed) in list(rows.items()):
                found[sequence].append(logits[row : row + 1])
                rows[row] = (sequence, fed + 1)
                if fed + 1 == BUDGETS[sequence]:
                    llm.engine.release(row)
                    del rows[row]
    finally:
        for row in range(SLOTS):
            llm.engine.release(row)
    return {sequence: np.concatenate(parts) for sequence, parts in found.items()}


@cache
def _each_alone(kind: str) -> tuple[np.ndarray, ...]:
    """Every sequence in row 0 of an otherwise empty batch of as many slots."""
    return tuple(_serve(_llm(kind), (i,), [0])[i] for i in range(len(PROMPTS)))


def _orders() -> list[tuple[tuple[int, ...], list[int]]]:
    """All orders of the sequences, each with an order of slots."""
    slots = list(itertools.permutations(range(SLOTS)))
    orders = list(itertools.permutations(range(len(PROMPTS))))
    return [(order, list(slots[i % len(slots)])) for i, order in enumerate(orders)]


@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_change_no_bit(kind: str):
    alone = _each_alone(kind)
    for order, slots in _orders()[:: 1 if kind == "host-4" else 4]:
        together = _serve(_llm(kind), order, slots)
        for sequence, logits in together.items():
            assert_same_bytes(logits, alone[sequence], f"{kind} {order} {slots}: {sequence}")


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("fused", "device", "uneven")])
def test_place_and_prefetch_change_no_bit(kind: str):
    for found, expected in zip(_each_alone(kind), _each_alone("device"), strict=True):
        assert_same_bytes(found, expected, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_batch_agrees_with_one_slot(kind: str):
    one = make_llm(MODEL)
    for i, found in enumerate(_each_alone(kind)):
        expected = [feed(one, 0, PROMPTS[i])]
        for fed, token in enumerate(FORCED[i]):
            expected.append(step(one, [token], [LENGTHS[i] + fed]))
        one.engine.release(0)
        assert_close(found, np.concatenate(expected), what=f"{kind}: sequence {i}")


@pytest.mark.parametrize(
    "kind", [*(pytest.param(k, marks=pytest.mark.smoke) for k in ("fused", "host-4")), "uneven"]
)
def test_more_prompts_than_slots(kind: str):
    greedy = SamplingParams(max_tokens=12, temperature=0)
    llm = _llm(kind)
    together = llm.generate(PROMPTS, greedy)
    for prompt, completion in zip(PROMPTS, together, strict=True):
        assert completion.token_ids == llm.generate([prompt], greedy)[0].token_ids
        assert completion.prompt_tokens == len(prompt)
        assert completion.finish_reason == "length"


def test_link_bytes_of_a_batch():
    """What a step of several rows sends is what its rows' own pages take."""
    llm = _llm("host-4")
    lengths = [len(feed(llm, row, PROMPTS[row])) for row in range(SLOTS)]
    before = llm.engine.link_bytes()[0]
    step(llm, [1, 2, 3], lengths)
    sent = llm.engine.link_bytes()[0] - before
    for row in range(SLOTS):
        llm.engine.release(row)
    assert sent == sum(llm.plan.link_bytes(0, n) for n in lengths)


@pytest.mark.parametrize("kind", ["host-0", "host-1", "host-4", "uneven"])
def test_link_bytes_of_prompts_among_others(kind: str):
    """A chunk sends its own row's pages and no others, a step those of all rows: whatever rows
    have mixed in their steps, and when one of them ends and another begins in its place."""
    llm = _llm(kind)
    devices, lengths = range(len(llm.plan.mesh)), [0] * SLOTS
    sent = np.zeros(len(devices), np.int64)

    def check(*positions: int) -> None:
        nonlocal sent
        before, sent = sent, np.asarray(llm.engine.link_bytes())
        planned = [sum(llm.plan.link_bytes(d, n) for n in positions) for d in devices]
        np.testing.assert_array_equal(sent - before, planned, str(positions))

    sent = np.asarray(llm.engine.link_bytes())
    try:
        for row, prompt in [(0, 0), (1, 2), (2, 1), (1, 0), (0, 3), (1, 2)]:
            llm.engine.release(row)
            lengths[row] = 0
            for _, used, _ in prefill(llm.engine, row, PROMPTS[prompt], llm.plan.options.ubatch):
                check(lengths[row])
                lengths[row] += used
            for _ in range(12):
                step(llm, [1, 2, 3], lengths)
                check(*lengths)
                lengths = [n + 1 if n else 0 for n in lengths]
        for row in range(SLOTS):  # which may also go on alone
            llm.engine.forward(np.asarray([[1]], np.int32), row, np.asarray([lengths[row]]))
            check(lengths[row])
    finally:
        for row in range(SLOTS):
            llm.engine.release(row)


@pytest.mark.parametrize("kind", ["fused", "host-4", "uneven"])
@pytest.mark.parametrize("model", ["recurrent", "gemma2", "encoded", "draft"])
def test_prompts_in_parts_among_others(kind: str, model: str):
    """With -b, states, windows, what an encoder left and what a draft waits for stay as they are
    while a row's prompt is half done."""
    block, cfg = DRAFTED if model == "draft" else MODELS[model]
    arguments = KINDS[kind] | dict(parallel=2, group_pages=2, prefix_cache=False, block=block)
    if model == "draft":
        arguments |= dict(spec_type="draft-mtp", spec_draft_n_max=2)
    ubatch = 64 if model == "encoded" else 16  # an encoder reads all at once
    prompts = [random_ids(n, cfg.vocab, seed=n) for n in (9, 60, 35, 17)]
    whole, parts = (
        make_llm(cfg, ubatch=ubatch, batch=batch, **arguments) for batch in (1024, ubatch)
    )
    for params in (SamplingParams(12, temperature=0), SamplingParams(12, temperature=1, seed=1)):
        expected, found = (llm.generate(prompts, params) for llm in (whole, parts))
        assert [c.token_ids for c in found] == [c.token_ids for c in expected]
