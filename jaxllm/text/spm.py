"""SentencePiece-style merging by score, with bytes for what the vocabulary lacks.

The rule (SentencePiece's BPE, llama.cpp's SPM): of all adjacent pairs whose joined text is a
token, merge the one with the highest score, the leftmost of equals, until none is left.
A list of ranked pairs, which BPE libraries take, cannot express the ties: two splits of one piece
have one score. So the rule is run as it stands, on short stretches: a merge joins two neighbouring
characters only if some piece holds them side by side, so text is cut wherever none does, and the
ids of a stretch are remembered.
"""

import heapq

import numpy as np

from jaxllm.text.vocab import Vocab

_SPACE = "\u2581"
_MAX_REMEMBERED = 1 << 16
_MAX_REMEMBERED_CHARS = 64


class SpmEncoder:
    """Encodes text without special tokens; the space prefix is the caller's business."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._ids = vocab.ids
        self._negated_scores: list[float] = (-vocab.scores).tolist()
        # The separator only adds pairs: cutting at fewer places is still exact.
        self._pairs = np.unique(_char_pairs("\n".join(vocab.texts)))
        self._remembered: dict[str, tuple[int, ...]] = {}

    def encode(self, text: str) -> list[int]:
        text = text.replace(" ", _SPACE)
        if not text:
            return []
        cuts = np.flatnonzero(~_contains(self._pairs, _char_pairs(text))) + 1
        out: list[int] = []
        start = 0
        for stop in [*cuts.tolist(), len(text)]:
            stretch = text[start:stop]
            ids = self._remembered.get(stretch)
            if ids is None:
                ids = tuple(self._merge(stretch))
                if len(stretch) <= _MAX_REMEMBERED_CHARS:
                    if len(self._remembered) >= _MAX_REMEMBERED:
                        self._remembered.clear()
                    self._remembered[stretch] = ids
            out.extend(ids)
            start = stop
        return out

    def _merge(self, text: str) -> list[int]:
        count = len(text)
        sizes = [1] * count
        following = list(range(1, count + 1))
        preceding = list(range(-1, count - 1))
        # (negated score, left, right, joined size): the heap's order is the rule's order.
        heap: list[tuple[float, int, int, int]] = []

        def consider(left: int, right: int) -> None:
            if left < 0 or right >= count:
                return
            size = sizes[left] + sizes[right]
            token = self._ids.get(text[left : left + size])
            if token is not None:
                heapq.heappush(heap, (self._negated_scores[token], left, right, size))

        for right in range(1, count):
            consider(right - 1, right)
        while heap:
            _, left, right, size = heapq.heappop(heap)
            if not sizes[left] or not sizes[right] or sizes[left] + sizes[right] != size:
                continue
            sizes[left], sizes[right] = size, 0
            following[left] = following[right]
            if following[left] < count:
                preceding[following[left]] = left
            consider(preceding[left], left)
            consider(left, following[left])
        out: list[int] = []
        at = 0
        while at < count:
            piece = text[at : at + sizes[at]]
            token = self._ids.get(piece)
            out.extend(self._bytes(piece) if token is None else (token,))
            at = following[at]
        return out

    def _bytes(self, piece: str) -> list[int]:
        ids = [self._vocab.byte_id(byte) for byte in piece.encode("utf-8", "surrogateescape")]
        ids = [self._vocab.unknown if token is None else token for token in ids]
        return [token for token in ids if token is not None]


def _char_pairs(text: str) -> np.ndarray:
    """uint64 [len(text) - 1]: each pair of neighbouring code points as one number."""
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4").astype(np.uint64)
    return (points[:-1] << np.uint64(32)) | points[1:]


def _contains(ordered: np.ndarray, values: np.ndarray) -> np.ndarray:
    if not ordered.size:
        return np.zeros(values.shape, bool)
    at = np.searchsorted(ordered, values)
    return ordered[np.minimum(at, ordered.size - 1)] == values
