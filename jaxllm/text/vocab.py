"""The vocabulary of a GGUF file: texts, attributes and special tokens.

Defaults and the rules for end-of-generation tokens are llama.cpp's (src/llama-vocab.cpp): many
files do not name their end-of-turn token, so known texts stand in for the missing keys.
Invariant: every text is unique and non-empty, so `ids` inverts `texts`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxllm.errors import TokenizerError, shown
from jaxllm.text.pretokenizers import PreTokenizer, find_pretokenizer

UNKNOWN, UNUSED, NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 2, 4, 8, 16, 32
_ATTRIBUTE_OF_TYPE = np.array([0, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE], np.uint8)
# Default (bos, eos, unknown) of each tokenizer.ggml.model.
_DEFAULT_IDS = {
    "llama": (1, 2, 0),
    "gpt2": (11, 11, None),
    "gemma4": (None, None, None),
    "t5": (None, 1, 2),
}
_PIECES = ("llama", "t5")  # kinds without pre-tokenizer and merges

_END_OF_GENERATION = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
    "<｜end▁of▁sentence｜>", "[e~[",
)  # fmt: skip
# For each role without a metadata key: the texts that may stand for it, and whether it ends
# generation.
_ROLES: dict[str, tuple[tuple[str, ...], bool]] = {
    "eot": (
        ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>",
         "<|end_of_text|>", "<EOT>", "_<EOT>", "[EOT]", "<｜end▁of▁sentence｜>",
         "<end_of_utterance>"),
        True,
    ),
    "eom": (("<|eom_id|>",), True),
    "fim_pre": (
        ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>",
         "<|code_prefix|>", "<|prefix|>"),
        False,
    ),
    "fim_suf": (
        ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>",
         "<|code_suffix|>", "<|suffix|>"),
        False,
    ),
    "fim_mid": (
        ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>",
         "<|code_middle|>", "<|middle|>"),
        False,
    ),
    "fim_pad": (("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"), True),
    "fim_rep": (
        ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
        True,
    ),
    "fim_sep": (("<|file_sep|>",), True),
}  # fmt: skip
_ALWAYS_SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")


@dataclass(frozen=True, eq=False)
class Vocab:
    """`attributes` is uint8 [V], a union of the bits above; `special` is sorted longest first."""

    kind: str
    pre: PreTokenizer | None
    texts: list[str]
    ids: dict[str, int]
    attributes: np.ndarray
    scores: np.ndarray
    merges: list[str]
    bos: int | None
    eos: int | None
    unknown: int | None
    eog: frozenset[int]
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    special: tuple[int, ...]
    strips_right: frozenset[int]
    merges_spaces: bool  # of a unigram model: neighbouring ones are one, and none is at an end
    charsmap: bytes  # how a unigram model normalises text; empty where it does not

    def byte_id(self, byte: int) -> int | None:
        """The token that stands for one raw byte, if there is one."""
        named = self.ids.get(f"<0x{byte:02X}>")
        raw = bytes([byte]).decode("utf-8", "surrogateescape")
        return named if named is not None else self.ids.get(raw)


def read_vocab(metadata: Mapping[str, Any]) -> Vocab:
    """Build the vocabulary; TokenizerError for an unknown kind or damaged entries."""
    reader = _Reader(metadata)
    kind = reader.get("model", str, None)
    if kind not in _DEFAULT_IDS:
        raise TokenizerError(
            f"tokenizer kind {shown(kind)} is not supported; known kinds are "
            f"{', '.join(_DEFAULT_IDS)}."
        )
    pre = None
    if kind not in _PIECES:
        pre = find_pretokenizer("gemma4" if kind == "gemma4" else reader.get("pre", str, "default"))
    texts = reader.texts("tokens")
    if not texts:
        raise TokenizerError("the vocabulary is empty: tokenizer.ggml.tokens holds no token.")
    texts = [text or f"[EMPTY_{i}]" for i, text in enumerate(texts)]
    ids = {text: i for i, text in enumerate(texts)}
    if len(ids) != len(texts):
        i, text = next((i, text) for i, text in enumerate(texts) if ids[text] != i)
        raise TokenizerError(
            f"token {shown(text)} is twice in the vocabulary, as {i} and {ids[text]}."
        )
    attributes = reader.attributes(len(texts))
    bos, eos, unknown = _DEFAULT_IDS[kind]
    bos = reader.token_id("bos", bos, len(texts))
    eos = reader.token_id("eos", eos, len(texts))
    unknown = reader.token_id("unknown", unknown, len(texts))
    eog = _find_eog(reader, texts, ids, attributes, eos)
    flags = CONTROL | USER_DEFINED | UNKNOWN
    special = [int(i) for i in np.flatnonzero(attributes & flags)]
    special.sort(key=lambda i: -len(texts[i].encode("utf-8", "surrogateescape")))
    add_bos = reader.get("add_bos_token", bool, kind == "llama" or bool(pre and pre.add_bos))
    add_eos = reader.get("add_eos_token", bool, kind == "t5")
    add_bos = add_bos or kind == "gemma4"
    for add, token, name in ((add_bos, bos, "bos"), (add_eos, eos, "eos")):
        if add and token is None:
            raise TokenizerError(
                f"tokenizer.ggml.add_{name}_token is true, but tokenizer.ggml.{name}_token_id is "
                "not set; pass add_special=False or repair the metadata."
            )
    return Vocab(
        kind=kind,
        pre=pre,
        texts=texts,
        ids=ids,
        attributes=attributes,
        scores=reader.scores(len(texts)),
        merges=[] if kind in _PIECES else reader.texts("merges"),
        bos=bos,
        eos=eos,
        unknown=unknown,
        eog=eog,
        add_bos=add_bos,
        add_eos=add_eos,
        add_space_prefix=reader.get("add_space_prefix", bool, kind == "llama"),
        special=tuple(special),
        strips_right=_strips_right(metadata, ids, special),
        merges_spaces=reader.get("remove_extra_whitespaces", bool, False),
        charsmap=reader.get("precompiled_charsmap", np.ndarray, np.zeros(0, np.uint8)).tobytes(),
    )


class _Reader:
    """Typed access to `tokenizer.ggml.*`."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.metadata = metadata

    def get(self, name: str, kind: type[Any], default: Any) -> Any:
        value = self.metadata.get(f"tokenizer.ggml.{name}", default)
        if value is not default and not isinstance(value, kind):
            raise TokenizerError(
                f"metadata tokenizer.ggml.{name} is of type {type(value).__name__}, not "
                f"{kind.__name__}."
            )
        return value

    def texts(self, name: str) -> list[str]:
        key = f"tokenizer.ggml.{name}"
        if key not in self.metadata:
            raise TokenizerError(f"the model's metadata lacks {key!r}; convert the model again.")
        values = self.get(name, list, None)
        return values

    def _array(self, name: str, size: int) -> np.ndarray | None:
        values = self.get(name, np.ndarray, None)
        if values is not None and len(values) < size:
            raise TokenizerError(
                f"metadata tokenizer.ggml.{name} holds {len(values)} values for {size} tokens."
            )
        return None if values is None else values[:size]

    def attributes(self, size: int) -> np.ndarray:
        types = self._array("token_type", size)
        if types is None:
            return np.full(size, NORMAL, np.uint8)
        known = (types >= 0) & (types < len(_ATTRIBUTE_OF_TYPE))
        return _ATTRIBUTE_OF_TYPE[np.where(known, types, 0).astype(np.int64)]

    def scores(self, size: int) -> np.ndarray:
        scores = self._array("scores", size)
        return np.zeros(size, np.float32) if scores is None else scores.astype(np.float32)

    def token_id(self, name: str, default: int | None, size: int) -> int | None:
        """An id outside the vocabulary is ignored, as llama.cpp does."""
        if default is not None and default >= size:
            default = None
        value = self.get(f"{name}_token_id", int, None)
        return value if value is not None and 0 <= value < size else default


