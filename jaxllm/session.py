"""Session files: one sequence's tokens and cache, of any plan of a model.

A safetensors file. Tensors: `tokens` int32 [n] (the newest may have no cache yet), and `k.I` and
`v.I` [K, S, row] of layer I, the model's own KV heads in order (a plan's copies of a head are
stored once), rows byte for byte as the cache type stores them; bfloat16 as uint16. A recurrent
layer has `state.I.N` [groups, ...], its N-th array, float32. Its metadata says of which model it
is, weights included (`_facts`), and has a checksum of the rest. A file is written whole or not
at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxllm.cache.types import CacheFormat
from jaxllm.engine.prefixes import Held
from jaxllm.engine.rows import LayerRow
from jaxllm.engine.states import StateRow
from jaxllm.errors import SessionError
from jaxllm.models.block import Block
from jaxllm.models.config import LayerConfig, ModelConfig
from jaxllm.paths import check_no_folder, part_of

FORMAT, VERSION = "jaxllm session", "3"
OWN = "cached", "prefilled", "firsts"  # numbers of the session alone


@dataclass(frozen=True)
class Origin:
    """The model that a session is of: two of one sizes and block differ in `weights`, a digest."""

    cfg: ModelConfig
    block: type[Block]
    weights: str


@dataclass(frozen=True)
class Session:
    """A sequence and its cache, the KV heads of each layer as a plan of the model has them."""

    held: Held
    layers: Sequence[LayerRow]
    states: Sequence[StateRow] = ()


def save(path: Path, origin: Origin, session: Session) -> None:
    """Write a session of a model.

    Raises:
        SessionError: where the file cannot be written.
    """
    held, cfg = session.held, origin.cfg
    tensors = {"tokens": np.asarray(held.tokens, np.int32)}
    owners = [cfg.layers[i] for i in cfg.cached]
    for index, (layer, row) in enumerate(zip(owners, session.layers, strict=True)):
        for name, side in (("k", row.k), ("v", row.v)):
            tensors[f"{name}.{index}"] = _plain(side[:: layer.kv_repeat])
    for index, arrays in zip(cfg.stateful, session.states, strict=True):
        for n, array in enumerate(arrays):
            tensors[f"state.{index}.{n}"] = np.ascontiguousarray(array)
    own = {
        "cached": str(held.cached),
        "prefilled": str(held.prefilled),
        "firsts": json.dumps([row.first for row in session.layers]),
    }
    facts = _facts(origin) | own | {"checksum": _checksum(own, tensors)}
    check_no_folder(path, "the session", SessionError)
    part = part_of(path)
    try:
        save_file(tensors, part, metadata=facts)
        part.replace(path)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or _system_error(str(error))
        raise SessionError(f"cannot write the session {str(path)!r}: {reason}") from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def _checksum(own: dict[str, str], tensors: dict[str, np.ndarray]) -> str:
    """Of what is of this session alone: its numbers, and the bytes of its tensors."""
    found = zlib.crc32(json.dumps([own[name] for name in OWN]).encode())
    for name, tensor in sorted(tensors.items()):
        found = zlib.crc32(f"{name} {tensor.dtype} {tensor.shape}".encode(), found)
        found = zlib.crc32(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data, found)
    return f"{found:08x}"


def _system_error(text: str) -> str:
    """What the system said in an error of safetensors, which names its own temporary file."""
    found = re.search(r"\(os error (\d+)\)", text)
    return os.strerror(int(found[1])) if found else text


def load(path: Path, origin: Origin, ctx: int) -> Session:
    """Read a session for a plan of the model with `ctx` positions.

    Raises:
        SessionError: for a file that is missing, damaged, no session, of another version, model
            or cache type, or longer than `ctx`.
    """
    name, cfg = f"the session {str(path)!r}", origin.cfg
    check_no_folder(path, "the session", SessionError)
    try:
        with safe_open(path, "np") as file:
            facts = file.metadata() or {}
            _check(name, facts, _facts(origin))
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            if facts["checksum"] != _checksum(facts, tensors):
                raise ValueError("other bytes than were written")
            cached = int(facts["cached"])
            if cached > ctx:
                raise SessionError(
                    f"{name} has {cached} positions and the context {ctx}; raise ctx (-c)"
                )
            firsts = json.loads(facts["firsts"])
            layers, owners = [], [cfg.layers[i] for i in cfg.cached]
            for index, (layer, first) in enumerate(zip(owners, firsts, strict=True)):
                k, v = (tensors[f"{side}.{index}"] for side in "kv")
                layers.append(_layer(layer, k, v, first, cached))
            states = [_state(tensors, i, cfg.layers[i]) for i in cfg.stateful]
            tokens = tensors["tokens"].tolist()
            held = Held(tokens, cached, int(facts["prefilled"]), ended=True)
    except OSError as error:
        raise SessionError(f"cannot read {name}: {error.strerror or error}") from error
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise SessionError(f"{name} is damaged or no session of jaxllm; save it anew") from error
    if not 0 < cached <= len(tokens) or not 0 <= held.prefilled <= cached:
        raise SessionError(f"{name} is damaged: its numbers of tokens contradict each other")
    return Session(held, layers, states)


def _facts(origin: Origin) -> dict[str, str]:
    """What a session's model must have in common with the one that it is loaded into."""
    cfg = origin.cfg
    plain = [
        replace(
            layer,
            kv_heads=layer.kv_heads // layer.kv_repeat,
            q_per_kv=layer.q_per_kv * layer.kv_repeat,
            kv_repeat=1,
            cache=CacheFormat(),
        )
        for layer in cfg.layers
    ]
    sizes = asdict(replace(cfg, layers=tuple(plain))) | {"block": origin.block.__qualname__}
    text = json.dumps(sizes, default=str, sort_keys=True)
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": f"{cfg.name or cfg.architecture} ({cfg.architecture}, {len(cfg.layers)} layers)",
        "fingerprint": hashlib.sha256(text.encode()).hexdigest(),
        "weights": origin.weights,
        "cache": json.dumps([_cache(layer) for layer in cfg.layers]),
    }


