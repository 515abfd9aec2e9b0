"""Special tokens, defaults, decoding and damaged vocabularies on small vocabularies."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.errors import TokenizerError
from jaxllm.gguf import GGUFFile
from jaxllm.text import StreamDecoder, Tokenizer, load_tokenizer
from jaxllm.text.bpe import byte_of_char
from jaxllm.text.vocab import read_vocab

CHARS = list(byte_of_char())
SPECIAL = ["<|im_start|>", "<|im_end|>", "<tool>", "<tool>x"]


def bpe(**extra: Any) -> Tokenizer:
    """256 bytes, then two control tokens and two user-defined ones."""
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*CHARS, *SPECIAL],
        "tokenizer.ggml.token_type": np.array([1] * 256 + [3, 3, 4, 4], np.int32),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 257,
    }
    return Tokenizer(read_vocab(metadata | extra))


def spm(pieces: list[str], **extra: Any) -> Tokenizer:
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.scores": np.zeros(len(texts), np.float32),
        "tokenizer.ggml.token_type": np.array([2, 3, 3] + [6] * 256 + [1] * len(pieces)),
    }
    return Tokenizer(read_vocab(metadata | extra))


def file_of(**metadata: Any) -> GGUFFile:
    return GGUFFile(Path("x.gguf"), (), 3, metadata, {}, 0)


class TestSpecial:
    def test_control_tokens_are_text_unless_parsed(self) -> None:
        tokenizer = bpe()
        assert tokenizer.encode("<|im_end|>", parse_special=True) == [257]
        plain = tokenizer.encode("<|im_end|>")
        assert len(plain) == 10 and tokenizer.decode(plain) == "<|im_end|>"

    def test_user_defined_tokens_are_always_found_longest_first(self) -> None:
        assert bpe().encode("<tool><tool>x") == [258, 259]

    def test_rules_of_bos_and_eos(self) -> None:
        a = CHARS.index("a")
        assert bpe().encode("a") == [a]
        both = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
        assert bpe(**both).encode("a") == [256, a, 257]
        assert bpe(**both).encode("", add_special=True) == [256, 257]
        assert bpe(**both).encode("a", add_special=False) == [a]

    def test_llama3_adds_bos_by_default(self) -> None:
        assert bpe(**{"tokenizer.ggml.pre": "llama-bpe"}).add_bos
        assert not bpe(**{"tokenizer.ggml.pre": "qwen2"}).add_bos

    def test_spm_defaults(self) -> None:
        tokenizer = spm(["\u2581a", "a"])
        assert (tokenizer.bos, tokenizer.eos, tokenizer.add_bos) == (1, 2, True)
        assert tokenizer.encode("a") == [1, tokenizer.token_id("\u2581a")]
        assert tokenizer.bos_text == "<s>" and tokenizer.eos_text == "</s>"

    def test_space_prefix_follows_special_tokens_only(self) -> None:
        tokenizer = spm(["\u2581a", "a", "\u2581"])
        prefixed = tokenizer.token_id("\u2581a")
        got = tokenizer.encode("a<s>a", parse_special=True)
        assert got == [1, prefixed, 1, prefixed]
        assert tokenizer.decode(got[1:2]) == "a"
        bare = spm(["\u2581a", "a"], **{"tokenizer.ggml.add_space_prefix": False})
        assert bare.encode("a") == [1, bare.token_id("a")]

    def test_end_of_generation_by_known_texts(self) -> None:
        assert bpe().eog == {257}
        named = [*CHARS, "<|endoftext|>", "<|eot_id|>", "<|fim_pad|>", "<reponame>"]
        tokenizer = bpe(**{"tokenizer.ggml.tokens": named, "tokenizer.ggml.eos_token_id": 256})
        assert tokenizer.eog == {256, 257, 258, 259}

    def test_harmony_keeps_its_message_end(self) -> None:
        named = [*CHARS, "<|return|>", "<|call|>", "<|end|>", "<|channel|>"]
        tokenizer = bpe(**{"tokenizer.ggml.tokens": named, "tokenizer.ggml.eos_token_id": 256})
        assert tokenizer.eog == {256, 257}
        assert tokenizer.encode("<|end|>") == [258], "user-defined, always found"

    def test_phi3_swallows_spaces_after_special_tokens(self) -> None:
        plain, stripping = bpe(), bpe(**{"general.name": "Phi-3 mini"})
        assert len(plain.encode("<tool>\n a")) == 4
        assert stripping.encode("<tool>\n a") == [258, CHARS.index("a")]


class TestDecoding:
    @settings(max_examples=100, deadline=None)
    @given(st.text(max_size=40))
    def test_round_trip(self, text: str) -> None:
        tokenizer = bpe()
        ids = tokenizer.encode(text)
        want = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        assert tokenizer.decode(ids) == want
        stream = StreamDecoder(tokenizer)
        assert "".join([stream.push(i) for i in ids]) + stream.flush() == want

    def test_stream_never_breaks_a_character(self) -> None:
        tokenizer = bpe()
        stream = StreamDecoder(tokenizer)
        assert [stream.push(i) for i in tokenizer.encode("é\U0001f600!")] == [
            "", "é", "", "", "", "\U0001f600", "!",
        ]  # fmt: skip
        first = tokenizer.encode("é")[0]
        assert stream.push(first) == "" and stream.flush() == "\ufffd"
        assert stream.flush() == ""
        assert stream.push(first) + stream.push(CHARS.index("a")) == "\ufffda"

    def test_skip_special(self) -> None:
        tokenizer = bpe()
        ids = [256, CHARS.index("a"), 258, 257]
        assert tokenizer.decode(ids) == "<|im_start|>a<tool><|im_end|>"
        assert tokenizer.decode(ids, skip_special=True) == "a<tool>"

    def test_byte_tokens(self) -> None:
        tokenizer = spm([])
        assert tokenizer.encode("é", add_special=False)[-2:] == [3 + 0xC3, 3 + 0xA9]
        assert tokenizer.decode_bytes([3 + 0xFF]) == b"\xff"

    def test_lone_surrogates_become_replacement_characters(self) -> None:
        tokenizer = bpe()
        assert tokenizer.decode(tokenizer.encode("a\ud83d")) == "a\ufffd"

    @pytest.mark.parametrize("token", [-1, 260])
    def test_id_outside_the_vocabulary(self, token: int) -> None:
        with pytest.raises(TokenizerError, match=f"{token} is outside the vocabulary of 260"):
            bpe().decode([token])


class TestLoading:
    def test_no_vocabulary(self) -> None:
        assert load_tokenizer(file_of()) is None
        assert load_tokenizer(file_of(**{"tokenizer.ggml.model": "no_vocab"})) is None

    def test_template_is_kept(self) -> None:
        metadata = {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>"],
            "tokenizer.ggml.token_type": np.array([2, 3, 3], np.int32),
            "tokenizer.chat_template": "{{ bos_token }}hi",
        }
        tokenizer = load_tokenizer(file_of(**metadata))
        assert tokenizer is not None
        message = [{"role": "user", "content": "x"}]
        assert tokenizer.render_chat(message) == "<s>hi"
        assert tokenizer.encode_chat(message).count(1) == 1

    @pytest.mark.parametrize(
        ("extra", "message"),
        [
            ({"tokenizer.ggml.model": "bert"}, "'bert' is not supported; known kinds are llama"),
            ({"tokenizer.ggml.tokens": []}, "vocabulary is empty"),
            ({"tokenizer.ggml.tokens": 3}, "tokens is of type int, not list"),
            ({"tokenizer.ggml.tokens": ["a", "a"]}, "'a' is twice in the vocabulary, as 0 and 1"),
            ({"tokenizer.ggml.token_type": np.zeros(2)}, "token_type holds 2 values for 260"),
            ({"tokenizer.ggml.bos_token_id": "x"}, "bos_token_id is of type str"),
        ],
    )
    def test_damage(self, extra: dict[str, Any], message: str) -> None:
        with pytest.raises(TokenizerError, match=message):
            bpe(**extra)

    def test_missing_keys(self) -> None:
        with pytest.raises(TokenizerError, match=r"lacks 'tokenizer\.ggml\.tokens'"):
            read_vocab({"tokenizer.ggml.model": "llama"})
        with pytest.raises(TokenizerError, match=r"lacks 'tokenizer\.ggml\.merges'"):
            read_vocab({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"]})
        with pytest.raises(TokenizerError, match="bos_token_id is not set"):
            read_vocab(
                {
                    "tokenizer.ggml.model": "gpt2",
                    "tokenizer.ggml.pre": "llama-bpe",
                    "tokenizer.ggml.tokens": ["a"],
                    "tokenizer.ggml.merges": [],
                }
            )

    def test_empty_texts_and_ids_out_of_range(self) -> None:
        tokenizer = spm(["", "x"], **{"tokenizer.ggml.bos_token_id": 1 << 20})
        assert tokenizer.token_id("[EMPTY_259]") == 259
        assert tokenizer.bos == 1