def _find_eog(
    reader: _Reader, texts: list[str], ids: dict[str, int], attributes: np.ndarray, eos: int | None
) -> frozenset[int]:
    """Ids that end generation; tokens found by their text become control tokens."""
    eog: set[int] = set() if eos is None else {eos}
    for role, (names, ends) in _ROLES.items():
        token = reader.token_id(role, None, len(texts))
        if token is None:
            token = min((ids[name] for name in names if name in ids), default=None)
            if token is not None:
                attributes[token] |= CONTROL
        if token is not None and ends:
            eog.add(token)
    for name in _END_OF_GENERATION:
        if name in ids:
            eog.add(ids[name])
            attributes[ids[name]] |= CONTROL
    for name in _ALWAYS_SHOWN:
        if name in ids:
            attributes[ids[name]] = USER_DEFINED
    found = {texts[i] for i in eog}
    # In these vocabularies <|end|> closes one message of several, it does not end the turn.
    calls = "<|call|>" in found or "<|calls|>" in found
    if "<|end|>" in found and calls and found & {"<|return|>", "<|flush|>"}:
        eog.discard(ids["<|end|>"])
        attributes[ids["<|end|>"]] = USER_DEFINED
    if "<|tool_response>" in found and "</s>" in found:
        eog.discard(ids["</s>"])
        attributes[ids["</s>"]] = NORMAL
    return frozenset(eog)


def _strips_right(
    metadata: Mapping[str, Any], ids: dict[str, int], special: list[int]
) -> frozenset[int]:
    """Special tokens that swallow the white space after them: Phi-3's, by the model's name."""
    name = str(metadata.get("general.name", "")).lower()
    if "phi-3" not in name and "phi3" not in name:
        return frozenset()
    return frozenset(special) - {ids.get(text) for text in ("<unk>", "<s>", "<|endoftext|>")}
