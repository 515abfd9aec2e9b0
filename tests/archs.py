"""Random models of many architectures: GGUF files written from small specs, bit for bit.

A spec (JSON, gzip) has metadata with types and, for each tensor, shape, type and a rule that fills
it. Specs and reference logits of a few models are in tests/data; more lie in the folder of
references, where that is beside the repository.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFValueType, GGUFWriter

from jaxllm.runtime import cache_root

DATA = Path(__file__).resolve().parent / "data"
_BESIDE = Path(__file__).resolve().parents[2] / "shared"
SHARED = _BESIDE if (_BESIDE / "archs").is_dir() else None
_DTYPES = {"F32": np.float32, "F16": np.float16}


def _fill(model: str, tensor: dict[str, Any]) -> np.ndarray:
    """The values of a tensor: {"raw": base64}, {"normal": [[rows, mean, std], ...]} or, minus the
    exponential of such noise, {"neg_exp": [mean, std]}."""
    dtype, shape = np.dtype(_DTYPES[tensor["type"]]), tuple(tensor["shape"])
    [(rule, value)] = tensor["fill"].items()
    if rule == "raw":
        raw = np.frombuffer(base64.b64decode(value), dtype.newbyteorder("<"))
        return raw.astype(dtype).reshape(shape)
    stream = np.random.PCG64(zlib.crc32(f"{model}/{tensor['name']}/0".encode()))
    values = np.random.Generator(stream).standard_normal(shape)
    if rule == "neg_exp":
        mean, std = value
        return (-np.exp(mean + std * values)).astype(dtype)
    assert rule == "normal", rule
    start = 0
    for rows, mean, std in value:
        values[start : start + rows] = mean + std * values[start : start + rows]
        start += rows
    return values.astype(dtype)


@cache
def write(spec_path: Path) -> Path:
    """The GGUF file of a spec, in the package's cache folder; its checksum is verified."""
    spec = json.loads(gzip.decompress(spec_path.read_bytes()))
    path = cache_root() / "test-models" / f"{spec['name']}-{spec['sha256'][:16]}.gguf"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(f".{os.getpid()}")
    writer = GGUFWriter(aside, spec["architecture"])
    for key, kind, *rest in spec["metadata"]:
        if kind == "ARRAY":
            element, values = rest
            writer.add_key_value(key, values, GGUFValueType.ARRAY, GGUFValueType[element])
        else:
            writer.add_key_value(key, rest[0], GGUFValueType[kind])
    sha = hashlib.sha256()
    for tensor in spec["tensors"]:
        values = _fill(spec["name"], tensor)
        sha.update(tensor["name"].encode() + np.ascontiguousarray(values).tobytes())
        writer.add_tensor(tensor["name"], values)
    assert sha.hexdigest() == spec["sha256"], f"{spec['name']} has other bytes than its reference"
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(aside, path)
    return path
