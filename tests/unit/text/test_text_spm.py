"""Merging by score against the rule written out naively, ties and missing characters included."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.text.spm import SpmEncoder
from jaxllm.text.vocab import Vocab, read_vocab

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def vocab_of(pieces: dict[str, float], **extra: Any) -> Vocab:
    texts = ["<unk>", "<s>", "</s>", *BYTES, *pieces]
    return read_vocab(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": texts,
            "tokenizer.ggml.scores": np.array([0.0] * 259 + list(pieces.values()), np.float32),
            "tokenizer.ggml.token_type": np.array([2, 3, 3] + [6] * 256 + [1] * len(pieces)),
            **extra,
        }
    )


def naive(vocab: Vocab, text: str) -> list[int]:
    parts = list(text.replace(" ", "\u2581"))
    while True:
        joined = [
            vocab.ids.get(left + right) for left, right in zip(parts, parts[1:], strict=False)
        ]
        ranked = [(-vocab.scores[token], i) for i, token in enumerate(joined) if token is not None]
        if not ranked:
            break
        at = min(ranked)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    ids: list[int] = []
    for part in parts:
        if part in vocab.ids:
            ids.append(vocab.ids[part])
        else:
            ids += [vocab.ids[f"<0x{byte:02X}>"] for byte in part.encode()]
    return ids


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.dictionaries(
        st.text("ab\u2581é", min_size=1, max_size=5), st.sampled_from([-3.0, -2.0, -1.0, 0.0])
    ),
    text=st.text("ab é\u2581日", max_size=30),
)
def test_equals_the_naive_rule(pieces: dict[str, float], text: str) -> None:
    vocab = vocab_of(pieces)
    encoder = SpmEncoder(vocab)
    assert encoder.encode(text) == naive(vocab, text)
    assert encoder.encode(text) == naive(vocab, text), "the remembered answer"


def test_leftmost_of_equal_scores() -> None:
    vocab = vocab_of({"a": 0, "aa": -1, "aaa": -2})
    assert [vocab.texts[i] for i in SpmEncoder(vocab).encode("aaaaa")] == ["aa", "aaa"]


def test_a_piece_may_join_characters_that_are_no_pieces() -> None:
    vocab = vocab_of({"xy": -1})
    assert SpmEncoder(vocab).encode("xyx") == [vocab.ids["xy"], vocab.ids["<0x78>"]]


def test_unknown_token_without_bytes() -> None:
    vocab = read_vocab(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "a"],
        }
    )
    assert SpmEncoder(vocab).encode("aé") == [3, 0, 0]


def test_long_stretch_without_cuts() -> None:
    vocab = vocab_of({"a": 0, "aa": -1, "aaaa": -2})
    assert SpmEncoder(vocab).encode("a" * 4001) == [vocab.ids["aaaa"]] * 1000 + [vocab.ids["a"]]
