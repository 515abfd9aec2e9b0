"""Memory that runs out: told before anything is allocated, or freed and told in one sentence."""

from __future__ import annotations

import gc
import pickle
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxllm.cache.groups as groups_module
import jaxllm.models.weights as weights_module
from jaxllm import LLM, SamplingParams
from jaxllm.engine import forward, fused, staged, staged_step
from jaxllm.engine.build import plan_model
from jaxllm.models.decoder import DecoderBlock
from jaxllm.models.sources import RandomSource
from jaxllm.planning import options_from
from jaxllm.testing import random_llm
from scenarios.runs import config
from sharding import DeviceInfo, DoesNotFit, Mesh, PlanError, PlanOptions, make_plan
from support import assert_same_bytes, planned_bytes, random_ids, run

pytestmark = pytest.mark.xdist_group("memory")
CFG = config(8, 4)
GREEDY = SamplingParams(max_tokens=4, temperature=0, logprobs=1)
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12345 bytes."
ENGINES: dict[str, dict[str, Any]] = {
    "fused": dict(devices=1),
    "padded": dict(devices=2, split_mode="tensor", engine="fused"),
    "staged": dict(devices=2, split_mode="tensor", kv="host"),
    "layers": dict(devices=2, split_mode="layer"),
}


def _fail() -> None:
    raise jax.errors.JaxRuntimeError(OUT_OF_MEMORY)


def _failing_after(count: int, device: Any, put: Callable) -> Callable:
    """`put` that has room for so many arrays on a device."""
    left, lock = [count], threading.Lock()

    def limited(x: Any, to: Any, *more: Any, **kw: Any) -> Any:
        if to.device_set == {device}:
            with lock:
                left[0] -= 1
                if left[0] < 0:
                    _fail()
        return put(x, to, *more, **kw)

    return limited


def _live() -> int:
    gc.collect()
    return len(jax.live_arrays())


@pytest.mark.parametrize("count", [0, 3, 6])
@pytest.mark.parametrize("engine", ENGINES)
def test_loading_runs_out(engine: str, count: int, monkeypatch: pytest.MonkeyPatch):
    cut = ENGINES[engine]
    last = jax.devices()[cut["devices"] - 1]
    random_llm(CFG, **cut)  # whatever stays once a first model has been made
    before = _live()
    with monkeypatch.context() as patch:
        patch.setattr(weights_module.jax, "device_put", _failing_after(count, last, jax.device_put))
        with pytest.raises(DoesNotFit) as error:
            random_llm(CFG, **cut)
        assert len(jax.live_arrays()) == before, "the error still holds arrays"
        found = error.value
    assert found.__context__ is None and found.failed
    if engine != "padded":  # one call makes arrays of all devices: which failed is not told
        assert found.device == f"cpu:{last.id}"
        planned = random_llm(CFG, **cut).plan.needed_bytes(cut["devices"] - 1)
        assert found.needed == planned and found.free is None
    message = str(found)
    assert "ran out of memory" in message and "None" not in message and "\n" not in message
    again = pickle.loads(pickle.dumps(found))
    assert (str(again), again.failed) == (message, True)
    smaller = random_llm(CFG, **cut, ctx=64)
    assert np.isfinite(smaller.logits(random_ids(20, CFG.vocab))).all()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_cache_cannot_be_allocated(engine: str, monkeypatch: pytest.MonkeyPatch):
    """After weights are loaded, in the last of its layers."""
    module = forward if engine in ("fused", "padded") else staged
    right, calls = module.empty_ring, []
    random_llm(CFG, **ENGINES[engine])
    before, last = _live(), 1 if engine in ("fused", "padded", "layers") else 3

    def fails_last(*args: Any) -> Any:
        calls.append(args)
        return _fail() if len(calls) > last else right(*args)

    with monkeypatch.context() as patch:
        patch.setattr(module, "empty_ring", fails_last)
        with pytest.raises(DoesNotFit, match="ran out of memory") as error:
            random_llm(CFG, **ENGINES[engine])
        assert len(jax.live_arrays()) == before, "the error still holds arrays"
    if engine != "padded":
        assert error.value.device == f"cpu:{ENGINES[engine]['devices'] - 1}"
    smaller = random_llm(CFG, **ENGINES[engine], ctx=64)
    assert np.isfinite(smaller.logits(random_ids(20, CFG.vocab))).all()


