"""Faults that the suite's checks must see: each is put into the package and makes a check fail.

A row names the check that is the first to see its fault. Compiled programs are dropped around each,
for they would hide a fault that lies in what was traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial

import jax
import pytest

from jaxllm.models.config import Draft
from mutations import faults
from mutations.checks import check_budget, check_cut, model

PAGES_OF_TWO = 2 * 2 * 7 * 16 * 4 * 32 * 4 // 2  # bytes of two layers' pages, half of the groups


def _with_draft() -> None:
    """A draft's layer has a cache of its own and takes none of the model's budget."""
    main = model()
    cfg = replace(main, draft=Draft(main.layers[0])).with_draft()
    llm = check_budget(cfg, kv_gpu_layers=99)
    assert llm.plan.residency.pages[2] == (0, 0), "a draft layer has taken of the budget"


Q8 = dict(cache_type_k="q8_0", cache_type_v="q8_0")
CHECKS: dict[str, Callable[[], object]] = {
    "heads": partial(check_cut, model()),
    "uneven": partial(check_cut, model(), tensor_split="3,1"),
    "wide values": partial(check_cut, model(v_dim=24)),
    "quantised": partial(check_cut, model(k_dim=32, v_dim=64), types=Q8),
    "budget": partial(check_budget, model(4), kv_gpu_layers=1),
    "rooms": partial(check_budget, model(4), rooms=(PAGES_OF_TWO,) * 2, kv_gpu_layers=3),
    "draft": _with_draft,
}
FAULTS = [
    (faults.mirrored_keys_and_values, "heads", "against one device"),
    (faults.mirrored_keys_and_values, "quantised", "against one device"),
    (faults.mirrored_cache, "heads", "against one device"),
    (faults.exchanged_weights, "heads", "against one device"),
    (faults.exchanged_queries, "heads", "against one device"),
    (faults.exchanged_places, "uneven", "weights take"),
    (faults.overlapping_heads, "heads", "is held 1 to 2"),
    (faults.heads_one_early, "heads", "against one device"),
    (faults.keys_one_row_early, "heads", "against numpy"),
    (faults.output_cut_by_key_width, "wide values", "against one device"),
    (faults.values_cut_by_key_width, "wide values", "against one device"),
    (faults.values_counted_by_key_width, "wide values", "planned were"),
    (faults.scales_of_a_neighbour_when_written, "quantised", "against one device"),
    (faults.scales_of_a_neighbour_in_pages, "quantised", "against one device"),
    (faults.scales_of_a_neighbour_in_host_memory, "quantised", "host against device"),
    (faults.newest_not_written, "heads", "against"),
    (faults.newest_not_read, "heads", "against one device"),
    (faults.page_cut_too_early, "heads", "against one device"),
    (faults.budget_spent_twice, "budget", "planned were"),
    (faults.room_taken_twice, "rooms", "planned were"),
    (faults.drafts_not_counted, "draft", "planned were"),
    (faults.drafts_counted_with_the_rest, "draft", "has taken of the budget"),
]


@cache
def _passes(check: str) -> None:
    """Without a fault; once for all faults of a check."""
    CHECKS[check]()


@pytest.fixture
def own_programs() -> Iterator[None]:
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.parametrize(
    ("fault", "check", "seen"),
    [
        pytest.param(*f, marks=pytest.mark.xdist_group(f"mutations-{f[1]}"), id=f[0].__name__)
        for f in FAULTS
    ],
)
def test_a_fault_is_seen(fault: Callable, check: str, seen: str, own_programs: None):
    _passes(check)
    jax.clear_caches()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError, match=seen):
        fault(patch)
        CHECKS[check]()
