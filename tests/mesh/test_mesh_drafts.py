"""A draft's layer over unlike shares: its heads, its cache and its budget."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM, OptionError
from jaxllm.engine.drafting import DraftingEngine
from jaxllm.errors import ModelError
from jaxllm.models.config import Draft, ModelConfig
from jaxllm.models.decoder import DecoderBlock
from jaxllm.planning import plan_config
from jaxllm.testing import assert_partition, assert_weights_as_planned
from sharding import Mesh
from support import (
    assert_close,
    assert_same_bytes,
    feed,
    layer_config,
    make_llm,
    model_config,
    random_ids,
)

CUT = dict(devices=3, split_mode="tensor", attn_split="2,1,0", link_gbps="24.2,3.3,10")
LAYER = layer_config(3, 2, 16, mlp=96)
RECURRENT = replace(LAYER, kv_heads=0, q_per_kv=1)
PROMPT = random_ids(60)


def _config(ends: bool = False) -> ModelConfig:
    """One layer and a draft's, which may have a table, a norm and a head of its own."""
    return model_config([LAYER], draft=Draft(LAYER, table=ends, norm=ends, head=ends))


def _llm(cfg: ModelConfig, **arguments: Any) -> LLM:
    return make_llm(cfg, spec_type="draft-mtp", **arguments)


def test_a_cut_draft_is_that_of_one_device():
    cfg = _config(ends=True)
    alone = _llm(cfg)
    expected = alone.draft_logits(PROMPT)
    assert expected.shape == (60, cfg.vocab)
    # A draft takes no part in what the model says.
    assert_same_bytes(alone.logits(PROMPT), make_llm(cfg).logits(PROMPT))
    found = {}
    for kv in ("device", "host"):
        cut = CUT if kv == "host" else {k: v for k, v in CUT.items() if k != "link_gbps"}
        llm = _llm(cfg, kv=kv, engine="staged", **cut)
        assert_partition(llm.plan)
        assert_weights_as_planned(llm)
        found[kv] = llm.draft_logits(PROMPT)
        assert_close(found[kv], expected)
    assert_same_bytes(found["host"], found["device"], "host against device")
    heads = [stop - start for start, stop in llm.plan.layers[-1].groups]
    assert heads == [2, 1, 0]


def test_padded_slices_draft_alike():
    cut = _llm(_config(), devices=2, split_mode="tensor", engine="fused")
    assert_close(cut.draft_logits(PROMPT), _llm(_config()).draft_logits(PROMPT))


@pytest.mark.parametrize("budget", [0, 1, 2, 99])
def test_scenario_14_each_context_has_its_own_count(budget: int):
    """8 layers with attention in every fourth, and a draft's."""
    layers = [LAYER if i % 4 == 3 else RECURRENT for i in range(8)]
    cfg = model_config(layers, draft=Draft(LAYER))
    plan = _plan(cfg, kv_gpu_layers=budget, kv_gpu_layers_draft=budget)
    for kept, layers_of in ((plan.residency.devices, 2), (plan.residency.drafts, 1)):
        got = min(budget, layers_of)
        assert sum(k.requested_layers for k in kept) == sum(k.layers for k in kept) == got
    for option, count in (("-kvgl 99", "2 layers"), ("-kvgld 99", "1 layer")):
        clamped = [n for n in plan.notes if option in n and count in n]
        assert len(clamped) == (budget == 99)
    text = str(plan)
    assert "8 layers and 1 of a draft" in text and "draft asked to keep" in text
    kept = [d["draft_kept"]["layers"] for d in plan.to_dict()["devices"]]
    assert sum(kept) == min(budget, 1)


def _plan(cfg: ModelConfig, **budget: int) -> Any:
    cut: dict[str, Any] = dict(split_mode="tensor", kv="host", ctx=128, page=16, ubatch=16)
    made = plan_config(DecoderBlock, cfg, Mesh.virtual(2), spec_type="draft-mtp", **cut, **budget)
    return made.plan


def test_what_needs_a_draft_says_so():
    with pytest.raises(OptionError, match="load the model with spec_type"):
        make_llm(_config()).draft_logits(PROMPT)
    with pytest.raises(ModelError, match="0 layers that predict tokens ahead"):
        _llm(model_config([LAYER]))
    with pytest.raises(OptionError, match="spec_type must be one of none, draft-mtp, not 'mtp'"):
        make_llm(_config(), spec_type="mtp")
    with pytest.raises(OptionError, match="--spec-draft-n-max is 3; it must be less than"):
        _llm(_config(), ubatch=2)
    with pytest.raises(OptionError, match="a fit does not count a draft"):
        _llm(_config(), fit=True)


def test_link_bytes_of_drafts_in_a_batch():
    """Rows draft together and are verified each alone: what is verified sends its row's pages."""
    llm = _llm(_config(), parallel=2, kv="host", spec_draft_n_max=2, **CUT)
    engine, prompts = llm.engine, [random_ids(n, seed=n) for n in (70, 41)]
    assert isinstance(engine, DraftingEngine)
    for row, prompt in enumerate(prompts):
        feed(llm, row, prompt)
    tokens, starts = np.asarray([1, 2], np.int32), np.asarray([70, 41], np.int32)
    for _ in range(3):
        before = engine.target.link_bytes(), engine.draft.link_bytes()
        found = engine.advance(tokens, starts, np.asarray([9, 9]))
        for part, was, steps in zip((engine.target, engine.draft), before, (1, 3), strict=True):
            for device, (old, new) in enumerate(zip(was, part.link_bytes(), strict=True)):
                planned = sum(part.plan.link_bytes(device, n) for n in starts.tolist())
                assert new - old == steps * planned
                assert (planned > 0) == (device < 2)
        tokens = np.asarray([ids[-1] for ids in found], np.int32)
        starts = starts + [len(ids) for ids in found]
