"""Where a slice's values come from: the rows of GGUF tensors, or random numbers.

A parameter's `form` says how GGUF tensors, seen as [rows, columns], are laid together in it:

    plain    one tensor as it is
    columns  one tensor [out, in] whose columns are split; the parameter may show `in` as two dims
    stack    gate and up, one after the other, rows split
    qkv      query, key and value rows of each KV group together
"""

from __future__ import annotations

import zlib

import numpy as np

from jaxllm.errors import ModelError
from jaxllm.gguf.dequant import iter_row_chunks, supported
from jaxllm.gguf.reader import GGUFFile, TensorInfo
from jaxllm.models.config import ModelConfig
from jaxllm.models.weights import Slot


def _flat(index: slice, unit: int) -> slice:
    return slice(index.start * unit, index.stop * unit)


class GGUFSource:
    """Slices of the tensors of a GGUF file, dequantised chunk by chunk into their place."""

    def __init__(self, file: GGUFFile, cfg: ModelConfig):
        self.file, self.cfg = file, cfg

    def check(self, slots: list[Slot]) -> None:
        """Raise one `ModelError` for all tensors that are missing, of a wrong shape or of a type
        that cannot be read."""
        problems = []
        for slot in slots:
            for name, want in zip(slot.source, self._shapes(slot), strict=True):
                info = self.file.tensors.get(name)
                if info is None:
                    problems.append(f"{name} is missing")
                elif not supported(info.type):
                    problems.append(f"{name} is stored as {info.type.name}, which cannot be read")
                elif tuple(info.shape) != want:
                    problems.append(f"{name} is {list(info.shape)}, expected {list(want)}")
        if problems:
            more = f" and {len(problems) - 4} more" if len(problems) > 4 else ""
            raise ModelError(
                f"{self.file.path.name} does not hold the tensors of {self.cfg.architecture}: "
                f"{'; '.join(problems[:4])}{more}"
            )

    def _shapes(self, slot: Slot) -> list[tuple[int, ...]]:
        """The shapes that the tensors of `slot.source` must have."""
        if slot.form == "qkv":
            return [(rows, *slot.shape[2:]) for rows in self._qkv_rows(slot)]
        if slot.form == "columns":
            return [(slot.shape[0], int(np.prod(slot.shape[1:])))]
        if slot.form == "stack":
            return [slot.shape[1:]] * 2
        return [slot.shape]

    def _qkv_rows(self, slot: Slot) -> list[int]:
        assert slot.layer is not None
        layer = self.cfg.layers[slot.layer]
        stored = layer.kv_heads // layer.kv_repeat
        return [
            layer.kv_heads * layer.q_per_kv * layer.k_dim,
            stored * layer.k_dim,
            stored * layer.v_dim,
        ]

    def fill(self, slot: Slot, index: tuple[slice, ...], out: np.ndarray) -> None:
        """Write the slice of `slot` at `index` to `out` (that slice's shape)."""
        infos = [self.file.tensors[name] for name in slot.source]
        if slot.form == "qkv":
            self._fill_qkv(slot, infos, index[0], out)
        elif slot.form == "columns":
            columns = _flat(index[1], slot.shape[2]) if out.ndim == 3 else index[1]
            _copy(infos[0], index[0], columns, out)
        elif slot.form == "stack":
            for half, info in zip(out, infos, strict=True):
                _copy(info, index[1], index[2], half)
        elif out.ndim == 1:
            _copy(infos[0], slice(0, 1), index[0], out[None])
        else:
            _copy(infos[0], index[0], index[1], out)

    def _fill_qkv(
        self, slot: Slot, infos: list[TensorInfo], groups: slice, out: np.ndarray
    ) -> None:
        assert slot.layer is not None
        layer = self.cfg.layers[slot.layer]
        heights = (layer.q_per_kv * layer.k_dim, layer.k_dim, layer.v_dim)
        for group, own in zip(range(groups.start, groups.stop), out, strict=True):
            top = 0
            for info, height, repeat in zip(
                infos, heights, (1, layer.kv_repeat, layer.kv_repeat), strict=True
            ):
                rows = _flat(slice(group // repeat, group // repeat + 1), height)
                part = own[top : top + height]
                if part.ndim == 1:
                    _copy(info, slice(0, 1), rows, part[None])
                else:
                    _copy(info, rows, slice(0, part.shape[1]), part)
                top += height


def _copy(info: TensorInfo, rows: slice, columns: slice, out: np.ndarray) -> None:
    """out [rows, ...] = rows and columns of a tensor seen as [rows, columns]."""
    for start, chunk in iter_row_chunks(info, rows, columns):
        part = out[start - rows.start : start - rows.start + len(chunk)]
        part[...] = chunk.reshape(part.shape)


class RandomSource:
    """Normal weights of one seed, the same for every plan; norms and rope factors are ones."""

    def __init__(self, seed: int = 0, std: float = 0.02):
        self.seed, self.std = seed, std

    def fill(self, slot: Slot, index: tuple[slice, ...], out: np.ndarray) -> None:
        """Write the slice of `slot` at `index` to `out`."""
        if slot.dtype == np.float32 and len(slot.shape) == 1 and slot.form == "plain":
            out[...] = 1.0
            return
        stream = np.random.PCG64([self.seed, zlib.crc32(slot.path.encode())])
        values = np.random.Generator(stream).standard_normal(slot.shape, np.float32)
        out[...] = values[index] * np.float32(self.std)
