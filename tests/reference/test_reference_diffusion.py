"""Random models without a causal mask against llama.cpp's float32 logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import archs
from jaxllm import ModelError, PromptError
from parity import UNEVEN, load, load_model, reference
from support import nmse


def test_every_position_sees_the_whole_prompt(shared: Path):
    """On one device and with heads dealt out, of prompts that fill no program."""
    of = reference("llada-dense")
    tokens, lengths = of["tokens"], of["seq3_lens"].tolist()
    parts = [part.tolist() for part in np.split(tokens, np.cumsum(lengths)[:-1])]
    for plan in ({}, UNEVEN):
        llm = load_model("llada-dense", **plan)
        separate = np.concatenate(llm.logits(parts))
        assert nmse(separate, of["seq3_logits_separate"]) <= 1e-9


def test_what_it_cannot_do(shared: Path):
    llm = load(archs.write(archs.spec_path("llada-dense")), ctx=128, ubatch=32)
    with pytest.raises(ModelError, match="diffusion"):
        llm.generate([1, 2, 3])
    with pytest.raises(ModelError, match="diffusion"):
        next(llm.stream([1, 2, 3]))
    with pytest.raises(PromptError, match="33 tokens .* at most 32"):
        llm.logits(list(range(33)))
