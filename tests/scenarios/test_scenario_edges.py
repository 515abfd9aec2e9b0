"""Edges of pages and of chunk sizes: partial attentions join, and masks end where they must."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.cache.attention import (
    Ring,
    attend_pages,
    attend_ring,
    attend_tail,
    finish,
    join_page,
    page_table,
    queries_first,
    start_carry,
)
from jaxllm.cache.groups import group_sizes
from jaxllm.engine.prefill import chunk_sizes
from jaxllm.testing import random_llm
from scenarios.runs import config
from support import assert_close, nmse, random_ids, run

PAGE, LENGTH = 256, 300
LENGTHS = (255, 256, 257, 511, 512, 513)
MODEL = config(8, 4)
LONG = dict(ctx=768, ubatch=512)


def _tensors(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries [1, 1, 4, 2, 64]; keys and values [1, 4, 300, 64]."""
    random = np.random.default_rng(seed)
    shapes = (1, 1, 4, 2, 64), (1, 4, LENGTH, 64), (1, 4, LENGTH, 64)
    q, k, v = (random.standard_normal(shape, np.float32) for shape in shapes)
    return q, k, v


def _one_pass(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    scores = np.einsum("ntkgh,nkph->ntkgp", q, k) * scale
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("ntkgp,nkph->ntkgh", weights / weights.sum(-1, keepdims=True), v)


@pytest.mark.smoke
@pytest.mark.parametrize("masked", [None, "later", "of another row", "all"])
@pytest.mark.parametrize("scale", [0.125, 2.0])
def test_a_page_and_a_rest_are_one_pass(scale: float, masked: str | None):
    """256 + 44 positions, also beside a page of which nothing is seen; or nothing seen at all."""
    cfg = config(8, 4, scale=scale).layers[0]
    q, k, v = _tensors()
    blank = np.zeros((1, 4, 2 * PAGE, 64), np.float32)
    ring = Ring(*(jnp.asarray(blank).at[:, :, :LENGTH].set(x) for x in (k, v)))
    page = join_page(jnp.asarray(k[:, :, :PAGE]), jnp.asarray(v[:, :, :PAGE]))
    row, floor = jnp.int32(0), jnp.asarray([PAGE], jnp.int32)
    positions = jnp.asarray([[LENGTH - 1]], jnp.int32)
    rows, firsts, pages = [0], [0], [page[0]]
    if masked is not None:
        wild = jnp.full_like(page[0], 1e4)  # would be seen at once
        rows.append(1 if masked == "of another row" else 0)
        firsts.append(2 * PAGE if masked != "of another row" else 0)
        pages.append(wild)
    if masked == "all":
        rows, firsts, pages = rows[1:], firsts[1:], pages[1:]
    queries = queries_first(jnp.asarray(q))
    for order in (1, -1):  # the page of which nothing is seen comes last, and first
        table = jnp.asarray(page_table(firsts[::order], rows[::order], 1, one_each=True))
        group = (jnp.concatenate(pages[::order]),)
        carry = start_carry(queries, 64)
        carry = attend_pages(cfg, carry, queries, group, table, row, positions)
        if masked == "all":
            np.testing.assert_array_equal(finish(carry, jnp.dtype(jnp.float32)), 0)
            floor = jnp.asarray([0], jnp.int32)
        carry = attend_tail(cfg, carry, queries, ring, row, positions, floor, PAGE)
        out = np.asarray(finish(carry, jnp.dtype(jnp.float32)))
        assert np.isfinite(out).all()
        assert nmse(out, _one_pass(q, k, v, scale)) < 1e-12
    whole = attend_ring(cfg, start_carry(queries, 64), queries, ring, row, positions)
    assert nmse(finish(whole, jnp.dtype(jnp.float32)), _one_pass(q, k, v, scale)) < 1e-12


@pytest.fixture(scope="module")
def reference() -> LLM:
    """One device, one program."""
    return random_llm(MODEL, devices=1, engine="fused", **LONG)


@pytest.mark.xdist_group("edges")
@pytest.mark.parametrize(("devices", "page"), [(1, 16), (1, 64), (1, 256), (2, 64)])
def test_prompts_at_the_edges_of_pages(devices: int, page: int, reference: LLM):
    cut = dict(devices=devices, split_mode="tensor" if devices > 1 else "none")
    llm = random_llm(MODEL, page=page, kv="host", **cut, **LONG)
    for length in LENGTHS:
        ids, forced = random_ids(length, MODEL.vocab, seed=length), [3, 1, 4]
        found, expected = (run(each, ids, forced) for each in (llm, reference))
        assert_close(found.logits, expected.logits, what=f"{length} tokens")


@contextmanager
def _compilations() -> Iterator[list[str]]:
    """Events of the compiler while the context is open."""
    seen: list[str] = []

    def listen(event: str, duration: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.xdist_group("edges-compilations")
def test_compilations_follow_sizes_of_chunks_not_prompts():
    """Programs are as many as kinds of work, times chunk sizes or group sizes; lengths on both
    sides of the edges of chunks and pages ask for no more."""
    cfg = config(8, 4, layers=1, embed=192)  # programs that no other test has compiled
    llm = random_llm(cfg, devices=1, page=64, group_pages=4, kv="host", **LONG)
    chunks = len(chunk_sizes(LONG["ubatch"])) + 1
    groups = len(group_sizes(llm.plan.options.group_pages))
    greedy = SamplingParams(max_tokens=4, temperature=0)

    def serve(lengths: tuple[int, ...]) -> int:
        with _compilations() as seen:
            for length in lengths:
                llm.generate(random_ids(length, MODEL.vocab), greedy)
        return len(seen)

    found = serve((10, 40, 100, *LENGTHS, 560, 700))
    stages = 4  # the embedding, into the layer, out of it, and the head
    assert 0 < found <= chunks * (stages + groups) + 2 * groups
    assert serve((5, 16, 17, 64, 65, 254, 258, 300, 510, 514, 570, 690)) == 0
