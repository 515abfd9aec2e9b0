"""The tokenizer of a GGUF file: text to ids and back, special tokens, and streamed decoding.

Follows llama.cpp: ids are equal to its own for every supported kind. Special tokens are cut out
of the text first, longest first; with `parse_special=False` only user-defined ones are.
"""

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxllm.errors import PromptError, TokenizerError
from jaxllm.gguf.reader import GGUFFile
from jaxllm.text.bpe import BpeEncoder, byte_of_char
from jaxllm.text.chat import render
from jaxllm.text.guard import Guard
from jaxllm.text.spm import SpmEncoder
from jaxllm.text.unigram import UnigramEncoder
from jaxllm.text.vocab import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Vocab, read_vocab

_C_SPACES = " \t\n\v\f\r"


class Tokenizer:
    """`bos` and `eos` are ids or None; `eog` holds every id that ends generation."""

    def __init__(self, vocab: Vocab, chat_template: str | None = None) -> None:
        self.vocab = vocab
        self.chat_template = chat_template
        self.bos = vocab.bos
        self.eos = vocab.eos
        self.eog = vocab.eog
        self.add_bos = vocab.add_bos
        self.add_eos = vocab.add_eos
        encoders = {"llama": SpmEncoder, "t5": UnigramEncoder}
        self._encoder = encoders.get(vocab.kind, BpeEncoder)(vocab)
        puts_space = vocab.add_space_prefix and not isinstance(self._encoder, UnigramEncoder)
        self._prefix = " " if puts_space else ""
        self._parsed = [(vocab.texts[i], i) for i in vocab.special]
        self._plain = [(text, i) for text, i in self._parsed if not self._is_control(i)]

    @property
    def vocab_size(self) -> int:
        return len(self.vocab.texts)

    @property
    def bos_text(self) -> str:
        """The text of the BOS token, "" where there is none."""
        return "" if self.bos is None else self.vocab.texts[self.bos]

    @property
    def eos_text(self) -> str:
        """The text of the EOS token, "" where there is none."""
        return "" if self.eos is None else self.vocab.texts[self.eos]

    def token_id(self, text: str) -> int | None:
        """The id of the token with exactly this text as stored in the vocabulary."""
        return self.vocab.ids.get(text)

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Ids of `text`, with BOS and EOS where the model asks for them and `add_special` holds.

        With `parse_special` the texts of control tokens become those tokens; without it they are
        plain text, so that untrusted text cannot forge them. Lone surrogates, which are no text,
        are read as U+FFFD.
        """
        parts = self._partition(_well_formed(text), self._parsed if parse_special else self._plain)
        return self._encode_parts(parts, add_special)

    def _encode_parts(self, parts: list[str | int], add_special: bool) -> list[int]:
        ids: list[int] = []
        if add_special and self.add_bos and self.bos is not None:
            ids.append(self.bos)
        after_special = True
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
                after_special = True
                continue
            prefix = self._prefix if after_special else ""
            ids.extend(self._encoder.encode(prefix + part))
            after_special = False
        if add_special and self.add_eos and self.eos is not None:
            ids.append(self.eos)
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids, skip_special).decode("utf-8", "replace")

    def decode_bytes(self, ids: Iterable[int], skip_special: bool = False) -> bytes:
        """Bytes of `ids` as a whole text: without the space that encoding put in front."""
        pieces = [self.piece(token, skip_special) for token in ids]
        if pieces and self.vocab.add_space_prefix:
            pieces[0] = pieces[0].removeprefix(b" ")
        return b"".join(pieces)

    def piece(self, token: int, skip_special: bool = False) -> bytes:
        """Bytes of one token inside a text; TokenizerError for an id outside the vocabulary."""
        if not 0 <= token < self.vocab_size:
            raise TokenizerError(
                f"token id {token} is outside the vocabulary of {self.vocab_size} tokens."
            )
        text, attributes = self.vocab.texts[token], int(self.vocab.attributes[token])
        if attributes & (CONTROL | UNKNOWN | USER_DEFINED):
            hide = skip_special and attributes & (CONTROL | UNKNOWN)
            return b"" if hide else _utf8(text)
        if attributes & NORMAL:
            if self.vocab.pre is None or not self.vocab.pre.byte_level:
                return _utf8(text.replace("\u2581", " "))
            table = byte_of_char()
            return b"".join(bytes([table[char]]) if char in table else _utf8(char) for char in text)
        if attributes & BYTE:
            return _byte_of(text)
        return b""

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """The prompt text of `messages` by `chat_template` or the model's own; see chat.render."""
        return render(
            chat_template or self.chat_template,
            messages,
            add_generation_prompt,
            bos_text=self.bos_text,
            eos_text=self.eos_text,
            chatml_fallback="<|im_start|>" in self.vocab.ids,
            **variables,
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        chat_template: str | None = None,
        **variables: Any,
    ) -> list[int]:
        """Ids of `render_chat`, with one BOS where the model asks for it or the template has it.

        Control tokens are the template's own: their texts in messages (but for roles) and in
        `variables` are plain text. PromptError where that cannot be told, because the template
        treats such a text in a way of its own.
        """

        def text_of(messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
            text = self.render_chat(
                messages, add_generation_prompt, chat_template=chat_template, **variables
            )
            return _well_formed(text)

        text = text_of(messages, variables)
        guard = Guard((name for name, token in self._parsed if self._is_control(token)), text)
        guarded = text_of(guard.hide_messages(messages), guard.hide(variables))
        if guard.show(guarded) != text:
            raise PromptError(
                "a message holds the text of a control token, such as "
                f"{self._control_in(messages)!r}, and the chat template does not treat it as "
                "text; remove it from the message"
            )
        has_bos = bool(self.bos_text) and guarded.startswith(self.bos_text)
        return self._encode_parts(self._partition(guarded, self._parsed, guard), not has_bos)

    def _control_in(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text of a control token that is in the messages."""
        said = json.dumps(list(messages), ensure_ascii=False, default=str)
        names = (name for name, token in self._parsed if self._is_control(token))
        return next((name for name in names if name in said), self.eos_text)

    def _is_control(self, token: int) -> bool:
        return bool(int(self.vocab.attributes[token]) & (CONTROL | UNKNOWN))

    def _partition(
        self, text: str, special: list[tuple[str, int]], guard: Guard | None = None
    ) -> list[str | int]:
        """Text and special ids in order; longer specials are found first, wherever they are.

        In a guarded text control tokens are not found where a message has them; others are.
        """
        parts: list[str | int] = [text] if text else []
        show = guard.show if guard else str
        for name, token in special:
            seen = str if self._is_control(token) else show  # the text that the name may be in
            if name not in seen(text):
                continue
            cut: list[str | int] = []
            for part in parts:
                if isinstance(part, int):
                    cut.append(part)
                    continue
                first, *rest = seen(part).split(name)
                at = len(first)
                cut.append(part[:at])
                for each in rest:
                    at += len(name) + len(each)
                    after = part[at - len(each) : at]
                    strip = token in self.vocab.strips_right
                    cut += [token, after.lstrip(_C_SPACES) if strip else after]
            parts = [part for part in cut if part != ""]
        return [part if isinstance(part, int) else show(part) for part in parts]


class StreamDecoder:
    """Turns a stream of ids into text without ever emitting part of a character. With `whole` it is
    not the rest of a text but one of its own: without the space that encoding put in front."""

    def __init__(
        self, tokenizer: Tokenizer, skip_special: bool = True, whole: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._drops_space = whole and tokenizer.vocab.add_space_prefix
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that `token` completes, "" while a character is unfinished."""
        piece = self._tokenizer.piece(token, self._skip_special)
        if self._drops_space and piece:
            piece, self._drops_space = piece.removeprefix(b" "), False
        return self._decoder.decode(piece)

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character, else ""."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


def load_tokenizer(file: GGUFFile) -> Tokenizer | None:
    """The file's tokenizer, or None where it has no vocabulary; TokenizerError if damaged."""
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind is None or kind in ("no_vocab", "none"):
        return None
    template = file.metadata.get("tokenizer.chat_template")
    return Tokenizer(read_vocab(file.metadata), template if isinstance(template, str) else None)


def _well_formed(text: str) -> str:
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _byte_of(text: str) -> bytes:
    try:
        return bytes([int(text[3:5], 16)])
    except ValueError:
        return _utf8(text)
