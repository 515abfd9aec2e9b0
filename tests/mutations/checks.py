"""The suite's own checks of one model, in an order in which each may be the first to fail.

Everything is made anew in every call, references included: a fault is in all of it or in none.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import numpy as np

import naive
from jaxllm import LLM, ModelConfig
from jaxllm.engine.build import plan_model
from jaxllm.engine.drafting import DraftingEngine
from jaxllm.models.decoder import DecoderBlock
from jaxllm.models.sources import RandomSource
from jaxllm.planning import options_from
from jaxllm.testing import assert_partition, assert_weights_as_planned
from sharding import DeviceInfo, Mesh
from support import (
    Trace,
    assert_close,
    assert_same_bytes,
    layer_config,
    make_llm,
    model_config,
    planned_bytes,
    random_ids,
    run,
)

PROMPT, STEPS = 36, 14  # two full pages, and a third that fills on the way


def model(layers: int = 2, **changes: Any) -> ModelConfig:
    """Four KV groups of two query heads a layer."""
    fields = dict(q_per_kv=2, k_dim=16, mlp=128, scale=5.0) | changes
    return model_config([layer_config(4, **fields)] * layers)  # type: ignore[arg-type]


def _run(llm: LLM) -> Trace:
    return run(llm, random_ids(PROMPT), random_ids(STEPS, seed=1))


def check_cut(cfg: ModelConfig, *, types: dict[str, Any] | None = None, **cut: Any) -> None:
    """A cut of a model: who holds what, both places of the cache, bytes sent, one device, numpy."""
    cut = dict(devices=2, split_mode="tensor", **(types or {})) | cut
    resident = make_llm(cfg, engine="staged", **cut)
    streamed = make_llm(cfg, kv="host", **cut)
    assert_partition(streamed.plan)
    assert_weights_as_planned(streamed)
    expected, found = _run(resident), _run(streamed)
    assert_same_bytes(found.logits, expected.logits, "host against device")
    sent, planned = found.sent, planned_bytes(streamed, PROMPT, STEPS)
    assert (sent == planned).all(), f"sent bytes are {sent[0]}, planned were {planned[0]}"
    alone = _run(make_llm(cfg, devices=1, **(types or {})))
    assert_close(found.logits, alone.logits, 1e-6 if types else 1e-10, "against one device")
    exact = naive.logits(cfg, random_ids(PROMPT) + random_ids(STEPS, seed=1))
    if types:  # a rounded cache moves tokens whose logits are close
        error = np.sum((alone.logits - exact) ** 2) / np.sum(exact**2)
        assert error < 2e-2, f"against numpy: NMSE {error:.3g}"
    else:
        assert_close(alone.logits, exact.astype(np.float32), what="against numpy")


def check_budget(cfg: ModelConfig, *, rooms: tuple[int, int] | None = None, **budget: Any) -> LLM:
    """A budget over two devices: what lies and what is sent where, by the plan. `rooms` are bytes
    for pages beside everything else."""
    mesh = Mesh((DeviceInfo("a"), DeviceInfo("b")), tuple(jax.devices()[:2]))
    arguments: dict[str, Any] = dict(
        split_mode="tensor", kv="host", dtype="float32", ctx=128, page=16, ubatch=16, group_pages=1
    )

    def planned(mesh: Mesh, **more: Any) -> Any:
        options, dtype = options_from(mesh=mesh, **arguments, **more)
        return plan_model(DecoderBlock, cfg, mesh, options, dtype)

    if rooms is not None:
        needed = [planned(mesh).plan.needed_bytes(i) for i in (0, 1)]
        infos = [DeviceInfo(str(i), free=needed[i] + rooms[i]) for i in (0, 1)]
        mesh = Mesh(tuple(infos), mesh.jax_devices)
    made = planned(mesh, **budget)
    llm = LLM(made, RandomSource(made.whole.cfg), None)
    sent, expected = _run(llm).sent, planned_bytes(llm, PROMPT, STEPS)
    assert (sent == expected).all(), f"sent bytes are {sent[0]}, planned were {expected[0]}"
    for position in range(128):
        llm.engine.forward(np.asarray([[position]], np.int32), 0, np.asarray([position]))
        llm.engine.settle(0, np.asarray([position + 1]))
    plan, drafting = llm.plan, isinstance(llm.engine, DraftingEngine)
    engines = (llm.engine.target, llm.engine.draft) if drafting else (llm.engine,)
    for device, stores in enumerate(zip(*(engine.stores for engine in engines), strict=True)):
        held = sum((Counter(store.held_bytes()) for store in stores), Counter())
        kept, host = plan.residency.devices[device].bytes, plan.cache_bytes(device)["host"]
        assert held["device"] == kept, f"pages take {held} bytes, kept were {kept}"
        assert sum(held.values()) - kept == host, f"pages take {held} bytes, planned were {host}"
    return llm
