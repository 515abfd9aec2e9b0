"""What tells the weights of two files of one shape apart."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from jaxllm.gguf import open_gguf
from jaxllm.gguf.digest import RUN_BYTES, weights_digest
from jaxllm.models.sources import GGUFSource
from support import small_model

LARGE = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
NORM = np.ones(300, np.float32)


def _write(path: Path, tensors: dict[str, np.ndarray], parts: int = 0) -> Path:
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=parts)
    writer.add_name(path.stem)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return next(path.parent.glob(f"{path.stem}*"))


def _changed(values: np.ndarray, at: int) -> np.ndarray:
    new = values.copy()
    new.flat[at] += 1
    return new


@pytest.mark.parametrize(
    "other",
    [
        {"a": _changed(LARGE, 0), "b": NORM},
        {"a": _changed(LARGE, -1), "b": NORM},
        {"a": _changed(LARGE, (LARGE.nbytes - RUN_BYTES) // 3 // 4 + 1), "b": NORM},
        {"a": LARGE, "b": _changed(NORM, 150)},
        {"a": LARGE, "c": NORM},
        {"a": LARGE.reshape(128, 128), "b": NORM},
        {"a": LARGE.astype(np.float16), "b": NORM},
    ],
    ids=["first", "last", "between", "norm", "name", "shape", "type"],
)
def test_a_twin_has_another_digest(other: dict[str, np.ndarray], tmp_path: Path):
    one, two = (
        open_gguf(_write(tmp_path / name, tensors))
        for name, tensors in (("one.gguf", {"a": LARGE, "b": NORM}), ("two.gguf", other))
    )
    assert weights_digest(one) != weights_digest(two)


def test_order_parts_and_metadata_do_not_count(tmp_path: Path):
    one = open_gguf(_write(tmp_path / "one.gguf", {"a": LARGE, "b": NORM}))
    two = open_gguf(_write(tmp_path / "two.gguf", {"b": NORM, "a": LARGE}, parts=1))
    assert len(two.files) == 2
    assert weights_digest(one) == weights_digest(two) == GGUFSource(two, small_model()).digest()
