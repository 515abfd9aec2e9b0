"""Perplexity of hand-computed chunks, its error, and base runs."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from jaxllm import LLM, OptionError, PromptError
from jaxllm.perplexity import Perplexity, perplexity
from jaxllm.testing import random_llm
from support import random_ids

CTX, CHUNKS = 16, 3
IDS = random_ids(CTX * CHUNKS + 5, 128)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return random_llm(devices=1, ctx=CTX, prefix_cache=False)


@pytest.fixture(scope="module")
def by_hand(llm: LLM) -> list[float]:
    """-log p of tokens 9 to 15 of each chunk, which have 8 or more before them."""
    found = []
    for start in range(0, CTX * CHUNKS, CTX):
        chunk = IDS[start : start + CTX]
        logits = llm.logits(chunk).astype(np.float64)
        for at in range(CTX // 2, CTX - 1):
            lse = np.log(np.exp(logits[at]).sum())
            found.append(float(lse - logits[at, chunk[at + 1]]))
    return found


def test_second_halves_are_scored_with_their_error(llm: LLM, by_hand: list[float]):
    told: list[Perplexity] = []
    found = perplexity(llm, IDS, CTX, report=told.append)
    mean = sum(by_hand) / len(by_hand)
    variance = sum((x - mean) ** 2 for x in by_hand) / len(by_hand)
    assert found.scored == len(by_hand) == CHUNKS * 7
    assert found.value == pytest.approx(math.exp(mean), rel=1e-5)
    error = math.sqrt(variance / (len(by_hand) - 1)) * math.exp(mean)
    assert found.error == pytest.approx(error, rel=1e-4)
    assert found.chunk_nll == pytest.approx(
        [sum(by_hand[i : i + 7]) / 7 for i in (0, 7, 14)], rel=1e-5
    )
    assert [len(each.chunk_nll) for each in told] == [1, 2, 3]
    assert told[-1] == found


def test_chunks_begin_with_bos_where_the_vocabulary_adds_one(llm: LLM, monkeypatch):
    class Vocabulary:
        add_bos, bos = True, 1

    ones = [*IDS]
    ones[0] = ones[CTX] = ones[2 * CTX] = 1
    expected = perplexity(llm, ones, CTX)
    monkeypatch.setattr(llm, "tokenizer", Vocabulary())
    assert perplexity(llm, IDS, CTX) == expected


def test_divergence_from_a_base_run(llm: LLM, tmp_path: Path):
    base = tmp_path / "base.kl"
    perplexity(llm, IDS, CTX, save_base=base)
    assert [p.name for p in tmp_path.iterdir()] == ["base.kl"]
    same = perplexity(llm, IDS, CTX, base=base).divergence
    assert same is not None and same.mean == same.maximum == 0 and same.top1 == 1
    other = random_llm(devices=1, ctx=CTX, seed=1)
    found = perplexity(other, IDS, CTX, base=base)
    logp = []
    for model in (llm, other):
        rows = [model.logits(IDS[i : i + CTX])[CTX // 2 : -1] for i in (0, CTX, 2 * CTX)]
        logits = np.concatenate(rows).astype(np.float64)
        logp.append(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))
    kl = (np.exp(logp[0]) * (logp[0] - logp[1])).sum(-1)
    assert found.divergence is not None
    assert found.divergence.mean == pytest.approx(kl.mean(), rel=1e-4)
    assert found.divergence.maximum == pytest.approx(kl.max(), rel=1e-4)
    assert found.divergence.top1 == np.mean(logp[0].argmax(-1) == logp[1].argmax(-1))
    assert found.divergence.base_value == pytest.approx(perplexity(llm, IDS, CTX).value, rel=1e-6)


def test_what_cannot_be_compared_or_run_is_refused(llm: LLM, tmp_path: Path):
    base = tmp_path / "base.kl"
    perplexity(llm, IDS, CTX, save_base=base)
    with pytest.raises(OptionError, match="another text"):
        perplexity(llm, IDS[1:], CTX, base=base)
    with pytest.raises(OptionError, match="has chunks 3 and this run 2"):
        perplexity(llm, IDS, CTX, chunks=2, base=base)
    base.write_bytes(base.read_bytes()[:-4])
    with pytest.raises(OptionError, match="damaged"):
        perplexity(llm, IDS, CTX, base=base)
    base.write_bytes(b"something else, of some length")
    with pytest.raises(OptionError, match="no base run"):
        perplexity(llm, IDS, CTX, base=base)
    with pytest.raises(OptionError, match="No such file"):
        perplexity(llm, IDS, CTX, base=tmp_path / "none")
    with pytest.raises(OptionError, match="cannot write"):
        perplexity(llm, IDS, CTX, save_base=tmp_path / "no" / "such")
    for bad in ({"ctx": 3}, {"ctx": 32}, {"chunks": 0}, {"ctx": 16, "ids": IDS[:15]}):
        with pytest.raises(OptionError):
            perplexity(llm, **({"ids": IDS, "ctx": CTX} | bad))
    with pytest.raises(PromptError, match="token ids"):
        perplexity(llm, ["word"] * CTX, CTX)  # type: ignore
