"""Where a slice's values come from: the rows of GGUF tensors, or random numbers.

A parameter's `form` says how GGUF tensors, seen as [rows, columns], are laid together in it:

    plain    one tensor as it is
    columns  one tensor [out, in] whose columns are split; the parameter may show `in` as two dims
    stack    gate and up, one after the other, rows split; stored as two tensors or as one
    qkv      query, key and value rows of each KV group together
    q_heads, k_heads   rows of the query heads or of the keys, by KV group
    alibi    no tensor: the slope of each query head
    fading   no tensor: the log decay of each head of lightning attention
    experts_columns, experts_stack   of every expert of a mixture, columns or stack
    once     one tensor as it is on one device of its layer, zeros on the others
    sections, section_columns   rows, or columns of one tensor, that `Slot.sections` tells a group
    q_gates  rows of the gates that stand after the query of each head, by KV group
"""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from jaxllm.errors import ModelError
from jaxllm.gguf.blocks import take_apart
from jaxllm.gguf.dequant import iter_raw_chunks, iter_row_chunks, supported
from jaxllm.gguf.digest import weights_digest
from jaxllm.gguf.random_blocks import DEVIATION, random_blocks
from jaxllm.gguf.reader import GGUFFile
from jaxllm.models.config import LayerConfig, ModelConfig
from jaxllm.models.heads import alibi_slopes
from jaxllm.models.quantised import Quantised
from jaxllm.models.sections import heights, in_order
from jaxllm.models.weights import LOADERS, Buffer, Slot

ROWS_AT_ONCE = 256  # of a tensor whose columns are put in another order
DRAWN = 1 << 22  # values that are drawn for a random tensor
KEPT = 3 * LOADERS  # of such draws: three tensors may be joined in what a thread fills
IGNORED = ".attn_rot_embd.weight"  # of old files; computed instead
HEAD_FORMS = ("q_heads", "k_heads")


def _flat(index: slice, unit: int) -> slice:
    return slice(index.start * unit, index.stop * unit)


def _shift(index: slice, by: int) -> slice:
    return slice(index.start + by, index.stop + by)


