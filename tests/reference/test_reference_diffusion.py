"""Random models without a causal mask against llama.cpp's float32 logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_reference_archs import ENGINES, LIMIT, _load, _reference, _spec

from jaxllm import ModelError, PromptError
from support import nmse

NAMES = ("dream-dense", "llada-dense", "llada-moe-moe", "rnd1-moe")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "llada-dense" else pytest.mark.slow) for n in NAMES]
)
def test_every_position_sees_the_whole_prompt(name: str, shared: Path):
    """On one device and with heads dealt out, of prompts that fill no program."""
    reference = _reference(shared, name)
    tokens, lengths = reference["tokens"], reference["seq3_lens"].tolist()
    parts = [part.tolist() for part in np.split(tokens, np.cumsum(lengths)[:-1])]
    for engine in ("fused", "uneven"):
        llm = _load(_spec(name), **(ENGINES[engine] | {"ubatch": 128}))
        assert nmse(llm.logits(tokens.tolist()), reference["logits"]) <= LIMIT
        separate = np.concatenate(llm.logits(parts))
        assert nmse(separate, reference["seq3_logits_separate"]) <= LIMIT


def test_what_it_cannot_do(shared: Path):
    llm = _load(_spec("llada-dense"), **(ENGINES["fused"] | {"ubatch": 32}))
    with pytest.raises(ModelError, match="diffusion"):
        llm.generate([1, 2, 3])
    with pytest.raises(ModelError, match="diffusion"):
        next(llm.stream([1, 2, 3]))
    with pytest.raises(PromptError, match="33 tokens .* at most 32"):
        llm.logits(list(range(33)))
