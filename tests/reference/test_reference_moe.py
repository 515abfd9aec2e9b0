"""Mixtures of experts whose references are of something else than their files say."""

from __future__ import annotations

from pathlib import Path

import pytest

from parity import UNEVEN, load_model, reference
from support import nmse


@pytest.mark.parity
def test_blocks_of_which_none_is_left_out(shared: Path):
    """llama.cpp chooses blocks of keys with flash attention alone: these logits are of all keys. In
    a variant some are left out."""
    name, ctx = "minimax-m3-moe", 32
    of = reference(name)
    for plan in ({}, UNEVEN):
        llm = load_model(name, **plan | {"ctx": ctx})
        assert nmse(llm.logits(of["tokens"][:ctx].tolist()), of["logits"][:ctx]) <= 1e-9


def test_layers_that_contradict_their_metadata(shared: Path):
    """llama.cpp runs this file's third layer, which has experts, as a dense one without tensors."""
    with pytest.warns(UserWarning, match="experts of layers 2"):
        load_model("ernie4_5-moe-moe")