def test_other_errors_stay_what_they_are(monkeypatch: pytest.MonkeyPatch):
    def fails(*args: Any) -> None:
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    monkeypatch.setattr(weights_module.jax, "device_put", fails)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        random_llm(CFG, devices=1)


@pytest.mark.parametrize("engine", ["fused", "padded", "staged"])
def test_a_step_runs_out(engine: str, monkeypatch: pytest.MonkeyPatch):
    """The same model goes on with the next prompt, to the same bytes, and with what another row
    had kept, unless that was lost with what was donated."""
    llm = random_llm(CFG, parallel=2, **ENGINES[engine])
    ids, forced = random_ids(40, CFG.vocab), [1, 2, 3]
    expected = run(llm, ids, forced)
    kept = random_ids(40, CFG.vocab, seed=1)
    (first,) = llm.generate([kept], GREEDY)
    before = _live()
    module, name = (staged_step, "attend") if engine == "staged" else (fused, "whole_step")
    right, calls = getattr(module, name), []

    def fails_later(*args: Any, **kw: Any) -> Any:
        calls.append(name)
        if len(calls) < 2:
            return right(*args, **kw)
        right(*args, **kw)  # what was donated is gone
        return _fail()

    with monkeypatch.context() as patch:
        patch.setattr(module, name, fails_later)
        try:
            llm.generate([ids])
            raise AssertionError("no error")
        except DoesNotFit as error:  # callers' frames hold hidden states as long as it lives
            assert error.failed and error.device in ("cpu:0", "cpu:1")
        assert _live() <= before
    (again,) = llm.generate([kept], GREEDY)
    assert again.logprobs == first.logprobs
    assert again.cached_tokens == (32 if engine == "staged" else 0)
    assert_same_bytes(run(llm, ids, forced).logits, expected.logits)


def _share(llm: LLM, path: Path) -> None:
    ids = random_ids(100, CFG.vocab)
    llm.forget()
    llm.generate([ids, ids[:40]], GREEDY)


def _save(llm: LLM, path: Path) -> None:
    llm.save_session(path)


def _load(llm: LLM, path: Path) -> None:
    llm.load_session(path)


