"""Arguments of wrong kinds from Python: a typed exception of one sentence that holds the value."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import LLM, JaxllmError, OptionError, PromptError, SamplingParams
from jaxllm.bench.shapes import model_config
from jaxllm.models.decoder import DecoderBlock
from jaxllm.planning import plan_config
from sharding import DeviceInfo, Mesh, PlanOptions, ShardingError
from support import make_llm, small_model

GREEDY = SamplingParams(max_tokens=3, temperature=0)


@cache
def llm() -> LLM:
    return make_llm(small_model(), ctx=32)


def said(call: Callable[[], Any]) -> str:
    """The one sentence with which the call is refused."""
    with pytest.raises((JaxllmError, ShardingError)) as found:
        call()
    message = str(found.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [
        (5, "5"),
        (None, "None"),
        (b"abc", "b'abc'"),
        ([b"abc"], "b'abc'"),
        (bytearray(b"abc"), "bytearray(b'abc')"),
        ({"a": 1}, "{'a': 1}"),
        ({1, 2}, "{1, 2}"),
        ([1.0, 2.0], "[1.0, 2.0]"),
        ([True, 1], "[True, 1]"),
        ([[1, False]], "[1, False]"),
        (np.array([1.0]), "array([1.])"),
        (np.array([True]), "array([ True])"),
        (np.int32(5), "np.int32(5)"),
    ],
)
def test_prompts_of_wrong_kinds(prompt: Any, shown: str):
    assert shown in said(lambda: llm().generate(prompt, GREEDY))
    with pytest.raises(PromptError):
        llm().stream(prompt, GREEDY)
    with pytest.raises(PromptError):
        llm().logits(prompt)


def test_arrays_of_ids_are_prompts():
    expected = llm().generate([3, 1, 4], GREEDY)
    for prompt in (np.array([3, 1, 4]), np.array([3, 1, 4], np.uint8), jnp.array([3, 1, 4])):
        assert llm().generate(prompt, GREEDY)[0].token_ids == expected[0].token_ids
    assert len(llm().generate(np.array([[3, 1], [4, 1]]), GREEDY)) == 2
    assert llm().generate([], GREEDY) == []


@pytest.mark.parametrize("params", [5, {"max_tokens": 3}, "greedy"])
def test_sampling_of_a_wrong_kind(params: Any):
    assert repr(params) in said(lambda: llm().generate([1], params))
    assert repr(params) in said(lambda: llm().stream([1], params))


@pytest.mark.parametrize(
    "wrong",
    [
        {"stop": None},
        {"stop": 5},
        {"stop": b"x"},
        {"stop": ["a", 5]},
        {"stop": {"a": 1}},
        {"ignore_eos": 1},
        {"max_tokens": "5"},
        {"max_tokens": 5.0},
        {"max_tokens": True},
        {"seed": np.bool_(True)},
        {"temperature": "hot"},
        {"temperature": False},
        {"temperature": 10**400},
        {"temperature": None},
        {"top_p": np.float32("nan")},
    ],
)
def test_sampling_values_of_wrong_kinds(wrong: dict[str, Any]):
    ((name, value),) = wrong.items()
    message = said(lambda: SamplingParams(**wrong))
    assert name in message and repr(value) in message


def test_numbers_of_numpy_are_numbers():
    params: dict[str, Any] = dict(max_tokens=np.int64(3), top_k=np.uint8(4), seed=np.int32(7))
    found = SamplingParams(temperature=np.float32(0.5), top_p=np.float64(1), **params)
    assert found == SamplingParams(temperature=0.5, top_p=1.0, max_tokens=3, top_k=4, seed=7)
    assert type(found.max_tokens) is int and type(found.temperature) is float
    options: dict[str, Any] = dict(kv="host", ctx=np.int64(64), kv_gpu_layers=np.int32(1))
    assert type(PlanOptions(**options).ctx) is int
    assert len(Mesh.from_jax(np.int64(2))) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        {"ctx": "5"},
        {"ctx": 5.0},
        {"ctx": True},
        {"parallel": "2"},
        {"ubatch": 16.0},
        {"batch": "2048"},
        {"batch": True},
        {"dtype": 32},
        {"devices": "2"},
        {"devices": 1.0},
        {"devices": True},
        {"devices": []},
        {"devices": [0, 1]},
        {"tensor_split": 5},
        {"tensor_split": b"1"},
        {"link_gbps": 5},
        {"link_gbps": [True]},
        {"prefix_cache": "no"},
        {"kv_gpu_layers": 1.0},
        {"kv_device_bytes": True},
        {"kv_rotate": "no"},
        {"dither": 1},
        {"kv": None},
        {"impl": "pallas"},
    ],
)
def test_plan_arguments_of_wrong_kinds(wrong: dict[str, Any]):
    ((name, value),) = wrong.items()
    host = {"kv": "host"} if name in ("kv_gpu_layers", "kv_device_bytes") else {}
    assert repr(value) in said(lambda: LLM.from_config(small_model(), **(host | wrong)))


@pytest.mark.parametrize(
    ("platform", "given", "pages", "prefetch"),
    [
        ("cpu", {}, 16, 4),
        ("gpu", {}, 64, 4),
        ("gpu", {"split_mode": "tensor"}, 64, 8),
        ("gpu", {"split_mode": "tensor", "attn_split": (7, 1)}, 64, 4),
        ("gpu", {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}, 64, 7),
        ("gpu", {"group_pages": 4}, 4, 16),
        ("gpu", {"group_pages": 4, "prefetch": 2}, 4, 2),
        ("gpu", {"page": 1024}, 16, 4),  # 64 of those would be 256 MB
        ("gpu", {"page": 512, "cache_type_k": "q4_0", "cache_type_v": "q4_0"}, 16, 16),
    ],
)
def test_copies_to_accelerators_are_larger(
    platform: str, given: dict[str, Any], pages: int, prefetch: int
):
    mesh = Mesh(tuple(DeviceInfo(label=f"{platform}:{i}", platform=platform) for i in range(2)))
    model = plan_config(DecoderBlock, model_config("llama-8b"), mesh, dtype="bfloat16", **given)
    assert model.plan.options.group_pages == pages
    assert model.plan.options.prefetch == prefetch


def test_a_kernel_needs_a_device_that_has_it():
    assert "Hopper" in said(lambda: LLM.from_config(small_model(), impl="kernel"))


def test_an_unknown_argument_names_the_nearest():
    for name, near in (("ctxx", "ctx"), ("tensorsplit", "tensor_split"), ("device", "devices")):
        for make in (lambda **kw: LLM.from_gguf("none.gguf", **kw), _from_config):
            message = said(lambda make=make, name=name: make(**{name: 1}))
            assert repr(name) in message and f"the nearest is {near!r}" in message
    with pytest.raises(OptionError, match="slots"):  # a plan's name for parallel
        _from_config(slots=2)


def _from_config(**arguments: Any) -> LLM:
    return LLM.from_config(small_model(), **arguments)


@pytest.mark.parametrize("path", [5, None, b"x"])
def test_paths_of_wrong_kinds(path: Any):
    assert repr(path) in said(lambda: LLM.from_gguf(path))
    assert repr(path) in said(lambda: llm().load_session(path))
