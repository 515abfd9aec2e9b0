"""What lies on devices while a model with a host cache runs, and that plans count it right."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.cache.stream import PageStream
from jaxllm.testing import assert_weights_as_planned, random_llm
from scenarios.runs import alone, check, config, counts
from support import CountingLink, assert_close, random_ids, run

pytestmark = pytest.mark.xdist_group("bytes")
CTX = 128


def _watch(stream: PageStream, seen: list[tuple[int, int]]) -> None:
    """Note how many groups, and bytes, are in flight or in use whenever one is delivered."""
    visit, done = stream.visit, stream.done
    used: dict[int, int] = {}  # bytes of delivered groups by the id of their step's result

    def watched(*arguments: Any) -> Iterator[Any]:
        for pages, table in visit(*arguments):
            mine = sum(p.nbytes for p in pages)
            busy = [used[id(result)] for result, _ in stream._busy]
            ahead = [group.nbytes for group, _ in stream._ahead]
            seen.append((len(ahead) + len(busy) + 1, sum(ahead) + sum(busy) + mine))
            used["next"] = mine  # type: ignore[index]
            yield pages, table

    def finished(result: Any) -> None:
        used[id(result)] = used["next"]  # type: ignore[index]
        done(result)

    stream.visit, stream.done = watched, finished  # type: ignore[method-assign]


def _ring_bytes(llm: LLM, device: int) -> int:
    return sum(part.nbytes for ring in llm.engine.rings[device].values() for part in ring)


def _live_bytes(devices: list[Any]) -> np.ndarray:
    """Bytes of all arrays in the memory of each device, itself."""
    gc.collect()
    held = dict.fromkeys(devices, 0)
    for array in jax.live_arrays():
        [device, *others] = array.devices()
        if not others and device in held and array.sharding.memory_kind != "pinned_host":
            held[device] += array.nbytes
    return np.asarray(list(held.values()))


@pytest.mark.parametrize("prefetch", [0, 1, 4])
@pytest.mark.parametrize("cut", [dict(devices=2), dict(devices=3, attn_split="2,1,1")])
def test_staging_stays_within_the_plan(cut: dict, prefetch: int):
    llm = random_llm(
        config(8, 4), split_mode="tensor", kv="host", prefetch=prefetch, group_pages=2, **cut
    )
    seen: list[list[tuple[int, int]]] = [[] for _ in llm.engine.streams]
    for stream, notes in zip(llm.engine.streams, seen, strict=True):
        _watch(stream, notes)
    run(llm, random_ids(120), [1] * 8)
    plan = llm.plan
    flights = max(1, prefetch)
    for device, notes in enumerate(seen):
        group = plan.options.group_pages * max(plan.page_bytes(i, device) for i in (0, 1))
        assert plan.staging_bytes(device) == flights * group
        assert max(n for n, _ in notes) <= (4 * flights if flights > 1 else 1)
        assert group <= max(size for _, size in notes) <= plan.staging_bytes(device)


@pytest.mark.parametrize("prefetch", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("cut", [dict(devices=1), dict(devices=2, split_mode="tensor")])
def test_no_more_groups_are_alive_than_may_be(cut: dict, prefetch: int):
    llm = random_llm(config(8, 4), kv="host", prefetch=prefetch, group_pages=1, **cut)
    for stream in llm.engine.streams:
        stream.link = CountingLink(stream.store.device)
    run(llm, random_ids(60), [1] * 8)
    assert {stream.link.most for stream in llm.engine.streams} == {max(1, prefetch)}


@pytest.mark.parametrize("cut", [dict(devices=2), dict(devices=3, attn_split="2,1,0")])
@pytest.mark.parametrize("kv", ["device", "host"])
def test_planned_bytes_are_measured_bytes(kv: str, cut: dict):
    """With a full context. Beside weights, cache and staging a device has but the tables of
    pages, and the residual and the like."""
    llm = random_llm(config(8, 4), split_mode="tensor", engine="staged", kv=kv, **cut)
    plan, engine = llm.plan, llm.engine
    assert_weights_as_planned(llm)
    devices = list(plan.mesh.jax_devices)
    before = _live_bytes(devices)
    for row in range(CTX):
        engine.forward(np.asarray([[row]], np.int32), 0, np.asarray([row]))
        engine.settle(0, np.asarray([row + 1]))
    growth = _live_bytes(devices) - before
    for device, store in enumerate(engine.stores):
        held = store.held_bytes()
        planned = plan.cache_bytes(device)
        assert held["pinned"] + held["pageable"] == planned["host"]
        assert _ring_bytes(llm, device) + held["device"] == planned["device"]
        assert growth[device] <= held["device"] + plan.staging_bytes(device) + 4096
        needed = plan.weight_bytes(device) + planned["device"] + plan.staging_bytes(device)
        assert plan.needed_bytes(device) == needed + plan.compute_bytes(device)
        told = plan.to_dict()["devices"][device]
        assert told["cache_bytes"] == planned
        assert told["staging_bytes"] == plan.staging_bytes(device)
        assert told["compute_bytes"] == plan.compute_bytes(device)
        assert told["weight_bytes"] == plan.weight_bytes(device)


def test_a_batch_on_two_devices_with_a_host_cache():
    cfg = config(8, 4)
    prompts = [random_ids(n, seed=n, vocab=128) for n in (40, 17, 33)]
    greedy = SamplingParams(max_tokens=8, temperature=0)
    llm = random_llm(cfg, devices=2, split_mode="tensor", kv="host", parallel=3)
    one = random_llm(cfg, devices=1)
    found = llm.generate(prompts, greedy)
    for prompt, completion in zip(prompts, found, strict=True):
        [expected] = one.generate(prompt, greedy)
        assert completion.token_ids == expected.token_ids
        assert min(completion.link_bytes.values()) > 0
    resident = random_llm(cfg, devices=2, split_mode="tensor", engine="staged", parallel=3)
    assert [c.token_ids for c in resident.generate(prompts, greedy)] == [c.token_ids for c in found]


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_head_size_is_not_width_by_heads(kv_heads: int):
    """Width 64 and four heads of 32: a cache by width over heads would be half the size."""
    cfg = config(4, kv_heads, 32, embed=64)
    position = kv_heads * (32 + 32) * 4
    one = random_llm(cfg, devices=1).plan
    assert one.cache_bytes(0) == {"device": 2 * CTX * position, "host": 0}
    llm = check(cfg, devices=2)
    plan = llm.plan
    assert sum(plan.cache_bytes(d)["host"] for d in (0, 1)) == 2 * CTX * position
    assert [_ring_bytes(llm, d) for d in (0, 1)] == [plan.cache_bytes(d)["device"] for d in (0, 1)]
    assert sum(plan.link_bytes(d, 48) for d in (0, 1)) == 2 * 48 * position


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_vocabulary_rows_are_split(tied: bool):
    cfg = config(8, 4, vocab=130, tied=tied)
    llm = check(cfg, devices=3)
    assert counts(llm.plan.vocab) == (44, 43, 43)
    for leaves, rows in zip(llm.engine.leaves, (44, 43, 43), strict=True):
        tables = [leaf.shape for leaf in leaves.ends if leaf.ndim == 2]
        assert tables == [(rows, 256)] * (1 if tied else 2)
    expected, tokens = alone(cfg)
    fused = random_llm(cfg, devices=3, split_mode="tensor", engine="fused")
    trace = run(fused, random_ids(40), tokens)
    assert trace.logits.shape[-1] == 130
    assert_close(trace.logits, run(llm, random_ids(40), tokens).logits, what="fused")
