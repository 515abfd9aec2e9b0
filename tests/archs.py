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
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, GGUFWriter, quants

from jaxllm.runtime import cache_root

DATA = Path(__file__).resolve().parent / "data"
_BESIDE = Path(__file__).resolve().parents[2] / "shared"
SHARED = _BESIDE if (_BESIDE / "archs").is_dir() else None
_DTYPES = {"F32": np.float32, "F16": np.float16}
# Matrices that llama.cpp's quantiser leaves as they are (tensor_allows_quantization).
_NEVER_QUANTISED = (
    "_norm.weight",
    "altup",
    "conv",
    "ffn_gate_inp",
    "laurel",
    "per_layer_model_proj",
    "position_embd",
    "ssm_x",
    "ssm_dt",
    "time_mix_decay_w",
    "time_mix_first",
    "time_mix_lerp",
    "time_mix_w",
)


@cache
def read(spec_path: Path) -> dict[str, Any]:
    return json.loads(gzip.decompress(spec_path.read_bytes()))


def spec_path(name: str) -> Path:
    """The spec of a model of the folder of references."""
    assert SHARED is not None
    return SHARED / "archs" / "specs" / f"{name}.json.gz"


@cache
def architectures() -> dict[str, str]:
    """The architecture of every model with reference logits, by the model's name."""
    if SHARED is None:
        return {}
    names = sorted(path.stem for path in (SHARED / "archs" / "refs").glob("*.npz"))
    return {name: read(spec_path(name))["architecture"] for name in names}


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


def limit(name: str) -> float:
    """The largest NMSE of a float32 run of a model: four orders above the noise of its like."""
    # Gates near the cut of the one, mixtures of residuals of the other amplify rounding. A move of
    # kimi-k3's embeddings by one last place moves four of its sixteen decoded tokens, and the NMSE
    # of all, by 1e-11 to 5e-9. In float64 the same layers are 4e-10 from llama.cpp there, 5e-11
    # from themselves in float32 on one device, and 3e-9 on two; the prompt is 5e-12, 2e-11 and
    # 5e-11 away.
    return {"gemma3n-dense": 1e-7, "kimi-k3-moe": 1e-8}.get(name, 1e-9)


def _quantisable(name: str, values: np.ndarray) -> bool:
    block = GGML_QUANT_SIZES[GGMLQuantizationType.Q8_0][0]
    return (
        values.ndim > 1
        and values.shape[-1] % block == 0
        and name.endswith("weight")
        and not any(part in name for part in _NEVER_QUANTISED)
    )


@cache
def write(spec_path: Path, quantised: bool = False) -> Path:
    """The GGUF file of a spec, in the package's cache folder, with its matrices as Q8_0 if
    `quantised`. The checksum of its values is verified."""
    return write_spec(read(spec_path), quantised)


def tensors(spec: dict[str, Any]) -> dict[str, np.ndarray]:
    """Every tensor of a spec by its name."""
    return {tensor["name"]: _fill(spec["name"], tensor) for tensor in spec["tensors"]}


def write_spec(spec: dict[str, Any], quantised: bool = False) -> Path:
    """As `write`, of a spec that has been read."""
    kind = "-Q8_0" if quantised else ""
    path = cache_root() / "test-models" / f"{spec['name']}{kind}-{spec['sha256'][:16]}.gguf"
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
        if quantised and _quantisable(tensor["name"], values):
            stored = quants.quantize(values, GGMLQuantizationType.Q8_0)
            writer.add_tensor(tensor["name"], stored, raw_dtype=GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(tensor["name"], values)
    assert sha.hexdigest() == spec["sha256"], f"{spec['name']} has other bytes than its reference"
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(aside, path)
    return path
