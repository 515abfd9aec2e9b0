"""A bounds-checked cursor over the header of a GGUF file.

Invariant: nothing is allocated for a count before the file is known to hold at least the bytes
that so many entries need, so a damaged count is an error and never a huge allocation.
Source: the GGUF specification (ggml/docs/gguf.md), value types 0 to 12, little endian.
"""

import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxllm.errors import GGUFError, shown

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_FORMATS = dict(zip(_SCALARS, "BbHhIif?Qqd", strict=True))
_READ_AHEAD = 1 << 20


class Cursor:
    """Reads little-endian values one after another and knows how many bytes are left."""

    def __init__(self, stream: BinaryIO, size: int, path: Path) -> None:
        self.stream = stream
        self.size = size
        self.path = path
        self.pos = 0
        self._data = b""

    def require(self, count: int, what: str) -> None:
        """Make `count` more bytes available; GGUFError if the file ends before them."""
        missing = self.pos + count - self.size
        if missing > 0:
            raise GGUFError(
                f"{str(self.path)!r} is truncated in {what}: {missing} bytes are missing; "
                "fetch the file again."
            )
        while len(self._data) < self.pos + count:
            wanted = max(self.pos + count - len(self._data), _READ_AHEAD, len(self._data))
            more = self.stream.read(min(wanted, self.size - len(self._data)))
            if not more:
                raise GGUFError(f"{str(self.path)!r} became shorter while it was read.")
            self._data += more

    def take(self, count: int, what: str) -> bytes:
        self.require(count, what)
        start, self.pos = self.pos, self.pos + count
        return self._data[start : self.pos]

    def number(self, kind: str, what: str) -> Any:
        size = struct.calcsize("<" + kind)
        return struct.unpack("<" + kind, self.take(size, what))[0]

    def text(self, what: str, errors: str = "replace") -> str:
        return self.take(self.number("Q", what), what).decode("utf-8", errors)

    def value(self, key: str) -> Any:
        """One metadata value: a scalar, a str, a numpy array or a list of str."""
        what = f"metadata {shown(key)}"
        kind = self.number("I", what)
        if kind == _STRING:
            return self.text(what)
        if kind == _ARRAY:
            return self._array(what)
        if kind not in _FORMATS:
            raise GGUFError(f"{str(self.path)!r} has unknown value type {kind} in {what}.")
        return self.number(_FORMATS[kind], what)

    def _array(self, what: str) -> Any:
        kind, count = self.number("I", what), self.number("Q", what)
        if kind == _STRING:
            return self._strings(count, what)
        if kind not in _SCALARS:
            known = "a nested array" if kind == _ARRAY else f"unknown element type {kind}"
            raise GGUFError(f"{str(self.path)!r} has {known} in {what}, which is not supported.")
        dtype = _SCALARS[kind]
        if kind == _BOOL:
            return np.frombuffer(self.take(count, what), np.uint8) != 0
        return np.frombuffer(self.take(count * dtype.itemsize, what), dtype)

    def _strings(self, count: int, what: str) -> list[str]:
        """Invalid UTF-8 stays lossless through surrogate escapes: token texts need it."""
        self.require(8 * count, what)
        length_at = struct.Struct("<Q").unpack_from
        strings: list[str] = []
        data, pos, end = self._data, self.pos, len(self._data)
        for _ in range(count):
            stop = pos + 8
            if stop <= end:
                stop += length_at(data, pos)[0]
            if stop > end:
                self.pos = pos
                self.require(8, what)
                self.require(8 + length_at(self._data, pos)[0], what)
                data, end = self._data, len(self._data)
                stop = pos + 8 + length_at(data, pos)[0]
            strings.append(data[pos + 8 : stop].decode("utf-8", "surrogateescape"))
            pos = stop
        self.pos = pos
        return strings