def _bare(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without the dims of size one that converters may have kept."""
    return tuple(n for n in shape if n != 1)


class TensorSource(ABC):
    """Lays rows and columns of named tensors together as parameters have them."""

    def __init__(self, cfg: ModelConfig):
        self.cfg = cfg

    @abstractmethod
    def copy(
        self, name: str, shape: tuple[int, ...], rows: slice, columns: slice, out: Buffer
    ) -> None:
        """out [rows, ...] = rows and columns of tensor `name` seen as [rows, columns]."""

    def shapes(self, slot: Slot) -> list[tuple[int, ...]]:
        """The shapes that the tensors of `slot.source` must have."""
        if slot.form == "qkv":
            joined, rows = self._layer(slot).qkv_joined, self._qkv_rows(slot)
            rows = [sum(joined)] if joined else rows[: len(slot.source)]
            return [(n, *slot.shape[2:]) for n in rows]
        if slot.form == "columns":
            return [(slot.shape[0], int(np.prod(slot.shape[1:])))]
        if slot.form == "sections":
            rows = heights(slot.sections, len(slot.source), slot.shape[0])
            return [(n, *slot.shape[2:]) for n in rows]
        if slot.form == "section_columns":
            return [(slot.shape[0], *heights(slot.sections, 1, slot.shape[1]))]
        if slot.form == "q_gates":
            return [(self._qkv_rows(slot)[0], slot.shape[2])]
        if slot.form == "stack":
            if len(slot.source) == 1:
                return [(2 * slot.shape[1], *slot.shape[2:])]
            return [slot.shape[1:]] * 2
        if slot.form in HEAD_FORMS:
            return [(slot.shape[0] // self._repeat(slot) * slot.shape[1], *slot.shape[2:])]
        if slot.form in ("alibi", "fading"):
            return []
        if slot.form == "experts_stack":
            n, pair, columns, *rest = slot.shape
            if len(slot.source) == 1:
                return [(n, pair * columns, *rest)]
            return [(n, columns, *rest)] * 2
        return [slot.shape]

    def _layer(self, slot: Slot) -> LayerConfig:
        assert slot.layer is not None
        return self.cfg.layers[slot.layer]

    def _repeat(self, slot: Slot) -> int:
        """How many KV groups of a slot share a stored head."""
        return self._layer(slot).kv_repeat if slot.form == "k_heads" else 1

    def _qkv_rows(self, slot: Slot) -> list[int]:
        layer = self._layer(slot)
        stored = layer.kv_heads // layer.kv_repeat
        return [
            layer.kv_heads * layer.q_per_kv * layer.q_rows,
            stored * layer.k_dim,
            stored * layer.v_dim,
        ]

    def fill(self, slot: Slot, index: tuple[slice, ...], out: Buffer) -> None:
        """Write the slice of `slot` at `index` to `out` (that slice's shape)."""
        tensors = list(zip(slot.source, self.shapes(slot), strict=True))
        if slot.form == "qkv":
            self._fill_qkv(slot, tensors, index[0], out)
        elif slot.form == "columns":
            columns = _flat(index[1], slot.shape[2]) if out.ndim == 3 else index[1]
            self.copy(*tensors[0], index[0], columns, out)
        elif slot.form == "sections":
            self._fill_sections(slot, tensors, index[0], out)
        elif slot.form == "section_columns":
            self._fill_section_columns(slot, tensors[0], index, out)
        elif slot.form == "q_gates":
            layer = self._layer(slot)
            for group, own in zip(range(*index[0].indices(slot.shape[0])), out, strict=True):
                self._fill_queries(layer, tensors[0], group, layer.k_dim, own)
        elif slot.form == "stack":
            joined = len(tensors) == 1
            for i, half in enumerate(out):
                rows = _shift(index[1], i * slot.shape[1]) if joined else index[1]
                self._rows(tensors[0 if joined else i], rows, half)
        elif slot.form in HEAD_FORMS:
            rows = int(np.prod(slot.shape[1 : max(2, len(slot.shape) - 1)]))
            for group, own in zip(range(*index[0].indices(slot.shape[0])), out, strict=True):
                at = group // self._repeat(slot)
                part = own.reshape(-1, own.shape[-1]) if own.ndim > 1 else own
                self._rows(tensors[0], _flat(slice(at, at + 1), rows), part)
        elif slot.form == "alibi":
            layer = self._layer(slot)
            heads = alibi_slopes(layer.kv_heads * layer.q_per_kv, layer.alibi)
            out[...] = heads.reshape(slot.shape)[index]
        elif slot.form == "fading":
            # Less the later a layer is; the last but hardly forgets (MiniMax-01, section 2.2).
            assert slot.layer is not None
            part = slot.layer / max(1, len(self.cfg.layers) - 1)
            slopes = alibi_slopes(slot.shape[0], 8.0) * (1.0 - part + 1e-5)
            out[...] = -slopes.reshape(slot.shape)[index]
        elif slot.form == "experts_stack":
            self._fill_experts_stack(slot, tensors, index, out)
        elif slot.form == "experts_columns":
            for expert, own in zip(range(*index[0].indices(slot.shape[0])), out, strict=True):
                rows = _shift(index[1], expert * slot.shape[1])
                self.copy(*tensors[0], rows, index[2], own)
        elif out.ndim == 1:
            self._rows(tensors[0], index[0], out)
        else:
            self.copy(*tensors[0], index[0], index[1], out)

    def _rows(self, tensor: tuple[str, tuple[int, ...]], rows: slice, out: Buffer) -> None:
        """Whole rows of a tensor, or numbers of one that has a single dim."""
        if out.ndim == 1:
            self.copy(*tensor, slice(0, 1), rows, out[None])
        else:
            self.copy(*tensor, rows, slice(0, out.shape[-1]), out)

    def _fill_experts_stack(
        self,
        slot: Slot,
        tensors: list[tuple[str, tuple[int, ...]]],
        index: tuple[slice, ...],
        out: Buffer,
    ) -> None:
        columns = slot.shape[2]
        for expert, own in zip(range(*index[0].indices(slot.shape[0])), out, strict=True):
            for i, half in enumerate(own):
                if len(tensors) == 1:
                    tensor, first = tensors[0], i * columns
                    block = expert * slot.shape[1] * columns
                else:
                    tensor, first, block = tensors[i], 0, expert * columns
                if half.ndim == 1:  # a bias: one row an expert
                    own_columns = _shift(index[2], first)
                    self.copy(*tensor, slice(expert, expert + 1), own_columns, half[None])
                else:
                    self.copy(*tensor, _shift(index[2], block + first), index[3], half)

    def _fill_sections(
        self,
        slot: Slot,
        tensors: list[tuple[str, tuple[int, ...]]],
        groups: slice,
        out: np.ndarray,
    ) -> None:
        for group, own in zip(range(groups.start, groups.stop), out, strict=True):
            top = 0
            for section in slot.sections:
                for rows in section.rows(group):
                    height = rows.stop - rows.start
                    self._rows(tensors[section.tensor], rows, own[top : top + height])
                    top += height

    def _fill_section_columns(
        self,
        slot: Slot,
        tensor: tuple[str, tuple[int, ...]],
        index: tuple[slice, ...],
        out: Buffer,
    ) -> None:
        rows, groups = index[0], index[1]
        if in_order(slot.sections):
            self.copy(*tensor, rows, _flat(groups, slot.shape[2]), out)
            return
        runs = [
            r for g in range(groups.start, groups.stop) for s in slot.sections for r in s.rows(g)
        ]
        columns = np.concatenate([np.arange(r.start, r.stop) for r in runs])
        width = tensor[1][1]
        for top in range(0, len(out), ROWS_AT_ONCE):
            part = out[top : top + ROWS_AT_ONCE]
            here = slice(rows.start + top, rows.start + top + len(part))
            if isinstance(part, Quantised):
                whole = part.blank(len(part), width)
                self.copy(*tensor, here, slice(0, width), whole)
                part.gather(whole, runs)
            else:
                whole = np.empty((len(part), width), part.dtype)
                self.copy(*tensor, here, slice(0, width), whole)
                part[...] = whole[:, columns].reshape(part.shape)

    def _fill_queries(
        self,
        layer: LayerConfig,
        tensor: tuple[str, tuple[int, ...]],
        group: int,
        first: int,
        out: np.ndarray,
    ) -> None:
        """k_dim rows of each query head of a group, from its row `first` on."""
        for i in range(layer.q_per_kv):
            at = (group * layer.q_per_kv + i) * layer.q_rows + first
            own = out[i * layer.k_dim : (i + 1) * layer.k_dim]
            self._rows(tensor, slice(at, at + layer.k_dim), own)

    def _fill_qkv(
        self,
        slot: Slot,
        tensors: list[tuple[str, tuple[int, ...]]],
        groups: slice,
        out: Buffer,
    ) -> None:
        layer = self._layer(slot)
        sizes = (layer.q_per_kv * layer.k_dim, layer.k_dim, layer.v_dim)
        repeats = (1, layer.kv_repeat, layer.kv_repeat)
        first = [0, 0, 0]  # rows of q, k and v in their tensors
        if layer.qkv_joined:
            q, k, _ = layer.qkv_joined
            first, tensors = [0, q, q + k], tensors * 3
        count = len(tensors)  # fewer where values are made of keys, or a cache is another layer's
        for group, own in zip(range(groups.start, groups.stop), out, strict=True):
            top = 0
            parts = zip(tensors, first[:count], sizes[:count], repeats[:count], strict=True)
            for tensor, at, height, repeat in parts:
                part = own[top : top + height]
                top += height
                if layer.gated_q and top == sizes[0]:
                    self._fill_queries(layer, tensor, group, 0, part)
                    continue
                rows = _shift(_flat(slice(group // repeat, group // repeat + 1), height), at)
                self._rows(tensor, rows, part)


class GGUFSource(TensorSource):
    """Tensors of a GGUF file, dequantised or taken apart chunk by chunk into their place."""

    def __init__(self, file: GGUFFile, cfg: ModelConfig):
        super().__init__(cfg)
        self.file = file

    def digest(self) -> str:
        """Of the file's tensors, of which samples are read."""
        return weights_digest(self.file)

    def check(self, slots: list[Slot]) -> None:
        """Raise one `ModelError` for all tensors that are missing, of a wrong shape or of a type
        that cannot be read; or for those that the file has and the model does not use."""
        problems = []
        for slot in slots:
            for name, want in zip(slot.source, self.shapes(slot), strict=True):
                info = self.file.tensors.get(name)
                if info is None:
                    problems.append(f"{name} is missing")
                elif not supported(info.type):
                    problems.append(f"{name} is stored as {info.type.name}, which cannot be read")
                elif _bare(info.shape) != _bare(want):
                    problems.append(f"{name} is {list(info.shape)}, expected {list(want)}")
        if problems:
            more = f" and {len(problems) - 4} more" if len(problems) > 4 else ""
            raise ModelError(
                f"{self.file.path.name} does not hold the tensors of {self.cfg.architecture}: "
                f"{'; '.join(problems[:4])}{more}"
            )
        used = {name for slot in slots for name in slot.source}
        known, layers = (IGNORED, *self.cfg.unused), len(self.cfg.layers)
        drafts = tuple(f"blk.{i}." for i in range(layers, layers + self.cfg.drafts))
        unused = [
            n
            for n in self.file.tensors
            if n not in used and not n.endswith(known) and not n.startswith(drafts)
        ]
        if unused:
            more = f" and {len(unused) - 4} more" if len(unused) > 4 else ""
            raise ModelError(
                f"{self.file.path.name} has tensors that {self.cfg.architecture} does not use here:"
                f" {', '.join(unused[:4])}{more}; its results would be wrong without them"
            )

    def copy(
        self, name: str, shape: tuple[int, ...], rows: slice, columns: slice, out: Buffer
    ) -> None:
        info = replace(self.file.tensors[name], shape=shape)
        if isinstance(out, Quantised):
            for start, raw, first in iter_raw_chunks(info, rows, columns):
                own = out[start - rows.start : start - rows.start + len(raw)]
                own.fill(take_apart(raw, info.type), _shift(columns, -first))
            return
        for start, chunk in iter_row_chunks(info, rows, columns):
            part = out[start - rows.start : start - rows.start + len(chunk)]
            part[...] = chunk.reshape(part.shape)


class RandomSource(TensorSource):
    """Random weights of one seed, the same for every plan; norms and rope factors are ones.

    A tensor that `stored` names has random blocks of its type, each row from whole ones on, so that
    it has the same values quantised or not; others have normal ones. Rows of a large tensor repeat
    after `DRAWN` values: drawing takes longer than copying.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        seed: int = 0,
        std: float = DEVIATION,
        stored: Mapping[str, GGMLQuantizationType] | None = None,
    ):
        super().__init__(cfg)
        self.seed, self.std, self.stored = seed, std, stored or {}
        self._values = lru_cache(KEPT)(self._draw)
        self._parts = lru_cache(KEPT)(self._draw_parts)

    def digest(self) -> str:
        """Of what decides the values of a tensor of some name and shape."""
        types = "".join(f", {kind}" for kind in sorted({t.name for t in self.stored.values()}))
        return f"random, seed {self.seed}, deviation {self.std}, {DRAWN} drawn{types}"

    def _random(self, name: str) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64([self.seed, zlib.crc32(name.encode())]))

    def _draw(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """float32 [rows, columns or more], the rows that repeat."""
        if name in self.stored:
            return dequantize(self._draw_blocks(name, shape), self.stored[name])
        values = self._random(name).standard_normal((_drawn(shape), shape[-1]), np.float32)
        return values * np.float32(self.std)

    def _draw_blocks(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """uint8 [rows, bytes]"""
        kind, rows = self.stored[name], _drawn(shape)
        count = rows * -(-shape[-1] // GGML_QUANT_SIZES[kind][0])
        return random_blocks(kind, count, self._random(name), self.std).reshape(rows, -1)

    def _draw_parts(self, name: str, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
        return take_apart(self._draw_blocks(name, shape), self.stored[name])

    def fill(self, slot: Slot, index: tuple[slice, ...], out: Buffer) -> None:
        if len(slot.shape) == 1 and slot.form == "plain":
            out[...] = 1.0
            return
        super().fill(slot, index, out)
        if slot.form in HEAD_FORMS and not {"embed", "latent"} & {*slot.axes}:  # a norm
            out += 1.0

    def copy(
        self, name: str, shape: tuple[int, ...], rows: slice, columns: slice, out: Buffer
    ) -> None:
        drawn, top = _drawn(shape), rows.start
        while top < rows.stop:
            first = top % drawn
            here = slice(first, min(drawn, first + rows.stop - top))
            own = out[top - rows.start :][: here.stop - first]
            if isinstance(own, Quantised):
                parts = self._parts(name, shape)
                own.fill({part: values[here] for part, values in parts.items()}, columns)
            else:
                own[...] = self._values(name, shape)[here, columns].reshape(own.shape)
            top += len(own)


def _drawn(shape: tuple[int, ...]) -> int:
    """Rows of a random tensor after which they repeat."""
    return min(math.prod(shape[:-1]), max(1, DRAWN // shape[-1]))
