"""Blocks of every family, caches of every type and other splits under the rules of the matrix; that
has every cut of one family."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from jaxllm import OptionError
from mesh_models import MODELS, SWITCHES, blocks
from support import (
    PAGE,
    PLACES,
    Trace,
    assert_close,
    assert_same_bytes,
    make_llm,
    model_config,
    planned_bytes,
    random_ids,
    run,
    with_layers,
)

PROMPT, STEPS = 40, 26  # the steps cross a page and the window's edge
CUTS = {2: "3,1", 3: "2,1,0", 5: "3,1,0,2,1", 8: "1,0,0,2,0,0,0,1"}
WEIGHTS = {2: "1,1", 3: "1,1,1", 5: "0,1,1,2,0", 8: "0,1,0,2,0,0,0,1"}  # some do attention alone


def _group(name: str) -> pytest.MarkDecorator:
    """A model's tests run on one worker, which then compiles its programs once."""
    return pytest.mark.xdist_group(name)


@cache
def _alone(name: str, **options) -> Trace:
    block, model = MODELS[name]
    llm = make_llm(model, block=block, **options)
    return run(llm, random_ids(PROMPT), random_ids(STEPS, seed=1))


def _check(name: str, limit: float = 1e-10, options: dict | None = None, **cut) -> Trace:
    """Device, host and scattered caches have the same bytes and agree with one device; the bytes
    sent are the planned ones."""
    block, model = MODELS[name]
    options = options or {}
    prompt, forced = random_ids(PROMPT), random_ids(STEPS, seed=1)
    found = {}
    for kind, arguments in {
        "device": dict(engine="staged", kv="device"),
        "host": dict(kv="host"),
        "scattered": dict(
            kv="host", prefetch=4, place=lambda d, layer, at: PLACES[(d + layer + at // 16) % 3]
        ),
    }.items():
        llm = make_llm(model, block=block, **cut, **options, **arguments)
        found[kind] = run(llm, prompt, forced)
        if kind == "host":
            np.testing.assert_array_equal(found[kind].sent, planned_bytes(llm, PROMPT, STEPS))
    for kind, trace in found.items():
        assert_same_bytes(trace.logits, found["device"].logits, f"{name}: {kind}")
    assert_close(found["host"].logits, _alone(name, **options).logits, limit, f"{name}: staged")
    return found["host"]


def _check_fused(
    name: str, staged: Trace, options: dict | None = None, limit: float = 1e-10, **cut
) -> None:
    block, model = MODELS[name]
    llm = make_llm(model, block=block, engine="fused", **cut, **(options or {}))
    fused = run(llm, random_ids(PROMPT), random_ids(STEPS, seed=1))
    assert_close(fused.logits, staged.logits, limit, f"{name}: fused against staged")
    assert_close(fused.logits, _alone(name, **(options or {})).logits, limit, f"{name}: fused")


# Two contributors send to each other, four to one; each has idle devices beside them.
KINDS = (
    "qwen2",
    "qwen3",
    "gemma3",
    *SWITCHES,
    "sinks",
    "chunks",
    "experts",
    "early-experts",
    "llama-factors",
    "head-bias",
    "wide-keys",
    "wide-values",
)
CASES = [pytest.param(n, d, marks=_group(n)) for n, d in [*((n, 3) for n in KINDS), ("gemma2", 5)]]


@pytest.mark.parametrize(("name", "devices"), CASES)
def test_families(name: str, devices: int):
    shares = dict(attn_split=CUTS[devices], tensor_split=WEIGHTS[devices])
    cut = dict(devices=devices, split_mode="tensor", **shares)
    options = {"ubatch": 64} if name == "encoded" else None  # an encoder reads all at once
    staged = _check(name, options=options, **cut)
    if devices < 5:  # over more: below
        _check_fused(name, staged, options, **cut)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "devices"), [("qwen2", 8), ("qwen3", 5), ("gemma2", 5), ("gemma3", 8)]
)
def test_fused_over_more_devices(name: str, devices: int):
    """Against one device, as the staged engine above: closer, for the two to be as close."""
    block, model = MODELS[name]
    cut = dict(devices=devices, split_mode="tensor", attn_split=CUTS[devices])
    llm = make_llm(model, block=block, engine="fused", tensor_split=WEIGHTS[devices], **cut)
    found = run(llm, random_ids(PROMPT), random_ids(STEPS, seed=1))
    assert_close(found.logits, _alone(name).logits, 2.5e-11, f"{name}: fused")


