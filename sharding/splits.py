"""Where every layer and vocabulary row goes: the one place that cuts anything.

Ranges are (start, stop); an empty one is (0, 0). Ranges of devices follow each other in device
order, do not overlap and cover everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from sharding.errors import ShareError
from sharding.llama_cpp import llama_cpp_cut, llama_cpp_heads, mlp_granularity
from sharding.mesh import Mesh
from sharding.options import ATTN_SPLIT, TENSOR_SPLIT, PlanOptions
from sharding.shapes import LayerShape, ModelShape
from sharding.shares import apportion, apportion_blocks, apportion_dithered, parse_shares

Range = tuple[int, int]
Ranges = tuple[Range, ...]


@dataclass(frozen=True)
class LayerPlan:
    """How one layer is cut.

    `devices` hold any part of it; `groups`, `states`, `mlp` and `shared_mlp` have one range a
    device of the mesh, of virtual KV groups, of groups of a recurrent state, of MLP columns and of
    those of an MLP beside a mixture. Each KV head is stored `replication` times, as that many
    virtual groups with q_per_kv // replication query heads each.
    """

    devices: tuple[int, ...]
    groups: Ranges
    states: Ranges
    mlp: Ranges
    shared_mlp: Ranges
    replication: int = 1

    @cached_property
    def attn_devices(self) -> tuple[int, ...]:
        """Devices with attention work."""
        return holders(self.groups)

    @cached_property
    def state_devices(self) -> tuple[int, ...]:
        """Devices with a part of a recurrent state."""
        return holders(self.states)

    @cached_property
    def mixer_devices(self) -> tuple[int, ...]:
        """Devices with work on other tokens: attention or a recurrent state."""
        return tuple(sorted({*self.attn_devices, *self.state_devices}))

    @cached_property
    def mlp_devices(self) -> tuple[int, ...]:
        """Devices with columns of an MLP."""
        return tuple(sorted({*holders(self.mlp), *holders(self.shared_mlp)}))


def holders(ranges: Ranges) -> tuple[int, ...]:
    """Indexes of the devices whose range is not empty."""
    return tuple(i for i, (start, stop) in enumerate(ranges) if stop > start)


def ranges_of(counts: Sequence[int]) -> Ranges:
    """Counts a device to ranges one after another."""
    ranges, start = [], 0
    for n in counts:
        ranges.append((start, start + n) if n else (0, 0))
        start += n
    return tuple(ranges)


def shares_of(mesh: Mesh, options: PlanOptions) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The weight and the attention shares of a split by tensor, one a device each.

    Raises:
        ShareError: for another number of shares than devices.
    """
    n = len(mesh)
    weight = parse_shares(options.tensor_split, n, TENSOR_SPLIT) or (1.0,) * n
    return weight, parse_shares(options.attn_split, n, ATTN_SPLIT) or weight


def layer_replication(layer: LayerShape, takers: int, options: PlanOptions) -> int:
    """How often each KV head of a layer is stored, when `takers` devices have a share of attention.

    The smallest divisor of the query heads a KV head that gives every taker a group, or the
    largest divisor where none does.
    """
    if not options.kv_replicate or layer.kv_heads == 0:
        return 1
    divisors = [r for r in range(1, layer.q_per_kv + 1) if layer.q_per_kv % r == 0]
    return next((r for r in divisors if layer.kv_heads * r >= takers), divisors[-1])


def replications(model: ModelShape, mesh: Mesh, options: PlanOptions) -> tuple[int, ...]:
    """How often each layer's KV heads are stored, known before the shapes of tensors are."""
    if options.split_mode != "tensor":
        return (1,) * len(model.layers)
    takers = sum(s > 0 for s in shares_of(mesh, options)[1])
    return tuple(layer_replication(layer, takers, options) for layer in model.layers)


def split_tensor(
    model: ModelShape, mesh: Mesh, options: PlanOptions
) -> tuple[tuple[LayerPlan, ...], Ranges]:
    """Cut every layer over the devices: attention by KV groups, MLP by columns."""
    weight, attn = shares_of(mesh, options)
    repeat = replications(model, mesh, options)
    groups = _cut_attention(model, options, attn, repeat)
    states = _cut_states(model, options, attn)
    layers, with_mlp, rotated = [], 0, options.rounding == "llama.cpp"

    @cache  # layers that are alike are cut once
    def columns(n: int, block: int, rotation: int) -> Ranges:
        return ranges_of(_cut_columns(n, block, weight, options, rotation))

    for index, layer in enumerate(model.layers):
        own = ranges_of(groups[model.cache_owner(index)])
        rotation = with_mlp % len(mesh) if rotated else 0
        mlp, shared = (columns(n, layer.mlp_block, rotation) for n in (layer.mlp, layer.shared_mlp))
        with_mlp += layer.mlp > 0
        four = own, ranges_of(states[index]), mlp, shared
        devices = tuple(sorted({device for ranges in four for device in holders(ranges)}))
        layers.append(LayerPlan(devices, *four, repeat[index]))
    return tuple(layers), ranges_of(apportion(model.vocab, weight))


