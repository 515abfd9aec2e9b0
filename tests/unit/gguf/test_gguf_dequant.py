"""Rows as float32: every type against gguf.quants, chunks, and memory."""

import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as T

from jaxllm.errors import GGUFError
from jaxllm.gguf import TensorInfo, dequantize_rows, iter_row_chunks, supported

CODECS = [kind for kind in T if supported(kind) and kind.name[0] in "QIMNT" and kind.name[1:] not in
          ("8", "16", "32", "64")]  # fmt: skip


def stored(path: Path, kind: T, rows: int, cols: int) -> TensorInfo:
    """A tensor of random bytes, at an offset of 64."""
    block, size = GGML_QUANT_SIZES[kind]
    nbytes = rows * cols // block * size
    rng = np.random.default_rng(0)
    # Bytes up to 59 keep every half-precision scale finite.
    path.write_bytes(bytes(64) + rng.integers(0, 60, nbytes, np.uint8).tobytes())
    return TensorInfo("w", (rows, cols), kind, path, 64, nbytes)


def test_codecs_are_all_of_the_common_types() -> None:
    names = {kind.name for kind in CODECS}
    assert names >= {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4"}
    assert not supported(T.Q8_K)


@pytest.mark.parametrize("kind", CODECS, ids=lambda kind: kind.name)
def test_chunks_equal_the_whole(kind: T, tmp_path: Path) -> None:
    info = stored(tmp_path / "w", kind, 21, 512)
    raw = np.frombuffer(info.file.read_bytes()[64:], np.uint8).reshape(21, -1)
    want = gguf.quants.dequantize(raw, kind)
    starts, chunks = zip(*iter_row_chunks(info, chunk_bytes=8 * 512 * 4), strict=True)
    assert starts == (0, 8, 16)
    assert np.array_equal(np.concatenate(chunks), want)
    out = np.empty((21, 512), np.float32)
    assert dequantize_rows(raw, info, out) is out
    assert np.array_equal(out, want)


def test_floats(tmp_path: Path) -> None:
    values = np.array([[0.0, -1.5, 3.140625, 65504.0]], np.float32)
    forms = {
        T.F32: values.astype("<f4"),
        T.F16: values.astype("<f2"),
        T.BF16: (values.view(np.uint32) >> 16).astype("<u2"),
    }
    for kind, array in forms.items():
        info = TensorInfo("w", (1, 4), kind, tmp_path, 0, array.nbytes)
        got = dequantize_rows(array.view(np.uint8).reshape(1, -1), info)
        assert got.dtype == np.float32
        assert got[0, :3].tolist() == [0.0, -1.5, 3.140625]


@pytest.mark.parametrize("kind", [T.F64, T.I8, T.I16, T.I32, T.I64])
def test_plain_types_stay_as_they_are(kind: T, tmp_path: Path) -> None:
    dtype = np.dtype(kind.name.lower().replace("i", "int").replace("f", "float"))
    array = np.arange(6).astype(dtype).reshape(2, 3)
    info = TensorInfo("w", (2, 3), kind, tmp_path, 0, array.nbytes)
    got = dequantize_rows(array.view(np.uint8), info)
    assert got.dtype == dtype and np.array_equal(got, array)


def test_a_type_without_codec_is_named(tmp_path: Path) -> None:
    info = stored(tmp_path / "w", T.Q8_K, 1, 256)
    with pytest.raises(GGUFError, match="'w' is stored as Q8_K"):
        next(iter_row_chunks(info))


def test_memory_is_bounded(tmp_path: Path) -> None:
    info = stored(tmp_path / "w", T.Q4_K, 4096, 2048)
    next(iter_row_chunks(info))
    tracemalloc.start()
    total = sum(values.size for _, values in iter_row_chunks(info, chunk_bytes=1 << 20))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == 4096 * 2048
    assert peak < 8 << 20


def test_rows_and_columns(tmp_path: Path) -> None:
    info = stored(tmp_path / "w", T.Q4_0, 9, 256)
    whole = np.concatenate([values for _, values in iter_row_chunks(info)])
    part = list(iter_row_chunks(info, slice(2, 7), slice(40, 200), chunk_bytes=2 * 256 * 4))
    assert [start for start, _ in part] == [2, 4, 6]
    assert np.array_equal(np.concatenate([values for _, values in part]), whole[2:7, 40:200])
