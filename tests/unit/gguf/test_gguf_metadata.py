"""Prefixes, types and per-layer values of metadata."""

import numpy as np
import pytest

from jaxllm.errors import ModelError
from jaxllm.gguf import Metadata

META = Metadata(
    {
        "general.name": "m",
        "llama.block_count": 2,
        "llama.attention.head_count_kv": np.array([4, 2], np.int32),
        "llama.attention.head_count": 8,
        "llama.rope.freq_base": 10000,
        "llama.flag": True,
    },
    "llama",
)


def test_prefix() -> None:
    assert META.get("block_count") == 2
    assert META.get("llama.block_count") == 2
    assert META.get("general.name") == "m"
    assert META.get("nothing") is None and META.get("nothing", 3) == 3
    assert "block_count" in META and "nothing" not in META


def test_require() -> None:
    assert META.require("block_count", int) == 2
    base = META.require("rope.freq_base", float)
    assert base == 10000.0 and isinstance(base, float)
    with pytest.raises(ModelError, match=r"lacks 'llama\.context_length'"):
        META.require("context_length", int)
    with pytest.raises(ModelError, match=r"'llama\.flag' is True of type bool, not int"):
        META.require("flag", int)
    with pytest.raises(ModelError, match="not str"):
        META.require("block_count", str)


def test_per_layer() -> None:
    assert META.per_layer("attention.head_count_kv", 2) == (4, 2)
    assert META.per_layer("attention.head_count", 3) == (8, 8, 8)
    assert META.per_layer("nothing", 2, 0) == (0, 0)
    with pytest.raises(ModelError, match="holds 2 values for 3 layers"):
        META.per_layer("attention.head_count_kv", 3)
    with pytest.raises(ModelError, match="lacks"):
        META.per_layer("nothing", 2)