def _cut_columns(
    columns: int, block: int, shares: tuple[float, ...], options: PlanOptions, rotation: int
) -> tuple[int, ...]:
    if options.rounding == "llama.cpp":
        return llama_cpp_cut(columns, mlp_granularity(block), shares, rotation)
    return apportion_blocks(columns, max(32, block), shares)


def _cut_attention(
    model: ModelShape, options: PlanOptions, shares: tuple[float, ...], repeat: tuple[int, ...]
) -> list[tuple[int, ...]]:
    units = [layer.kv_heads * r for layer, r in zip(model.layers, repeat, strict=True)]
    if options.rounding == "nearest":
        return _nearest(units, options, shares)
    cuts, earlier = [], 0
    for layer, n, r in zip(model.layers, units, repeat, strict=True):
        cuts.append(
            llama_cpp_heads(
                n,
                layer.q_per_kv // r,
                layer.k_dim,
                shares,
                earlier % len(shares),
                layer.o_block,
                layer.gated_q,
            )
        )
        earlier += n > 0
    return cuts


def _cut_states(
    model: ModelShape, options: PlanOptions, shares: tuple[float, ...]
) -> list[tuple[int, ...]]:
    """Groups of recurrent states a device and layer, to the nearest under every rounding."""
    return _nearest([layer.states for layer in model.layers], options, shares)


def _nearest(
    units: list[int], options: PlanOptions, shares: tuple[float, ...]
) -> list[tuple[int, ...]]:
    if options.dither:
        return apportion_dithered(units, shares)
    cuts = {n: apportion(n, shares) for n in set(units)}
    return [cuts[n] for n in units]


def split_layers(
    model: ModelShape, mesh: Mesh, options: PlanOptions
) -> tuple[tuple[LayerPlan, ...], Ranges, tuple[str, ...]]:
    """Give whole layers to devices, in order; the vocabulary goes with the last layer.

    A layer stays with the layer whose cache it reads: a cut between them moves to the nearest
    place where there is none, which a note tells.
    """
    n = len(model.layers)
    if options.split_mode == "none":
        counts: tuple[int, ...] = (n,) + (0,) * (len(mesh) - 1)
    else:
        counts = apportion(n, _layer_shares(mesh, options))
    stops = [sum(counts[: i + 1]) for i in range(len(counts))]
    owners = [model.cache_owner(i) for i in range(n)]
    allowed = [b for b in range(n + 1) if all(o >= b for o in owners[b:])]
    moved = [min(allowed, key=lambda b: (abs(b - stop), b)) for stop in stops]
    notes = ()
    if moved != stops:
        notes = ("cuts between layers were moved to keep layers that share a cache together.",)
    place = [next(d for d, stop in enumerate(moved) if i < stop) for i in range(n)]
    layers = tuple(
        _whole(layer, d, len(mesh)) for d, layer in zip(place, model.layers, strict=True)
    )
    return layers, _all_on(place[-1], len(mesh), model.vocab), notes


def _whole(layer: LayerShape, device: int, devices: int) -> LayerPlan:
    sizes = layer.kv_heads, layer.states, layer.mlp, layer.shared_mlp
    groups, states, mlp, shared = (_all_on(device, devices, n) for n in sizes)
    return LayerPlan((device,), groups, states, mlp, shared)


def _layer_shares(mesh: Mesh, options: PlanOptions) -> tuple[float, ...]:
    given = parse_shares(options.tensor_split, len(mesh), TENSOR_SPLIT)
    if given is not None:
        return given
    free = [d.free for d in mesh.devices if d.free is not None]
    try:
        return parse_shares(free, len(mesh), "free memory") or (1.0,)
    except ShareError:
        # Not every device tells, or none has any: nothing to go by.
        return (1.0,) * len(mesh)


def _all_on(device: int, devices: int, n: int) -> Ranges:
    return tuple((0, n) if i == device else (0, 0) for i in range(devices))
