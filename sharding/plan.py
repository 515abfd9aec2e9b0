"""The plan: which device holds which part of every tensor, head, page and row, and in which memory.

A plan is immutable and needs neither a model's values nor a device. Everything else asks it: no
tensor rounds its own share. Byte figures are exact sums over what is stored, not estimates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from sharding import sizes
from sharding.axes import axis
from sharding.cache_types import check_rows, rotation_notes
from sharding.errors import DoesNotFit, PlanError
from sharding.mesh import Mesh
from sharding.options import EngineName, PlanOptions
from sharding.plan_notes import attention_notes, pinned_notes, ring_notes
from sharding.residency import Residency, spend_budget, streaming_all
from sharding.rings import full_pages, is_resident
from sharding.shapes import Context, LayerShape, ModelShape, TensorShape
from sharding.splits import (
    LayerPlan,
    Ranges,
    holders,
    replications,
    split_layers,
    split_tensor,
)

__all__ = [
    "LayerPlan",
    "LayerShape",
    "ModelShape",
    "Plan",
    "PlanOptions",
    "TensorShape",
    "make_plan",
    "replications",
]


@dataclass(frozen=True, repr=False)
class Plan:
    """See the module's docstring. `vocab` has one range of rows a device; `why` tells why this
    engine; `notes` are sentences a user should read; `residency` says which pages of a host cache
    stay on the device and is decided once, when the plan is made."""

    mesh: Mesh
    model: ModelShape
    options: PlanOptions
    tensors: tuple[TensorShape, ...]
    layers: tuple[LayerPlan, ...]
    vocab: Ranges
    engine: EngineName
    why: str
    notes: tuple[str, ...] = ()
    residency: Residency = Residency((), ())

    @cached_property
    def used_devices(self) -> tuple[int, ...]:
        """Indexes of the devices that hold any part of the model."""
        return _used(self.layers, self.vocab)

    @cached_property
    def padded(self) -> bool:
        """Whether every device stores slices as large as the largest (one program over several
        devices)."""
        return self.engine == "fused" and len(self.used_devices) > 1

    def with_tensors(self, tensors: Sequence[TensorShape]) -> Plan:
        """This plan for these tensors.

        Raises:
            PlanError: for a tensor that names an undeclared axis, or whose size along a split axis
                is not what the plan splits.
        """
        plan = replace(self, tensors=tuple(tensors))
        for tensor in plan.tensors:
            plan.slices(tensor, 0)
        return plan

    def of_context(self, context: Context) -> Plan:
        """The layers of one context alone, numbered from zero, with the ends of the whole.

        Raises:
            PlanError: where the model has no layer of it.
        """
        own = self.model.in_context(context)
        number = {layer: n for n, layer in enumerate(own)} | {None: None}
        return replace(
            self,
            model=replace(self.model, layers=tuple(self.model.layers[i] for i in own)),
            tensors=tuple(
                replace(t, layer=number[t.layer]) for t in self.tensors if t.layer in number
            ),
            layers=tuple(self.layers[i] for i in own),
            residency=self.residency.of_layers(own),
        )

    def parts(self, axis_name: str, layer: int | None, device: int) -> tuple[int, int] | None:
        """The range of an axis that a device holds, in units of that axis, or None where the axis
        is replicated: virtual KV groups, groups of a recurrent state, MLP columns, vocabulary
        rows.

        Raises:
            PlanError: for an undeclared axis and for a layer or device that does not exist.
        """
        ranges = self.ranges(axis_name, layer)
        return None if ranges is None else ranges[self._device(device)]

    def ranges(self, axis_name: str, layer: int | None) -> Ranges | None:
        """One range of an axis a device, in units of that axis, or None where it is replicated."""
        if not axis(axis_name).split:
            return None
        if axis_name == "vocab":
            return self.vocab
        own = self.layers[self._layer(layer)]
        return {
            "kv_group": own.groups,
            "state_group": own.states,
            "mlp": own.mlp,
            "shared_mlp": own.shared_mlp,
        }[axis_name]

    def holds(self, tensor: TensorShape, device: int) -> bool:
        """Whether a device needs a tensor at all.

        A split tensor is needed where its part is not empty. A replicated tensor is needed by the
        devices of its layer; outside the layers, by those with rows of the vocabulary, and by all
        with attention where it is about rotary frequencies.
        """
        split = tensor.split_axis
        if split is not None:
            part = self.parts(split.name, tensor.layer, device)
            return part is not None and part[1] > part[0]
        device = self._device(device)
        if tensor.layer is not None:
            return device in self.layers[self._layer(tensor.layer)].devices
        if "rope" in tensor.axes:
            return any(device in layer.attn_devices for layer in self.layers)
        return device in holders(self.vocab)

    def slices(self, tensor: TensorShape, device: int) -> tuple[slice, ...]:
        """A device's part of a tensor, as slices of its dimensions.

        Raises:
            PlanError: for an undeclared axis, a size along a split axis that is not the plan's, or
                a cut that is inside an element of packed values.
        """
        split = tensor.split_axis
        found = []
        for dim, (name, size) in enumerate(zip(tensor.axes, tensor.shape, strict=True)):
            if split is None or name != split.name:
                found.append(slice(0, size))
                continue
            packs = tensor.packs_along(dim)
            units = self._units(name, tensor.layer)
            if size * packs != units:
                raise PlanError(
                    f"tensor {tensor.name} has {size * packs} along {name} where the plan splits"
                    f" {units}; give its shape as the plan counts it."
                )
            start, stop = self.parts(name, tensor.layer, device) or (0, units)
            if start % packs or stop % packs:
                raise PlanError(
                    f"tensor {tensor.name} is cut at {start} and {stop} of {name}, inside an"
                    f" element that packs {packs}; hold it unpacked."
                )
            found.append(slice(start // packs, stop // packs))
        return tuple(found)

    def weight_bytes(self, device: int) -> int:
        """Bytes of the tensors given to the plan that a device stores."""
        return sizes.weight_bytes(self, self._device(device))

    @cached_property
    def tensor_bytes(self) -> tuple[list[int], ...]:
        """Of each of the tensors, what each device stores."""
        return tuple(sizes.tensor_bytes(self, tensor) for tensor in self.tensors)

    def page_bytes(self, layer: int, device: int) -> int:
        """Bytes of one page, K and V, of a device's own groups of a layer."""
        return sizes.page_bytes(self, self._layer(layer), self._device(device))

    def cache_bytes(self, device: int) -> dict[str, int]:
        """Bytes of a device's cache when all slots are full: {"device": n, "host": n}."""
        return sizes.cache_bytes(self, self._device(device))

    def resident(self, device: int, layer: int, first_position: int) -> bool:
        """Whether the full page that begins at a position stays on the device; for a layer that
        reads another's cache, whether that one's does."""
        owner = self.model.cache_owner(self._layer(layer))
        full = full_pages(self.options, self.model.layers[owner].window)
        kept = self.residency.pages[owner][self._device(device)]
        return is_resident(first_position // self.options.page, kept, full)

    def staging_bytes(self, device: int) -> int:
        """Bytes on the device that groups of pages in flight take, at most; 0 where nothing is
        streamed."""
        return sizes.staging_bytes(self, self._device(device))

    def link_bytes(self, device: int, position: int, memory: int | None = None) -> int:
        """Bytes sent to a device in one step of one sequence with `position` earlier positions, be
        it a token or a chunk of its prompt: its full pages that do not stay on the device. A layer
        that reads another's cache streams it again. `memory` are the positions of the prompt of an
        encoder, where the model has one: as many by default. The encoder's own step sends none.
        Beside pages there is `state_bytes`."""
        device = self._device(device)
        return sizes.link_bytes(self, device, position, position if memory is None else memory)

    def state_bytes(self, device: int) -> int:
        """Bytes of recurrent states in host memory, which every step sends to a device, of all
        slots, and gets back."""
        return sizes.state_bytes(self, self._device(device))

    def step_bytes(self, device: int, position: int, rows: int = 1) -> int:
        """Bytes sent to a device in one step of so many sequences with `position` earlier positions
        each: their pages, and recurrent states."""
        return rows * self.link_bytes(device, position) + self.state_bytes(device)

    def compute_bytes(self, device: int) -> int:
        """Bytes that a step's intermediate arrays take, at most, by their sizes."""
        return sizes.compute_bytes(self, self._device(device))

    def needed_bytes(self, device: int) -> int:
        """Bytes that weights, cache, staging and intermediate arrays take on a device."""
        persistent = self.weight_bytes(device) + self.cache_bytes(device)["device"]
        return persistent + self.staging_bytes(device) + self.compute_bytes(device)

    def check_fit(self) -> Plan:
        """Return this plan; raise `DoesNotFit` when a device that tells its free bytes has less
        than the plan needs."""
        for index, info in enumerate(self.mesh.devices):
            needed = self.needed_bytes(index)
            if info.free is not None and needed > info.free:
                raise DoesNotFit(info.label, needed, info.free)
        return self

    def to_dict(self) -> dict[str, Any]:
        """The plan and its byte figures as what JSON can hold."""
        from sharding.report import to_dict

        return to_dict(self)

    def __str__(self) -> str:
        from sharding.report import to_text

        return to_text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from sharding.report import to_html

        return to_html(self)

    def _device(self, device: int) -> int:
        if not 0 <= device < len(self.mesh):
            raise PlanError(f"device {device} is not one of the mesh's {len(self.mesh)}.")
        return device

    def _layer(self, layer: int | None) -> int:
        if layer is None or not 0 <= layer < len(self.layers):
            raise PlanError(f"layer {layer} is not one of the model's {len(self.layers)}.")
        return layer

    def _units(self, axis_name: str, layer: int | None) -> int:
        if axis_name == "vocab":
            return self.model.vocab
        index = self._layer(layer)
        if axis_name != "kv_group":
            name = "states" if axis_name == "state_group" else axis_name
            return getattr(self.model.layers[index], name)
        return self.model.layers[index].kv_heads * self.layers[index].replication


def make_plan(
    model: ModelShape,
    mesh: Mesh,
    options: PlanOptions,
    tensors: Sequence[TensorShape] = (),
) -> Plan:
    """Decide where everything goes. Allocates nothing and does not check that it fits.

    Args:
        model: sizes of the model.
        mesh: the devices.
        options: what was asked.
        tensors: every tensor of the model, in shapes as planned (see `replications`).

    Raises:
        ShareError: for another number of shares than devices.
        PlanError: for options that do not go together, a head dim that the cache type does not
            fit, or a tensor nobody declared a split for.
    """
    types = options.cache_type_k, options.cache_type_v
    check_rows(model, *types)
    if options.recurrent_state == "host" and not any(shape.states for shape in model.layers):
        raise PlanError(
            "--recurrent-state host needs recurrent layers and there are none; drop it."
        )
    if options.split_mode == "tensor":
        layers, vocab = split_tensor(model, mesh, options)
        notes = attention_notes(model, mesh, options, layers)
    else:
        layers, vocab, notes = split_layers(model, mesh, options)
    engine, why = _choose_engine(mesh, options, layers, vocab)
    if engine == "fused" and len(_used(layers, vocab)) > 1 and not _equal(layers, vocab):
        notes += ("slices are zero-padded to the largest share: every device stores as much.",)
    notes += rotation_notes(model, *types, options.kv_rotate)
    plan = Plan(mesh, model, options, (), layers, vocab, engine, why).with_tensors(tensors)
    plan = replace(plan, residency=streaming_all(plan))
    residency, more = spend_budget(plan)
    plan = replace(plan, residency=residency, notes=notes + more)
    return replace(plan, notes=plan.notes + pinned_notes(plan) + ring_notes(plan))


def _used(layers: Sequence[LayerPlan], vocab: Ranges) -> tuple[int, ...]:
    used = set(holders(vocab)).union(*(layer.devices for layer in layers))
    return tuple(sorted(used))


def _equal(layers: Sequence[LayerPlan], vocab: Ranges) -> bool:
    own = [(layer.groups, layer.states, layer.mlp, layer.shared_mlp) for layer in layers]
    cuts = [vocab, *(ranges for four in own for ranges in four)]
    return all(len({stop - start for start, stop in ranges}) == 1 for ranges in cuts)


def _choose_engine(
    mesh: Mesh, options: PlanOptions, layers: Sequence[LayerPlan], vocab: Ranges
) -> tuple[EngineName, str]:
    if options.engine == "staged":
        return "staged", "--engine staged was asked for."
    asked = options.engine == "fused"
    if options.kv == "host":
        return "staged", "the cache is in host memory and is streamed."
    if options.recurrent_state == "host":
        return "staged", "recurrent states are in host memory."
    if len(_used(layers, vocab)) == 1:
        return "fused", "--engine fused was asked for." if asked else "one device does all."
    if options.split_mode != "tensor":
        if asked:
            raise PlanError(
                "--engine fused does not go with -sm layer on several devices; use -sm tensor or"
                " --engine staged."
            )
        return "staged", "layers are on different devices."
    if not mesh.alike:
        if asked:
            raise PlanError(
                "--engine fused needs devices of one kind and the mesh has several; use --engine"
                " staged."
            )
        return "staged", "devices are of different kinds."
    if asked:
        return "fused", "--engine fused was asked for."
    if _equal(layers, vocab):
        return "fused", "alike devices have equal parts of everything."
    return "staged", "devices have unequal parts."
