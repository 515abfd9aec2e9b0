"""Which weights stay quantised under a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from jaxllm.errors import OptionError
from jaxllm.gguf.blocks import BLOCK_TYPES, BlockType
from jaxllm.models.block import Kinds
from jaxllm.models.weights import Slot
from sharding import Plan

# Of each tensor, by its name in a file; or that of all matrices.
StoredTypes: TypeAlias = Mapping[str, GGMLQuantizationType] | GGMLQuantizationType
TYPE_NAMES = ", ".join(kind.name for kind in BLOCK_TYPES)


def type_named(name: str) -> GGMLQuantizationType:
    """The type of random matrices that `random_type` names; OptionError where it names none."""
    for kind in BLOCK_TYPES:
        if kind.name == name:
            return kind
    raise OptionError(f"random_type (--random-type) must be one of {TYPE_NAMES}, not {name!r}")


def types_of(slots: Sequence[Slot], stored: StoredTypes) -> Mapping[str, GGMLQuantizationType]:
    """Of each tensor of a model with these parameters, as far as they are known. The embedding is
    a matrix."""
    if not isinstance(stored, GGMLQuantizationType):
        return stored
    return {name: stored for slot in slots if slot.matrix for name in slot.source}


def keep_quantised(
    slots: Sequence[Slot], stored: StoredTypes, plan: Plan, kernels: bool
) -> tuple[list[Kinds], tuple[str, ...]]:
    """What is held quantised of each layer and, last, of the ends; and a note for each reason why
    other quantised tensors are not. The plan needs no tensors: its cuts are asked. `kernels` says
    that all devices have that of products."""
    of_tensors = types_of(slots, stored)
    places = (*range(len(plan.layers)), None)
    kinds: dict[int | None, list[tuple[str, BlockType]]] = {place: [] for place in places}
    unpacked: dict[str, list[str]] = {}
    for slot in slots:
        types = {of_tensors[name] for name in slot.source if name in of_tensors}
        if all(GGML_QUANT_SIZES[t][0] == 1 for t in types):
            continue
        found = _kind(slot, types, plan)
        if isinstance(found, str):
            unpacked.setdefault(found, []).append(slot.path)
        else:
            local = (
                slot.path if slot.layer is None else slot.path.removeprefix(f"blk.{slot.layer}.")
            )
            kinds[slot.layer].append((local, replace(found, kernel=kernels)))
    notes = (
        f"{_some(paths)} dequantised to the compute type: {reason}."
        for reason, paths in unpacked.items()
    )
    return [tuple(own) for own in kinds.values()], tuple(notes)


def _kind(slot: Slot, types: set[GGMLQuantizationType], plan: Plan) -> BlockType | str:
    """How a parameter is held quantised, or why it cannot be."""
    first, *others = sorted(types, key=lambda t: t.name)
    if others:
        names = ", ".join(t.name for t in (first, *others))
        return f"tensors joined in one are of several types ({names})"
    kind = BLOCK_TYPES.get(first)
    if kind is None or not slot.matrix:
        return f"{first.name} is not kept quantised there"
    cuts = [slot.shape[-1]]
    if slot.tensor.split_axis is not None and slot.axes[-1] == slot.tensor.split_axis.name:
        cuts += [edge for own in plan.ranges(slot.axes[-1], slot.layer) or () for edge in own]
    if slot.form == "section_columns":
        cuts += [section.height for section in slot.sections]
    found = kind.cut_at(*cuts)
    if found is None:
        return f"blocks of {kind.block} of {first.name} would be cut"
    return found


def _some(paths: list[str]) -> str:
    more = f" and {len(paths) - 1} more are" if len(paths) > 1 else " is"
    return paths[0] + more
