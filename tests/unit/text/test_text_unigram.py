"""Unigram pieces against all ways to cut a text, and maps of characters of a few keys."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.errors import TokenizerError
from jaxllm.text.tokenizer import StreamDecoder, Tokenizer
from jaxllm.text.unigram import CharsMap, UnigramEncoder
from jaxllm.text.vocab import read_vocab


def tokenizer_of(pieces: dict[str, float], **extra: Any) -> Tokenizer:
    texts = ["<pad>", "</s>", "<unk>", "<extra>", *pieces]
    return Tokenizer(
        read_vocab(
            {
                "tokenizer.ggml.model": "t5",
                "tokenizer.ggml.tokens": texts,
                "tokenizer.ggml.scores": np.array([0.0] * 4 + [*pieces.values()], np.float32),
                "tokenizer.ggml.token_type": np.array([3, 3, 2, 4] + [1] * len(pieces)),
                **{f"tokenizer.ggml.{key}": value for key, value in extra.items()},
            }
        )
    )


def charsmap(replacements: dict[bytes, bytes]) -> np.ndarray:
    """A map as SentencePiece stores it; the first free places are taken."""
    units, taken, texts = [0] * 4096, {0}, b""

    def fill(node: int, label: int, begun: bytes) -> None:
        nonlocal texts
        keys = [key for key in replacements if key.startswith(begun)]
        labels = sorted({key[len(begun)] if len(key) > len(begun) else 0 for key in keys})
        base = next(b for b in range(1, 2048) if not {node ^ b ^ c for c in labels} & taken)
        taken.update(node ^ base ^ c for c in labels)
        units[node] = base << 10 | (0 in labels) << 8 | label
        for c in labels:
            if c:
                fill(node ^ base ^ c, c, begun + bytes([c]))
            else:
                units[node ^ base] = 1 << 31 | len(texts)
                texts += replacements[begun] + b"\0"

    fill(0, 0, b"")
    array = np.asarray(units, "<u4").tobytes()
    return np.frombuffer(len(array).to_bytes(4, "little") + array + texts, np.int8)


def ways(text: str) -> Iterator[list[str]]:
    if not text:
        yield []
    for stop in range(1, len(text) + 1):
        yield from ([text[:stop], *rest] for rest in ways(text[stop:]))


@settings(max_examples=200, deadline=None)
@given(
    pieces=st.dictionaries(
        st.text("ab\u2581é", min_size=1, max_size=3),
        st.integers(1, 1 << 20).map(lambda n: -n / (1 << 16)),
        min_size=1,
    ),
    text=st.text("ab é日", max_size=7),
)
def test_equals_the_best_of_all_ways(pieces: dict[str, float], text: str) -> None:
    tokenizer = tokenizer_of(pieces)
    unknown = min(0.0, *pieces.values()) - 10.0

    def score(parts: list[str]) -> float:
        missing = [part for part in parts if part not in pieces]
        if any(len(part) > 1 for part in missing):
            return -np.inf
        return sum(pieces.get(part, unknown) for part in parts)

    shown = text.replace(" ", "\u2581")
    ids = tokenizer.encode(text, add_special=False)
    encoder = UnigramEncoder(tokenizer.vocab)
    assert encoder.encode(text) == ids
    found = [tokenizer.vocab.texts[i] for i in ids]
    assert "<unk><unk>" not in "".join(found)
    values = [pieces.get(part, 0.0) for part in found]
    lost = len(shown) - sum(len(part) for part in found if part != "<unk>")
    best = max(map(score, ways(shown)))
    assert np.isclose(sum(values) + lost * unknown, best)


def test_spaces():
    pieces = {"\u2581": -3.0, "\u2581ab": -1.0, "ab": -2.0}
    merged = tokenizer_of(pieces, remove_extra_whitespaces=True, add_space_prefix=True)
    assert merged.encode("  ab   ab ") == [5, 5, 1]
    assert merged.encode("") == [1]
    assert merged.decode([5, 5, 1], skip_special=True) == "ab ab"
    streams = [StreamDecoder(merged, whole=whole) for whole in (True, False)]
    texts = ["".join(map(stream.push, [0, 5, 5])) for stream in streams]
    assert texts == ["ab ab", " ab ab"]
    kept = tokenizer_of(pieces, add_space_prefix=True)
    assert kept.encode(" ab ", add_special=False) == [4, 5, 4]
    assert kept.encode("ab<extra>ab", add_special=False) == [5, 3, 5]
    assert tokenizer_of(pieces).encode("ab", add_special=False) == [6]


def test_the_longest_key_of_a_map_is_replaced():
    replaced = {"ﬁ".encode(): b"fi", b"A": b"a", b"AB": b"<>", b"\t": b" ", b"x": b""}
    stored = charsmap(replaced)
    known = CharsMap(stored.tobytes())
    for key, value in replaced.items():
        assert known.longest(b"-" + key + b"-", 1) == (len(key), value)
    assert known.longest(b"B", 0) == (0, b"")
    extra = dict(precompiled_charsmap=stored, remove_extra_whitespaces=True)
    encoder = UnigramEncoder(tokenizer_of({"a": -1.0}, **extra).vocab)
    assert encoder.normalise("ﬁA\tABx ABAé日") == "\u2581fia\u2581<>\u2581<>aé日"


@pytest.mark.parametrize("change", [slice(0, 3), slice(0, 40), slice(0, -1)])
def test_a_damaged_map_is_refused(change: slice):
    stored = charsmap({b"A": b"a"})
    with pytest.raises(TokenizerError, match="precompiled_charsmap is damaged"):
        tokenizer_of({"a": -1.0}, precompiled_charsmap=stored[change])
