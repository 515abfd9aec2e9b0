"""Perplexities of the reference texts against transformers, and across placements."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxllm import LLM
from jaxllm.perplexity import perplexity

pytestmark = [pytest.mark.slow]
TEXTS = {"smollm2-135m": "ppl_licence.txt", "gemma3-270m": "ppl_pydoc.txt"}
MODELS = [pytest.param(*item, marks=pytest.mark.xdist_group(item[0])) for item in TEXTS.items()]


def load(path: Path, **arguments: object) -> LLM:
    return LLM.from_gguf(path, dtype="float32", ctx=2048, progress=False, **arguments)  # type: ignore


def ids_of(llm: LLM, shared: Path, text: str) -> list[int]:
    assert llm.tokenizer is not None
    return llm.tokenizer.encode((shared / "refs" / text).read_text("utf-8").removesuffix("\n"))


@pytest.mark.parametrize(("name", "text"), MODELS)
def test_perplexity_of_transformers(
    name: str, text: str, shared: Path, request: pytest.FixtureRequest
):
    path = request.getfixturevalue({"smollm2-135m": "smollm2_path"}.get(name, "gemma3_path"))
    reference = json.loads((shared / "refs" / f"{name}.json").read_text("utf-8"))
    llm = load(path, devices=1)
    ids = ids_of(llm, shared, text)
    assert len(ids) == reference["perplexity"][text]["tokens"]
    found = perplexity(llm, ids)
    assert found.value == pytest.approx(reference["hf"]["ppl"][text], rel=1e-3)
    other = reference["perplexity"][text]["f16_fa0"]  # llama.cpp rounds activations
    assert found.scored == other["scored"]
    assert found.error == pytest.approx(other["stderr"], rel=0.02)
    assert found.chunk_nll == pytest.approx(other["chunk_nll"], rel=0.02)


@pytest.mark.xdist_group("smollm2-135m")
def test_perplexity_is_the_same_wherever_the_cache_is(smollm2_path: Path, shared: Path):
    host = {"kv": "host", "page": 128, "ubatch": 128}
    placements = (
        {"devices": 1},
        {"devices": 1, **host},
        {"devices": 1, **host, "kv_gpu_layers": 7},
        {"devices": 2, "split_mode": "tensor", "attn_split": "2,1", **host},
    )
    values = []
    for placement in placements:
        llm = load(smollm2_path, **placement)
        ids = ids_of(llm, shared, TEXTS["smollm2-135m"])
        values.append(f"{perplexity(llm, ids, chunks=2).value:.4f}")
    assert len(set(values)) == 1, values
