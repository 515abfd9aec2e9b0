"""GGUF files of version 2 and 3, little endian, whole or split into parts.

Reading never maps a file into memory: rows are read with plain file reads, so that the bytes of a
model do not count in the process's resident size.
Source: the GGUF specification (ggml/docs/gguf.md) and gguf-split's `split.*` keys.
"""

import math
import os
import re
import stat
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from jaxllm.errors import GGUFError, shown
from jaxllm.gguf.cursor import Cursor

_MAGIC = b"GGUF"
_MIN_KV_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8
_MAX_DIMS = 4
_PART = re.compile(r"^(?P<stem>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf$", re.DOTALL)


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies. `shape` is in numpy order (the contiguous dimension last)."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    file: Path
    offset: int
    nbytes: int

    @property
    def cols(self) -> int:
        """Elements in a row, the contiguous dimension."""
        return self.shape[-1]

    @property
    def rows(self) -> int:
        """Rows of the tensor seen as 2-D [rows, cols]."""
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        block, size = GGML_QUANT_SIZES[self.type]
        return self.cols // block * size


@dataclass(frozen=True, eq=False)
class GGUFFile:
    """A model's metadata and tensor table; `files` holds its parts in order."""

    path: Path
    files: tuple[Path, ...]
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    nbytes: int

    @property
    def architecture(self) -> str:
        """`general.architecture`; GGUFError where the file does not say."""
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str):
            raise GGUFError(
                f"{str(self.path)!r} does not name its architecture (general.architecture): "
                "it is not a model file."
            )
        return name


