"""Ids, bytes and end-of-generation tokens of two real models against llama.cpp's."""

import base64
import json
import time
from pathlib import Path
from typing import Any

import pytest

from jaxllm.gguf import open_gguf
from jaxllm.text import StreamDecoder, Tokenizer, load_tokenizer

MODELS = ["smollm2-135m", "gemma3-270m"]


@pytest.fixture(params=MODELS, scope="module")
def case(request: pytest.FixtureRequest, shared: Path) -> tuple[Tokenizer, dict[str, Any]]:
    fixture = "smollm2_path" if request.param == "smollm2-135m" else "gemma3_path"
    path: Path = request.getfixturevalue(fixture)
    tokenizer = load_tokenizer(open_gguf(path))
    assert tokenizer is not None
    return tokenizer, json.loads((shared / "refs" / f"{request.param}.json").read_text())


def test_special_ids(case: tuple[Tokenizer, dict[str, Any]]) -> None:
    tokenizer, reference = case
    meta = reference["meta"]
    assert sorted(tokenizer.eog) == meta["eog_ids"]
    assert (tokenizer.bos, tokenizer.eos) == (meta["bos"], meta["eos"])
    assert tokenizer.add_bos == meta["add_bos"]
    assert tokenizer.vocab_size == meta["n_vocab"]


@pytest.mark.parametrize(
    ("key", "add_special", "parse_special"),
    [
        ("plain", False, False),
        ("parsed", False, True),
        ("bos_plain", True, False),
        ("bos_parsed", True, True),
    ],
)
def test_ids(
    case: tuple[Tokenizer, dict[str, Any]], key: str, add_special: bool, parse_special: bool
) -> None:
    tokenizer, reference = case
    for each in reference["tokenization"]:
        assert tokenizer.encode(each["text"], add_special, parse_special) == each[key]


def test_bytes(case: tuple[Tokenizer, dict[str, Any]]) -> None:
    tokenizer, reference = case
    for each in reference["tokenization"]:
        want = base64.b64decode(each["detok_plain_b64"])
        assert tokenizer.decode_bytes(each["plain"]) == want
        pieces = [base64.b64decode(piece) for piece in each["pieces_plain_b64"]]
        assert [tokenizer.piece(token) for token in each["plain"]] == pieces
        stream = StreamDecoder(tokenizer)
        streamed = [stream.push(token) for token in each["plain"]]
        assert "".join(streamed) + stream.flush() == want.decode("utf-8", "replace")


def test_loading_is_quick(gemma3_path: Path) -> None:
    start = time.perf_counter()
    load_tokenizer(open_gguf(gemma3_path))
    assert time.perf_counter() - start < 3, "262k tokens"
