"""docs/architectures.md and README.md say what was measured, of every architecture that loads."""

from __future__ import annotations

import re

import pytest

import architecture_results as kept
from jaxllm.models.registry import FAMILIES

RESULTS = kept.read()


@pytest.mark.parametrize(
    ("path", "made"), [(kept.DOCUMENT, kept.document), (kept.README, kept.readme)]
)
def test_written_by_the_command(path, made):
    """`python tests/architectures_table.py` has run since an architecture was added."""
    text = path.read_text("utf-8")
    assert made(text, RESULTS) == text


def test_the_document_lists_what_loads():
    listed = re.findall(r"^\| `([^`]+)`(?: †)? \|", kept.DOCUMENT.read_text("utf-8"), re.MULTILINE)
    assert sorted(set(listed) - {"-ts"}) == sorted(FAMILIES)


def test_nothing_measured_is_wrong():
    assert kept.faults(RESULTS) == []


def test_a_row_has_dense_models_and_mixtures():
    base = dict.fromkeys(("one", *kept.SPLITS, "weights"), 1e-12) | dict.fromkeys(
        kept.PLACES, "equal"
    )
    dense = base | {"model": "d", "architecture": "llama", "notes": [], "q8_0": 1e-4}
    mixture = dense | {"model": "m", "q8_0": 2e-4, "flips": 3}
    text = kept.document(kept.HEADING, {"d": dense, "m": mixture})
    [row] = [line for line in text.splitlines() if line.startswith("| `llama` |")]
    assert row.split(" | ")[1] == "2" and "| 2e-04, 3 tokens |" in row


def test_a_wrong_result_is_seen():
    right = {"model": "m", "architecture": "llama", "notes": [], "host": "equal"}
    right |= dict.fromkeys(("one", *kept.SPLITS, "q8_0", "weights"), 1e-12) | {"resident": "equal"}
    assert kept.faults({"m": right}) == []
    for column, value in {"one": 2e-9, "2,1": "PlanError: no", "host": 1e-12, "q8_0": None}.items():
        assert len(kept.faults({"m": right | {column: value}})) == 1
        assert "**" in kept.document(kept.HEADING, {"m": right | {column: value}})
