"""Byte-level BPE with ranked merges, run by the `tokenizers` library's compiled core."""

import re
from functools import lru_cache

from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Core

from jaxllm.errors import TokenizerError, shown
from jaxllm.text.vocab import Vocab

_NEWLINES = re.compile(r"(\n+)")


class BpeEncoder:
    """Encodes text without special tokens."""

    def __init__(self, vocab: Vocab) -> None:
        if vocab.pre is None:
            raise TokenizerError(f"tokenizer kind {shown(vocab.kind)} has no pre-tokenizer.")
        self._ids = vocab.ids
        self._byte_level = vocab.pre.byte_level
        steps: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in vocab.pre.patterns
        ]
        if self._byte_level:
            steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        # A text that is not UTF-8 can never be the result of a merge.
        texts = {text: i for text, i in vocab.ids.items() if text.isascii() or _is_utf8(text)}
        self._core = Core(
            models.BPE(
                vocab=texts,
                merges=_split_merges(vocab.merges, texts),
                ignore_merges=vocab.pre.ignore_merges,
                byte_fallback=not self._byte_level,
            )
        )
        self._core.pre_tokenizer = pre_tokenizers.Sequence(steps)

    def words(self, text: str) -> list[str]:
        """The words that `text` is cut into; no merge reaches over their edges."""
        splitter = self._core.pre_tokenizer
        return [text[start:stop] for _, (start, stop) in splitter.pre_tokenize_str(text)]

    def encode(self, text: str) -> list[int]:
        if self._byte_level:
            return self._core.encode(text, add_special_tokens=False).ids
        out: list[int] = []
        for stretch in _NEWLINES.split(text.replace(" ", "\u2581")):
            # A run of newlines that is a token is taken whole, whatever the merges say.
            token = self._ids.get(stretch) if stretch.startswith("\n") else None
            if token is not None:
                out.append(token)
            elif stretch:
                out.extend(self._core.encode(stretch, add_special_tokens=False).ids)
        return out


@lru_cache(maxsize=1)
def byte_of_char() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte, inverted. Source: openai/gpt-2 encoder.py."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}


def _split_merges(merges: list[str], texts: dict[str, int]) -> list[tuple[str, str]]:
    """Pairs in rank order, without those whose parts or result are no tokens, or repeated ones."""
    pairs: dict[tuple[str, str], None] = {}
    for merge in merges:
        at = merge.find(" ", 1)
        left, right = merge[:at], merge[at + 1 :]
        if at > 0 and left in texts and right in texts and left + right in texts:
            pairs.setdefault((left, right))
    return list(pairs)


def _is_utf8(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