@pytest.mark.parametrize(
    ("engine", "module", "name", "act"),
    [
        ("fused", fused, "copy_row", _share),
        ("fused", fused, "take_row", _save),
        ("fused", fused, "put_row", _load),
        ("layers", groups_module, "_take", _share),
        ("staged", staged, "take_row", _save),
        ("staged", staged, "put_row", _load),
    ],
)
def test_keeping_rows_runs_out(
    engine: str,
    module: Any,
    name: str,
    act: Callable[[LLM, Path], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """A prefix shared, a session saved or loaded: what has been donated or not is as if new."""
    llm, ids = random_llm(CFG, parallel=2, **ENGINES[engine]), random_ids(100, CFG.vocab)
    (expected,) = llm.generate([ids], GREEDY)
    llm.save_session(tmp_path / "a")
    right = getattr(module, name)

    def fails(*args: Any, **kw: Any) -> Any:
        right(*args, **kw)
        return _fail()

    with monkeypatch.context() as patch:
        patch.setattr(module, name, fails)
        with pytest.raises(DoesNotFit, match="ran out of memory"):
            act(llm, tmp_path / "a")
    (found,) = llm.generate([ids], GREEDY)
    assert found.logprobs == expected.logprobs
    act(llm, tmp_path / "a")
    (found,) = llm.generate([ids], GREEDY)
    assert (found.logprobs, found.cached_tokens) == (expected.logprobs, 96)


def _planned(mesh: Mesh, **arguments: Any) -> Any:
    arguments = dict(split_mode="tensor", dtype="float32", ctx=128, page=16, ubatch=32) | arguments
    options, dtype = options_from(mesh=mesh, **arguments)
    return plan_model(DecoderBlock, CFG, mesh, options, dtype)


@pytest.mark.parametrize("kv", ["device", "host"])
def test_told_before_anything_is_allocated(kv: str, monkeypatch: pytest.MonkeyPatch):
    """Device 1 alone is too small; a shorter context has room there."""
    devices = tuple(jax.devices()[:2])

    def mesh(*free: int) -> Mesh:
        return Mesh(tuple(DeviceInfo(f"gpu:{i}", free=n) for i, n in enumerate(free)), devices)

    need = [_planned(mesh(1 << 40, 1 << 40), kv=kv).plan.needed_bytes(i) for i in (0, 1)]
    tight = mesh(need[0], need[1] - 1)
    model, before = _planned(tight, kv=kv), _live()

    def touched(*args: Any) -> None:
        raise AssertionError("a value was asked for")

    with monkeypatch.context() as patch:
        patch.setattr(RandomSource, "fill", touched)
        with pytest.raises(DoesNotFit) as error:
            LLM(model, RandomSource(model.whole.cfg), None)
    found = error.value
    assert (found.device, found.needed, found.free) == ("gpu:1", need[1], need[1] - 1)
    assert not found.failed and _live() == before
    smaller = _planned(tight, kv=kv, ubatch=16)
    llm = LLM(smaller, RandomSource(smaller.whole.cfg), None)
    assert np.isfinite(llm.logits(random_ids(20, CFG.vocab))).all()


def test_pinned_memory_runs_out(monkeypatch: pytest.MonkeyPatch):
    """Pages go to pageable memory, which is told once; results and bytes sent stay the same."""
    cut = dict(devices=2, split_mode="tensor", kv="host", group_pages=2)
    ids, forced = random_ids(100, CFG.vocab), [1, 2, 3]
    expected = run(random_llm(CFG, **cut), ids, forced)
    right, pinned = groups_module.host_array, []

    def limited(values: Any, place: str, device: Any) -> Any:
        if place == "pinned":
            pinned.append(device)
            if len(pinned) > 5:
                _fail()
        return right(values, place, device)

    monkeypatch.setattr(groups_module, "host_array", limited)
    llm = random_llm(CFG, **cut)
    with pytest.warns(UserWarning, match="XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB") as told:
        found = run(llm, ids, forced)
    assert len(told) == 1
    assert_same_bytes(found.logits, expected.logits)
    np.testing.assert_array_equal(found.sent, planned_bytes(llm, 100, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(llm, ids, forced)


@pytest.mark.parametrize("pinned", [None, True, False])
def test_pinned_memory_is_a_choice(pinned: bool | None):
    cut = dict(devices=2, split_mode="tensor", kv="host", kv_pinned=pinned)
    llm = random_llm(CFG, **cut)
    held: dict[str, int] = dict.fromkeys(("pinned", "pageable"), 0)
    for position in range(48):
        llm.engine.forward(np.asarray([[1]], np.int32), 0, np.asarray([position]))
        llm.engine.settle(0, np.asarray([position + 1]))
    for store in llm.engine.stores:
        held = {place: n + store.held_bytes()[place] for place, n in held.items()}  # type: ignore[index]
    chosen, other = ("pageable", "pinned") if pinned is False else ("pinned", "pageable")
    assert held[chosen] > 0 and held[other] == 0


def test_pinned_memory_that_cannot_be():
    with pytest.raises(PlanError, match="--kv-pinned is 1"):
        PlanOptions(kv="host", kv_pinned=1)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="--kv-pinned .* --no-kv-offload/-nkvo"):
        PlanOptions(kv="device", kv_pinned=True)
    import sharding.links as links

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links, "places", lambda devices: ("pageable",))
        with pytest.raises(PlanError, match="--kv-pinned needs"):
            random_llm(CFG, devices=1, kv="host", kv_pinned=True)


def test_a_plan_names_the_limit_of_pinned_memory():
    mesh = Mesh.virtual(2, platform="gpu")
    shape = CFG.shape()

    def notes(**options: Any) -> list[str]:
        fields = dict(kv="host", split_mode="tensor", page=256, ctx=1 << 25) | options
        plan = make_plan(shape, mesh, PlanOptions(**fields))
        return [n for n in plan.notes if "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB" in n]

    assert len(notes()) == 1
    assert notes(kv_pinned=False) == notes(ctx=1 << 12) == notes(kv="device") == []
