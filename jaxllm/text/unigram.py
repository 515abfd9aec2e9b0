"""SentencePiece's unigram model (Kudo 2018): the pieces whose scores have the largest sum.

Text is normalised first, by a map of sequences of characters that a file brings along: the longest
sequence that it knows is replaced, from left to right. llama.cpp's rules (UGM) decide the rest:
where spaces go, how far an unknown character is below the least likely piece, and that unknown
neighbours are one.
"""

from math import inf

import numpy as np

from jaxllm.errors import TokenizerError
from jaxllm.text.vocab import NORMAL, UNUSED, USER_DEFINED, Vocab

_SPACE = "\u2581"
_UNKNOWN_BELOW = 10.0  # the least score of a piece


class CharsMap:
    """A SentencePiece map: the size of a double array of the keys (darts-clone) as 4 bytes, that
    array, and the replacements, each with a zero at its end.

    A unit of the array has a label in its lowest byte, bit 8 if a key ends there, and what leads
    to its children in the upper bits; the unit of a key's value follows.
    """

    def __init__(self, stored: bytes) -> None:
        size = int.from_bytes(stored[:4], "little")
        if size % 4 or not 4 <= size <= len(stored) - 5 or stored[-1]:
            raise TokenizerError(
                "tokenizer.ggml.precompiled_charsmap is damaged; convert the model again."
            )
        self._units: list[int] = np.frombuffer(stored, "<u4", size // 4, 4).tolist()
        self._replacements = stored[4 + size :]

    def longest(self, text: bytes, at: int) -> tuple[int, bytes]:
        """Of the keys that `text` has at a place, the length of the longest, and its replacement;
        0 where it has none."""
        units, found = self._units, (0, b"")
        node = _children(units[0])
        for end in range(at, len(text)):
            label = text[end]
            node ^= label
            if node >= len(units) or units[node] & 0x800000FF != label or not label:
                break
            ends = units[node] >> 8 & 1
            node ^= _children(units[node])
            if ends and node < len(units):
                start = units[node] & 0x7FFFFFFF
                stop = self._replacements.find(0, start)
                found = end + 1 - at, self._replacements[start:stop]
        return found


def _children(unit: int) -> int:
    return unit >> 10 << ((unit & 1 << 9) >> 6)


class UnigramEncoder:
    """Encodes text without special tokens, and puts a space in front of it where the model asks for
    one."""

    def __init__(self, vocab: Vocab) -> None:
        if vocab.unknown is None:
            raise TokenizerError("the vocabulary lacks an unknown token; convert the model again.")
        self._vocab, self._unknown = vocab, vocab.unknown
        self._map = CharsMap(vocab.charsmap) if vocab.charsmap else None
        scores, kinds = vocab.scores.astype(float), vocab.attributes
        normal = scores[(kinds & NORMAL) > 0].tolist()
        self._unknown_score = min(normal, default=0.0) - _UNKNOWN_BELOW
        scores[(kinds & USER_DEFINED) > 0] = 0.0
        self._pieces: dict[str, tuple[int, float]] = {}
        self._longest: dict[str, int] = {}  # piece that begins with a character
        for i in np.flatnonzero(kinds & (NORMAL | USER_DEFINED | UNUSED)).tolist():
            text = vocab.texts[i]
            self._pieces[text] = i, float(scores[i])
            self._longest[text[0]] = max(len(text), self._longest.get(text[0], 0))

    def encode(self, text: str) -> list[int]:
        text = self.normalise(text)
        best, begins, tokens = [0.0] + [-inf] * len(text), [0] * (len(text) + 1), [0]
        tokens *= len(begins)

        def consider(start: int, end: int, token: int, score: float) -> None:
            if best[start] + score > best[end]:
                best[end], begins[end], tokens[end] = best[start] + score, start, token

        for at, first in enumerate(text):
            for end in range(at + 1, min(at + self._longest.get(first, 0), len(text)) + 1):
                piece = self._pieces.get(text[at:end])
                if piece is not None:
                    consider(at, end, *piece)
            if first not in self._pieces:
                consider(at, at + 1, self._unknown, self._unknown_score)
        ids: list[int] = []
        end = len(text)
        while end:
            if not (ids and ids[-1] == tokens[end] == self._unknown):
                ids.append(tokens[end])
            end = begins[end]
        return ids[::-1]

    def normalise(self, text: str) -> str:
        """The text that is cut into pieces: characters replaced, spaces made visible."""
        stored = text.encode()
        if self._map is not None:
            parts, at = [], 0
            while at < len(stored):
                length, replacement = self._map.longest(stored, at)
                if not length:
                    length = _length(stored[at])
                    replacement = stored[at : at + length]
                parts.append(replacement)
                at += length
            text = b"".join(parts).decode("utf-8", "replace")
        if self._vocab.merges_spaces:
            return "".join(_SPACE + word for word in text.split(" ") if word)
        start = len(text) - len(text.lstrip(" "))
        prefix = " " if self._vocab.add_space_prefix and start < len(text) else ""
        return (text[:start] + prefix + text[start:]).replace(" ", _SPACE)


def _length(first: int) -> int:
    """Bytes of a UTF-8 character that begins so."""
    return 1 + (first >= 0xC0) + (first >= 0xE0) + (first >= 0xF0)
