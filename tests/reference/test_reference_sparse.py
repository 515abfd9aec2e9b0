"""Random models whose attention an indexer makes sparse, against llama.cpp's float32 logits.

With one small head, whose products below zero count as zero, many scores are equal. llama.cpp then
keeps what a heap happens to keep; so that its logits can be compared, that heap chooses here too.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.cache import sparse
from parity import SMALL, UNEVEN, check, load_model, reference
from support import nmse, run

TOP = 8


def _heap_keeps(scores: list[float]) -> list[int]:
    """Indexes that std::partial_sort of GNU's library leaves in front, of the best TOP."""
    heap = list(range(TOP))

    def sift(hole: int, value: int) -> None:
        """To the bottom along the worse children, then up to its place."""
        top, child = hole, 2 * hole + 2
        while hole < (TOP - 1) // 2:
            child = 2 * hole + 2
            child -= scores[heap[child]] > scores[heap[child - 1]]
            heap[hole], hole = heap[child], child
        if TOP % 2 == 0 and hole == (TOP - 2) // 2:
            heap[hole], hole = heap[2 * hole + 1], 2 * hole + 1
        while hole > top and scores[heap[(hole - 1) // 2]] > scores[value]:
            heap[hole], hole = heap[(hole - 1) // 2], (hole - 1) // 2
        heap[hole] = value

    for parent in range((TOP - 2) // 2, -1, -1):
        sift(parent, heap[parent])
    for i in range(TOP, len(scores)):
        if scores[i] > scores[heap[0]]:
            sift(0, i)
    return heap


def _choose(scores: np.ndarray) -> np.ndarray:
    rows = np.asarray(scores).reshape(-1, scores.shape[-1]).tolist()
    return np.asarray(list(map(_heap_keeps, rows)), np.int32).reshape(*scores.shape[:-1], TOP)


class _Heap:
    """`jax.lax` whose top_k is that of a first block, which holds all positions."""

    def top_k(self, scores: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
        new = scores[..., count:]
        at = jax.ShapeDtypeStruct((*new.shape[:-1], count), jnp.int32)
        chosen = jax.pure_callback(_choose, at, new)
        return jnp.take_along_axis(new, chosen, axis=-1), chosen + count


@pytest.mark.parity
@pytest.mark.parametrize("name", ["deepseek32-moe", "glm-dsa-moe"])
def test_logits(name: str, shared: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr(sparse, "lax", _Heap())
        check(load_model(name), reference(name))


@pytest.mark.parametrize(
    "name", [pytest.param("deepseek32-moe", marks=pytest.mark.parity), "glm-dsa-moe"]
)
def test_engines_choose_alike(name: str, shared: Path):
    """In pages that come from the host and are folded a few positions at a time."""
    of = reference(name)
    tokens, forced = of["tokens"].tolist(), of["greedy_ids"][:4].tolist()
    one = run(load_model(name, **SMALL), tokens, forced)
    other = run(load_model(name, **UNEVEN, kv_replicate=True), tokens, forced)
    assert nmse(other.logits, one.logits) <= 1e-9
