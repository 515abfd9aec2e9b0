"""Groups that stages fold, and stages that run together, as where a kernel folds pages. Here a
stand-in in plain jnp does, so that every device can tell whether they are the right ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import SamplingParams
from jaxllm.cache.attention import Carry, Ring, attend_pages, attend_tail, start_carry
from jaxllm.cache.flash import Parts
from jaxllm.engine import folding, staged_step, stages
from support import (
    PAGE,
    CountingLink,
    compilations,
    layer_config,
    make_llm,
    model_config,
    planned_bytes,
    random_ids,
    run,
    small_model,
)

DEEP = model_config([layer_config(8, 2, 16)] * 7)
WINDOWS = model_config([layer_config(8, 2, 16, window=24), layer_config(8, 2, 16)] * 3)


def _no_parts(cfg: Any, q: jax.Array, page: int) -> Parts:
    return Parts(*start_carry(q, cfg.v_dim)[:3])


def _attend(cfg: Any, parts: Parts, q: jax.Array, *rest: Any) -> Parts:
    *rest, _ = rest  # the floor
    return Parts(*attend_pages(cfg, Carry(*parts), q, *rest)[:3])


def _attend_tail(cfg: Any, carry: Carry, q: jax.Array, tail: Ring, *places: Any) -> Carry:
    return attend_tail(cfg, carry, q, tail, *places, PAGE)


def _with_parts(carry: Carry, parts: Parts, q: jax.Array) -> Carry:
    most = jnp.maximum(carry.m, parts.m)
    old, new = jnp.exp(carry.m - most), jnp.exp(parts.m - most)
    return carry._replace(
        m=most,
        l=carry.l * old + parts.l * new,
        acc=carry.acc * old[..., None] + parts.acc * new[..., None],
    )


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All devices have a kernel."""
    monkeypatch.setattr("jaxllm.planning.has_kernels", lambda device: True)
    monkeypatch.setattr(stages, "flashes", lambda *_: True)
    monkeypatch.setattr(stages, "attend_flash", _attend_tail)
    monkeypatch.setattr(stages, "no_parts", _no_parts)
    monkeypatch.setattr(stages, "attend_pages_flash", _attend)
    monkeypatch.setattr(stages, "with_parts", _with_parts)
    stages.layer_of.cache_clear()  # programs of those layers have the other functions
    yield
    stages.layer_of.cache_clear()


@pytest.fixture
def programs(kernel: None, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Of each program of stages how many it has, and how many groups they fold."""
    seen: list[tuple[int, int]] = []
    whole = staged_step.run_stages

    def counted(given: Any, *rest: Any, **named: Any) -> Any:
        seen.append((len(given), sum(len(each.pages) for each in given)))
        return whole(given, *rest, **named)

    monkeypatch.setattr(staged_step, "run_stages", counted)
    return seen


@pytest.mark.parametrize(
    ("cfg", "prefetch", "group"),
    [(DEEP, 0, 4), (DEEP, 2, 16), (DEEP, 16, 4), (WINDOWS, 4, 4)],
)
def test_stages_fold_what_programs_of_their_own_do(
    cfg: Any, prefetch: int, group: int, request: Any
):
    prompt, forced = random_ids(20), [1] * 130
    arguments: dict[str, Any] = dict(kv="host", ctx=256, group_pages=group)
    expected = run(make_llm(cfg, **arguments), prompt, forced)
    programs = request.getfixturevalue("programs")
    for together in (1, 2):
        llm = make_llm(cfg, prefetch=prefetch, tail_pages=together, **arguments)
        found = run(llm, prompt, forced)
        np.testing.assert_allclose(found.logits, expected.logits, rtol=0, atol=2e-5)
        np.testing.assert_array_equal(found.sent, planned_bytes(llm, 20, 130))
    assert max(groups for _, groups in programs) >= 3
    assert max(count for count, _ in programs) == folding.TOGETHER
    assert (max(count for count, groups in programs if groups) > 1) == (prefetch > 1)


def test_stages_of_whole_layers_run_together(programs: list[tuple[int, int]]):
    """On each device, which has no pages of the others' layers."""
    llm = make_llm(DEEP, kv="host", ctx=256, devices=2, split_mode="layer", prefetch=16)
    run(llm, random_ids(20), [1] * 20)
    assert max(count for count, groups in programs if groups) > 1


@pytest.mark.parametrize("prefetch", [0, 2, 4])
def test_no_more_is_alive_than_was_planned(kernel: None, prefetch: int):
    """A group is gone when its stage has begun, before the next copy gets its room."""
    llm = make_llm(DEEP, kv="host", ctx=256, group_pages=4, prefetch=prefetch)
    [stream] = llm.engine.streams
    stream.link = link = CountingLink(stream.store.device)
    run(llm, random_ids(20), [1] * 130)
    assert link.most_bytes == llm.plan.staging_bytes(0)
    assert link.most <= stream.most


def test_rows_of_a_batch(request: Any):
    """That begin together, end one after the other and leave groups of several rows."""
    prompts = [random_ids(n, seed=n) for n in (70, 20, 45)]
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    arguments: dict[str, Any] = dict(kv="host", ctx=256, group_pages=4, parallel=2)
    expected = [c.token_ids for c in make_llm(small_model(), **arguments).generate(prompts, params)]
    request.getfixturevalue("kernel")
    found = make_llm(small_model(), prefetch=8, **arguments).generate(prompts, params)
    assert [c.token_ids for c in found] == expected


@pytest.mark.parametrize(("cfg", "together"), [(DEEP, 1), (WINDOWS, 4)], ids=["alike", "windows"])
def test_nothing_is_compiled_after_a_warm_up(kernel: None, cfg: Any, together: int):
    llm = make_llm(cfg, kv="host", ctx=256, group_pages=4, prefetch=4, tail_pages=together)
    llm.warmup()
    with compilations() as found:
        for length in (20, 70, 130):
            params = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
            llm.generate([random_ids(length, seed=length)], params)
    assert len(found) == 0
