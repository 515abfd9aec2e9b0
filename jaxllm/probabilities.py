"""Files of log-probabilities: what a run gave every token of the vocabulary, for later runs.

    magic, 8 bytes | length of the header, uint32 | header, JSON | padding to 64 bytes
    float32 [tokens scored, vocabulary], in the order of the text

The header says of which text and vocabulary it is. A file is written beside its place and moved
there when it is whole.
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import numpy as np

from jaxllm.errors import OptionError, shown
from jaxllm.paths import check_no_folder, part_of

MAGIC = b"JXLLMKL1"


def _header(chunks: np.ndarray, vocab: int) -> dict[str, object]:
    """Of the token ids [chunks, ctx] of a run."""
    return {
        "chunks": len(chunks),
        "ctx": chunks.shape[1],
        "vocab": vocab,
        "tokens": hashlib.sha256(np.ascontiguousarray(chunks, "<i4").tobytes()).hexdigest(),
    }


def _scored(ctx: int) -> int:
    """Tokens of a chunk whose probabilities are kept."""
    return ctx - 1 - ctx // 2


class BaseWriter:
    """Writes a file; nothing is at `path` before `finish`.

    Raises:
        OptionError: where it cannot be written.
    """

    def __init__(self, path: Path, chunks: np.ndarray, vocab: int):
        check_no_folder(path, "the base run", OptionError)
        self._path, self._part = path, part_of(path)
        header = json.dumps(_header(chunks, vocab)).encode()
        start = MAGIC + struct.pack("<I", len(header)) + header
        try:
            self._file = self._part.open("wb")
            self._file.write(start + bytes(-len(start) % 64))
        except OSError as error:
            raise self._refused(error) from error

    def add(self, logp: np.ndarray) -> None:
        """Append float32 [n, V]."""
        try:
            self._file.write(np.asarray(logp, "<f4").tobytes())
        except OSError as error:
            raise self._refused(error) from error

    def finish(self) -> None:
        """Put the whole file in its place."""
        try:
            self._file.close()
            self._part.replace(self._path)
        except OSError as error:
            raise self._refused(error) from error

    def close(self) -> None:
        """Remove what was not finished."""
        self._file.close()
        self._part.unlink(missing_ok=True)

    def _refused(self, error: OSError) -> OptionError:
        return OptionError(
            f"cannot write the base run {str(self._path)!r}: {error.strerror or error}"
        )


class BaseReader:
    """Reads a file that is of the same text and vocabulary.

    Raises:
        OptionError: where it cannot be read, is damaged or is of another run.
    """

    def __init__(self, path: Path, chunks: np.ndarray, vocab: int):
        wanted = _header(chunks, vocab)
        try:
            with path.open("rb") as file:
                magic, length = struct.unpack("<8sI", file.read(12))
                found = json.loads(file.read(length)) if magic == MAGIC and length < 4096 else None
        except (OSError, ValueError, struct.error) as error:
            reason = getattr(error, "strerror", None) or "it is damaged"
            raise OptionError(f"the base run {str(path)!r} cannot be read: {reason}") from error
        if not isinstance(found, dict):
            raise OptionError(f"{str(path)!r} is no base run; make one with --kl-divergence-base")
        for name, value in wanted.items():
            if found.get(name) != value:
                differs = f"has {name} {shown(found.get(name))} and this run {value!r}"
                if name == "tokens":  # of which only a digest is kept
                    differs = "is of another text than this run"
                raise OptionError(
                    f"the base run {str(path)!r} {differs}; run both with the same text, chunks and"
                    " vocabulary"
                )
        start = -(-(12 + length) // 64) * 64
        shape = (len(chunks), _scored(chunks.shape[1]), vocab)
        if path.stat().st_size != start + 4 * int(np.prod(shape)):
            raise OptionError(f"the base run {str(path)!r} cannot be read: it is damaged")
        self._logp = np.memmap(path, "<f4", "r", start, shape)

    def read(self, chunk: int, first: int, count: int) -> np.ndarray:
        """float32 [count, V] of a chunk's tokens scored, from the first on."""
        return np.asarray(self._logp[chunk, first : first + count])