@dataclass(frozen=True, eq=False)
class _Part:
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    nbytes: int


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Read the header of a GGUF file, and of all its parts when it is split.

    Any part of a split file may be named; metadata comes from the first. No tensor data is read.
    Raises GGUFError for a file that is missing, not a GGUF, damaged, or of an unsupported kind.
    """
    path = Path(path)
    part = _read_part(path)
    count = part.metadata.get("split.count", 0)
    if not isinstance(count, int) or count <= 1:
        return GGUFFile(path, (path,), part.version, part.metadata, part.tensors, part.nbytes)
    files = _part_files(path, count)
    parts = [part if file == path else _read_part(file) for file in files]
    tensors: dict[str, TensorInfo] = {}
    for number, (file, each) in enumerate(zip(files, parts, strict=True)):
        if each.metadata.get("split.no") != number or each.metadata.get("split.count") != count:
            raise GGUFError(
                f"{str(file)!r} says it is part {shown(each.metadata.get('split.no'))} of "
                f"{shown(each.metadata.get('split.count'))}, not part {number} of {count}: its "
                "name and its contents disagree."
            )
        for name, info in each.tensors.items():
            if name in tensors:
                raise GGUFError(f"{str(file)!r} repeats tensor {shown(name)} of an earlier part.")
            tensors[name] = info
    total = parts[0].metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise GGUFError(
            f"the {count} parts of {str(path)!r} hold {len(tensors)} tensors, but "
            f"split.tensors.count says {shown(total)}: fetch the parts again."
        )
    nbytes = sum(each.nbytes for each in parts)
    return GGUFFile(path, files, parts[0].version, parts[0].metadata, tensors, nbytes)


def read_rows(info: TensorInfo, start: int, stop: int) -> np.ndarray:
    """Raw bytes of rows start..stop of a tensor seen as 2-D: uint8 [stop - start, row_bytes]."""
    if not 0 <= start <= stop <= info.rows:
        raise ValueError(
            f"rows {start}..{stop} are outside the {info.rows} rows of {shown(info.name)}"
        )
    size = info.row_bytes
    return read_bytes(info, start * size, stop * size).reshape(stop - start, size)


def read_bytes(info: TensorInfo, start: int, stop: int) -> np.ndarray:
    """Raw bytes start..stop of a tensor: uint8 [stop - start]."""
    out = np.empty(stop - start, np.uint8)
    view = out.data
    try:
        with open(info.file, "rb", buffering=0) as stream:
            stream.seek(info.offset + start)
            while view:
                count = stream.readinto(view)
                if not count:
                    raise GGUFError(
                        f"{str(info.file)!r} became {len(view)} bytes too short for tensor "
                        f"{shown(info.name)} after it was opened."
                    )
                view = view[count:]
    except OSError as error:
        raise GGUFError(f"cannot read {str(info.file)!r}: {error.strerror or error}.") from error
    return out


def _part_files(path: Path, count: int) -> tuple[Path, ...]:
    match = _PART.match(path.name)
    if match is None or int(match["count"]) != count:
        raise GGUFError(
            f"{str(path)!r} is one of {count} parts and must keep its name "
            f"NAME-00001-of-{count:05d}.gguf for the others to be found."
        )
    stem = match["stem"]
    files = [path.with_name(f"{stem}-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count)]
    for file in files:
        if not file.exists():
            raise GGUFError(
                f"part {file.name!r} of the split model {str(path)!r} is missing; put all {count} "
                "parts in one folder."
            )
    return tuple(files)


def _read_part(path: Path) -> _Part:
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise GGUFError(f"{str(path)!r} is a directory; name the .gguf file in it.")
        if not stat.S_ISREG(mode):
            raise GGUFError(f"{str(path)!r} is not a regular file; name a .gguf file.")
        with open(path, "rb", buffering=0) as stream:
            return _parse(stream, os.fstat(stream.fileno()).st_size, path)
    except FileNotFoundError:
        raise GGUFError(f"there is no file {str(path)!r}; check the path.") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise GGUFError(f"cannot read {str(path)!r}: {reason}.") from error


def _parse(stream: BinaryIO, size: int, path: Path) -> _Part:
    cursor = Cursor(stream, size, path)
    magic = cursor.take(4, "the header")
    if magic != _MAGIC:
        raise GGUFError(f"{str(path)!r} is not a GGUF file: it starts with {magic!r}.")
    version = cursor.number("I", "the header")
    if version in (2 << 24, 3 << 24):
        raise GGUFError(
            f"{str(path)!r} is a big-endian GGUF; convert it to little endian first "
            "(gguf-convert-endian)."
        )
    if version not in (2, 3):
        raise GGUFError(
            f"{str(path)!r} is GGUF version {version}; versions 2 and 3 are read: convert it again."
        )
    n_tensors, n_kv = cursor.number("Q", "the header"), cursor.number("Q", "the header")
    _check_count(cursor, n_kv, _MIN_KV_BYTES, "metadata entries")
    _check_count(cursor, n_tensors, _MIN_TENSOR_BYTES, "tensors")
    metadata: dict[str, Any] = {}
    for _ in range(n_kv):
        key = cursor.text("metadata")
        if key in metadata:
            raise GGUFError(f"{str(path)!r} holds metadata {shown(key)} twice.")
        metadata[key] = cursor.value(key)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise GGUFError(
            f"{str(path)!r} has general.alignment {shown(alignment)}: not a power of two."
        )
    _check_count(cursor, n_tensors, _MIN_TENSOR_BYTES, "tensors")
    infos: dict[str, TensorInfo] = {}
    for _ in range(n_tensors):
        info = _tensor(cursor, path)
        if info.name in infos:
            raise GGUFError(f"{str(path)!r} holds tensor {shown(info.name)} twice.")
        infos[info.name] = info
    data_start = -(-cursor.pos // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, info in infos.items():
        if info.offset % alignment:
            raise GGUFError(
                f"{str(path)!r} places tensor {shown(name)} at {info.offset}, which is not a "
                f"multiple of the alignment {alignment}."
            )
        offset = data_start + info.offset
        missing = offset + info.nbytes - size
        if missing > 0:
            raise GGUFError(
                f"{str(path)!r} is truncated in the data of tensor {shown(name)}: {missing} bytes "
                "are missing; fetch the file again."
            )
        tensors[name] = TensorInfo(name, info.shape, info.type, path, offset, info.nbytes)
    _check_apart(tensors, path)
    return _Part(version, metadata, tensors, size)


def _check_apart(tensors: dict[str, TensorInfo], path: Path) -> None:
    for one, other in pairwise(sorted(tensors.values(), key=lambda t: t.offset)):
        if one.offset + one.nbytes > other.offset:
            raise GGUFError(
                f"{str(path)!r} is damaged: the data of tensors {shown(one.name)} and "
                f"{shown(other.name)} overlap; fetch the file again."
            )


def _check_count(cursor: Cursor, count: int, min_bytes: int, what: str) -> None:
    if count * min_bytes > cursor.size - cursor.pos:
        raise GGUFError(
            f"{str(cursor.path)!r} is damaged or truncated: it claims {count} {what}, but only "
            f"{cursor.size - cursor.pos} bytes follow."
        )


def _tensor(cursor: Cursor, path: Path) -> TensorInfo:
    name = cursor.text("the tensor table")
    what = f"the table entry of tensor {shown(name)}"
    n_dims = cursor.number("I", what)
    if n_dims > _MAX_DIMS:
        raise GGUFError(
            f"{str(path)!r} gives tensor {shown(name)} {n_dims} dimensions; at most {_MAX_DIMS} "
            "exist."
        )
    dims = [cursor.number("Q", what) for _ in range(n_dims)] or [1]
    shape = tuple(reversed(dims))
    type_number, offset = cursor.number("I", what), cursor.number("Q", what)
    try:
        kind = GGMLQuantizationType(type_number)
        block, type_size = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        raise GGUFError(
            f"{str(path)!r} stores tensor {shown(name)} in type number {type_number}, which is "
            "unknown; update the gguf package or convert the model to a known type."
        ) from None
    if 0 in shape:
        raise GGUFError(f"{str(path)!r} gives tensor {shown(name)} the empty shape {shape}.")
    if shape[-1] % block:
        raise GGUFError(
            f"{str(path)!r} gives tensor {shown(name)} rows of {shape[-1]} elements, which is not "
            f"a multiple of {kind.name}'s block of {block}."
        )
    return TensorInfo(name, shape, kind, path, offset, math.prod(shape) // block * type_size)
