"""Byte-level BPE: words of each pre-tokenizer, merges against the rule written out naively."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.errors import TokenizerError
from jaxllm.text.bpe import BpeEncoder, byte_of_char
from jaxllm.text.pretokenizers import PRETOKENIZERS
from jaxllm.text.vocab import Vocab, read_vocab

CHARS = list(byte_of_char())
SAMPLE = "I'm DON'T 12345 x=a[i];\n\n  été\tok!! "


def vocab_of(merges: list[str], pre: str = "gpt-2", **extra: Any) -> Vocab:
    joined = [merge.replace(" ", "") for merge in merges]
    return read_vocab(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": list(dict.fromkeys(CHARS + joined)),
            "tokenizer.ggml.merges": merges,
            **extra,
        }
    )


def naive(merges: list[str], word: str) -> list[str]:
    char = {byte: text for text, byte in byte_of_char().items()}
    parts = [char[byte] for byte in word.encode()]
    ranks = {tuple(merge.split(" ")): rank for rank, merge in reversed(list(enumerate(merges)))}
    while True:
        pairs = [ranks.get(pair) for pair in zip(parts, parts[1:], strict=False)]
        ranked = [(rank, i) for i, rank in enumerate(pairs) if rank is not None]
        if not ranked:
            return parts
        at = min(ranked)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_merges_equal_the_naive_rule(data: st.DataObject) -> None:
    parts, merges = ["a", "b", "Ã", "©"], []
    for _ in range(data.draw(st.integers(0, 12))):
        left, right = data.draw(st.sampled_from(parts)), data.draw(st.sampled_from(parts))
        merges.append(f"{left} {right}")
        parts.append(left + right)
    text = data.draw(st.text("abé", max_size=24))
    vocab = vocab_of(merges)
    assert [vocab.texts[i] for i in BpeEncoder(vocab).encode(text)] == naive(merges, text)


@pytest.mark.parametrize("name", sorted(PRETOKENIZERS))
def test_words_lose_nothing(name: str) -> None:
    encoder = BpeEncoder(vocab_of([], name))
    assert "".join(encoder.words(SAMPLE)) == SAMPLE
    assert "".join(encoder.words("日本語 १२३ \u3000\r\n ¾²\U0001f600")) == (
        "日本語 १२३ \u3000\r\n ¾²\U0001f600"
    )


WORDS = {
    "gpt-2": ["I", "'m", " DON", "'", "T", " 12345", " x", "=", "a", "[", "i", "];", "\n\n ",
              " été", "\t", "ok", "!!", " "],
    "smollm": ["I", "'m", " DON", "'", "T", " ", "1", "2", "3", "4", "5", " x", "=", "a", "[", "i",
               "];", "\n\n ", " été", "\t", "ok", "!!", " "],
    "llama-bpe": ["I", "'m", " DON", "'T", " ", "123", "45", " x", "=a", "[i", "];\n\n", " ",
                  " été", "\tok", "!!", " "],
    "qwen2": ["I", "'m", " DON", "'T", " ", "1", "2", "3", "4", "5", " x", "=a", "[i", "];\n\n",
              " ", " été", "\tok", "!!", " "],
    "default": ["I", "'", "m", " DON", "'", "T", " ", "123", "45", " x", "=", "a", "[", "i",
                "];", "\n\n ", " été", "\t", "ok", "!!", " "],
    "gpt-4o": ["I'm", " DON'T", " ", "123", "45", " x", "=a", "[i", "];\n\n", " ", " été", "\tok",
               "!!", " "],
    "tekken": ["I", "'m", " DON", "'T", " ", "1", "2", "3", "4", "5", " x", "=a", "[i", "];\n\n",
               " ", " été", "\tok", "!!", " "],
    "deepseek-v3": ["I", "'m", " DON", "'T", " ", "123", "45", " x", "=a", "[i", "];\n\n", " ",
                    " été", "\tok", "!!", " "],
}  # fmt: skip


@pytest.mark.parametrize("name", WORDS)
def test_words(name: str) -> None:
    assert BpeEncoder(vocab_of([], name)).words(SAMPLE) == WORDS[name]


def test_combining_marks_stay_with_their_letters_in_qwen35() -> None:
    text = "नमस्ते"
    assert BpeEncoder(vocab_of([], "qwen35")).words(text) == [text]
    assert len(BpeEncoder(vocab_of([], "qwen2")).words(text)) > 1


def test_ignore_merges_takes_whole_words() -> None:
    whole: dict[str, Any] = {"tokenizer.ggml.tokens": [*CHARS, "abc"]}
    assert BpeEncoder(vocab_of([], "llama-bpe", **whole)).encode("abc") == [256]
    assert len(BpeEncoder(vocab_of([], "qwen2", **whole)).encode("abc")) == 3


def test_merges_of_unknown_or_repeated_parts_are_left_out() -> None:
    tokens: dict[str, Any] = {"tokenizer.ggml.tokens": [*CHARS, "ab"]}
    vocab = vocab_of(["b c", "a b", "x", "a b"], **tokens)
    assert BpeEncoder(vocab).encode("abc") == [256, vocab.ids["c"]]


def test_unknown_pretokenizer_names_the_known_ones() -> None:
    with pytest.raises(TokenizerError, match="'strange' is not supported; known .*llama-bpe"):
        vocab_of([], "strange")


def test_raw_text_merges_of_gemma4() -> None:
    pieces = ["a", "b", "\u2581", "\u2581a", "\n", "\n\n"]
    vocab = read_vocab(
        {
            "tokenizer.ggml.model": "gemma4",
            "tokenizer.ggml.tokens": ["<bos>", *(f"<0x{i:02X}>" for i in range(256)), *pieces],
            "tokenizer.ggml.merges": ["\u2581 a"],
            "tokenizer.ggml.bos_token_id": 0,
        }
    )
    encoder = BpeEncoder(vocab)
    assert vocab.add_bos
    got = [vocab.texts[i] for i in encoder.encode("b a\n\né")]
    assert got == ["b", "\u2581a", "\n\n", "<0xC3>", "<0xA9>"]
