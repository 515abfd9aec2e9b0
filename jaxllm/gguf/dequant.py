"""Values of stored rows as float32, in bounded memory.

Blocks of every quantised type lie inside one row and do not depend on each other, so a tensor may
be read and converted in any run of whole rows. Block formats: gguf.quants.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from jaxllm.errors import GGUFError, shown
from jaxllm.gguf.reader import TensorInfo, read_rows

_Type = GGMLQuantizationType
_PLAIN = {
    _Type.F64: np.dtype("<f8"),
    _Type.I8: np.dtype("i1"),
    _Type.I16: np.dtype("<i2"),
    _Type.I32: np.dtype("<i4"),
    _Type.I64: np.dtype("<i8"),
}
_FLOATS = {_Type.F32: np.dtype("<f4"), _Type.F16: np.dtype("<f2")}
# Elements a call to gguf.quants: its temporaries are a few times as large and then fit the cache.
_PIECE = 1 << 16


def supported(kind: GGMLQuantizationType) -> bool:
    """Whether rows of this type can be read as numbers."""
    return kind in _PLAIN or kind in _FLOATS or kind is _Type.BF16 or _has_codec(kind)


def dequantize_rows(raw: np.ndarray, info: TensorInfo, out: np.ndarray | None = None) -> np.ndarray:
    """float32 [rows, cols] of raw bytes uint8 [rows, row_bytes] as `read_rows` gives them.

    With `out` (float32 [rows, cols], C-contiguous) the values are written there. F64 and integer
    types are returned as they are stored, without `out`. GGUFError for a type without a codec.
    """
    rows = raw.shape[0]
    if info.type in _PLAIN:
        return raw.view(_PLAIN[info.type])
    if out is None:
        out = np.empty((rows, info.cols), np.float32)
    if info.type in _FLOATS:
        out[...] = raw.view(_FLOATS[info.type])
    elif info.type is _Type.BF16:
        np.left_shift(raw.view("<u2"), np.uint32(16), out=out.view(np.uint32), dtype=np.uint32)
    elif _has_codec(info.type):
        _dequantize_blocks(raw, info.type, out)
    else:
        raise GGUFError(
            f"tensor {shown(info.name)} is stored as {info.type.name}, which cannot be read; "
            "convert the model to another type."
        )
    return out


def iter_row_chunks(
    info: TensorInfo,
    rows: slice | None = None,
    columns: slice | None = None,
    chunk_bytes: int = 4 << 20,
) -> Iterator[tuple[int, np.ndarray]]:
    """Walk rows of a tensor seen as 2-D in runs of at most about `chunk_bytes` of float32.

    Yields (first row, float32 [rows, columns]); each array is the caller's to keep. With `columns`
    only the blocks that these columns touch are converted.
    """
    rows = rows or slice(0, info.rows)
    columns = columns or slice(0, info.cols)
    block, size = GGML_QUANT_SIZES[info.type]
    for start, raw, first in iter_raw_chunks(info, rows, columns, chunk_bytes):
        narrow = replace(info, shape=(info.rows, raw.shape[1] // size * block))
        values = dequantize_rows(raw, narrow)
        yield start, values[:, columns.start - first : columns.stop - first]


def iter_raw_chunks(
    info: TensorInfo, rows: slice, columns: slice, chunk_bytes: int = 4 << 20
) -> Iterator[tuple[int, np.ndarray, int]]:
    """Walk the stored bytes of the blocks that these columns touch, in runs of rows as
    `iter_row_chunks`: yields (first row, uint8 [rows, bytes], column where the blocks begin)."""
    block, size = GGML_QUANT_SIZES[info.type]
    first, last = columns.start // block, -(-columns.stop // block)
    step = max(1, chunk_bytes // (4 * info.cols))
    for start in range(rows.start, rows.stop, step):
        raw = read_rows(info, start, min(start + step, rows.stop))
        raw = np.ascontiguousarray(raw[:, first * size : last * size])
        yield start, raw, first * block


def _dequantize_blocks(raw: np.ndarray, kind: GGMLQuantizationType, out: np.ndarray) -> None:
    block, size = GGML_QUANT_SIZES[kind]
    source, target = raw.reshape(-1), out.reshape(-1)
    step = _PIECE // block
    for first in range(0, source.size // size, step):
        piece = source[first * size : (first + step) * size]
        with np.errstate(all="ignore"):
            values = dequantize(piece, kind)
        target[first * block : first * block + values.size] = values


@cache
def _has_codec(kind: GGMLQuantizationType) -> bool:
    try:
        dequantize(np.zeros(GGML_QUANT_SIZES[kind][1], np.uint8), kind)
    except (NotImplementedError, KeyError):
        return False
    return True