def _cache(layer: LayerConfig) -> str:
    types = layer.cache
    sides = (types.k.name, types.rotate_k), (types.v.name, types.rotate_v)
    return "/".join(name + (" rotated" if turned else "") for name, turned in sides)


def _check(name: str, facts: dict[str, str], own: dict[str, str]) -> None:
    if facts.get("format") != FORMAT:
        raise SessionError(f"{name} is no session of jaxllm; give another path")
    if facts.get("version") != VERSION:
        raise SessionError(
            f"{name} has version {facts.get('version')} of the format and this is version"
            f" {VERSION}; save it anew"
        )
    if facts.get("fingerprint") != own["fingerprint"]:
        raise SessionError(
            f"{name} is of the model {facts.get('model')} and this is {own['model']}, whose name,"
            " sizes or settings differ; load the model that it was saved from"
        )
    if facts.get("weights") != own["weights"]:
        raise SessionError(
            f"{name} is of other weights of {own['model']}, as those before a fine-tuning or of"
            " another quantisation are; load the file that it was saved from"
        )
    if facts.get("cache") != own["cache"]:
        theirs, ours = json.loads(facts["cache"]), json.loads(own["cache"])
        index = next(i for i, both in enumerate(zip(theirs, ours, strict=True)) if len({*both}) > 1)
        raise SessionError(
            f"{name} stores keys/values of layer {index} as {theirs[index]} and this model's cache"
            f" as {ours[index]}; give the same cache types (-ctk, -ctv) and rotation"
        )


def _layer(layer: LayerConfig, k: np.ndarray, v: np.ndarray, first: int, cached: int) -> LayerRow:
    """Stored sides as a plan's heads; a ValueError where they are not what the layer stores."""
    types, heads = layer.cache, layer.kv_heads // layer.kv_repeat
    sides = []
    for side, kind, dim in ((k, types.k, layer.k_stored), (v, types.v, layer.v_stored)):
        dtype = np.dtype(kind.dtype)
        if side.shape != (heads, cached - first, kind.row(dim)) or side.dtype != _stored(dtype):
            raise ValueError("a tensor is not what the layer stores")
        sides.append(np.repeat(side.view(dtype), layer.kv_repeat, axis=0))
    oldest = 0 if layer.window is None else cached
    if not 0 <= first <= oldest:
        raise ValueError("positions are missing")
    return LayerRow(sides[0], sides[1], first)


def _state(tensors: dict[str, np.ndarray], index: int, layer: LayerConfig) -> StateRow:
    """A layer's recurrent state; a ValueError where it is not what the layer keeps."""
    assert layer.recurrent is not None
    shapes, found = layer.recurrent.state_shapes, []
    for n, shape in enumerate(shapes):
        array = tensors[f"state.{index}.{n}"]
        if array.shape != (layer.recurrent.groups, *shape) or array.dtype != np.float32:
            raise ValueError("a tensor is not what the layer keeps")
        found.append(array)
    return tuple(found)


def _stored(dtype: np.dtype) -> np.dtype:
    """The type of a file's tensor: numpy's own types are known to every reader."""
    return dtype if dtype.isbuiltin == 1 else np.dtype(f"u{dtype.itemsize}")


def _plain(side: Any) -> np.ndarray:
    side = np.ascontiguousarray(side)
    return side.view(_stored(side.dtype))