def test_pages_hold_whole_blocks_of_keys():
    with pytest.raises(OptionError, match=f"page is {PAGE}; random chooses blocks of 32 keys"):
        make_llm(blocks(32))


def test_factors_on_a_device_without_work():
    cut = dict(devices=2, split_mode="tensor", tensor_split="1,0")
    _check_fused("llama-factors", _check("llama-factors", **cut), **cut)


@pytest.mark.parametrize(("window", "devices"), [(24, 3), (32, 1), (33, 1)])
def test_link_bytes_of_windows(window: int, devices: int):
    """A page that the window has left is not sent, whatever the steps since it was full."""
    cut = dict(split_mode="tensor", attn_split=CUTS[devices]) if devices > 1 else {}
    layer = MODELS["llama"][1].layers[0]
    model = model_config([with_layers(model_config([layer]), window=window).layers[0], layer])
    llm = make_llm(model, kv="host", devices=devices, **cut)
    trace = run(llm, random_ids(PROMPT), random_ids(40, seed=1))
    np.testing.assert_array_equal(trace.sent, planned_bytes(llm, PROMPT, 40))


def test_whole_layers():
    _check("gemma3", devices=2, split_mode="layer")


def test_a_choice_of_keys_goes_with_the_layers():
    """The layer that follows it is on another device."""
    _check("sparse", devices=2, split_mode="layer")


def test_layers_on_chosen_devices():
    """A device without a layer holds nothing and is sent nothing."""
    trace = _check("llama", devices=3, split_mode="layer", tensor_split="1,0,1")
    assert not trace.sent[:, 1].any()


@pytest.mark.parametrize(
    ("name", "types"),
    [("llama", "f16,f32"), ("gemma3", "bf16,bf16")],
)
def test_cache_types(name: str, types: str):
    """A last place that differs between plans flips a few roundings of a narrow cache: a step of
    such a type there, and so results that are close rather than very close."""
    options = dict(zip(("cache_type_k", "cache_type_v"), types.split(","), strict=True))
    cut = dict(devices=3, split_mode="tensor", attn_split="2,1,0")
    _check_fused(name, _check(name, 1e-6, options, **cut), options, 1e-6, **cut)


@pytest.mark.parametrize(("rounding", "dither"), [("nearest", True), ("llama.cpp", False)])
def test_roundings(rounding: str, dither: bool):
    cut = dict(devices=2, split_mode="tensor", attn_split=".49,.51", tensor_split="3,2")
    _check("llama", **cut, rounding=rounding, dither=dither)


@pytest.mark.parametrize(
    ("name", "heads", "devices", "replicate"),
    [
        *[("one-of-8", 1, 2, False), ("one-of-8", 1, 4, True)],
        ("three-of-4", 3, 4, True),
        *[("latent", 1, 2, False), ("latent", 1, 2, True)],
        ("sparse", 1, 2, True),
    ],
)
def test_few_heads(name: str, heads: int, devices: int, replicate: bool):
    """Fewer KV heads than devices: some devices without attention, or KV heads stored twice."""
    cut = dict(devices=devices, split_mode="tensor", kv_replicate=replicate)
    staged = _check(name, **cut)
    _check_fused(name, staged, **cut)
    busy = len(np.flatnonzero(staged.sent[-1]))
    assert busy == (devices if replicate else min(devices, heads))


def test_replication_over_chosen_devices():
    cut = dict(devices=3, split_mode="tensor", attn_split="2,0,1", tensor_split="1,1,1")
    staged = _check("one-of-6", **cut, kv_replicate=True)
    assert not staged.sent[:, 1].any()
    assert staged.sent[-1, 0] > 0 and staged.sent[-1, 2] > 0
