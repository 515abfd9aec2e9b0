"""From a plan and a source of values to an engine that runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import Mesh as JaxMesh

from jaxllm.cache.types import CACHE_TYPES, CacheFormat
from jaxllm.engine.base import Engine
from jaxllm.engine.drafting import DraftingEngine
from jaxllm.engine.fused import AXIS, FusedEngine
from jaxllm.engine.quantising import StoredTypes, keep_quantised
from jaxllm.engine.staged import StagedEngine
from jaxllm.errors import OptionError
from jaxllm.models.block import Block, Kinds
from jaxllm.models.config import Columns, LayerConfig, ModelConfig
from jaxllm.models.layers import Device
from jaxllm.models.parts import BlockIndexer
from jaxllm.models.weights import (
    Leaves,
    LocalModel,
    Progress,
    Source,
    load_device,
    load_stacked,
    local_model,
    slots,
    whole_model,
)
from sharding import (
    Context,
    DoesNotFit,
    Mesh,
    Plan,
    PlanOptions,
    make_plan,
    replications,
    rotates,
)
from sharding.links import Place, host_place
from sharding.memory import check_host, free_frames, memory_of
from sharding.splits import LayerPlan, Ranges


@dataclass(frozen=True)
class PlannedModel:
    """A model under a plan: `whole` has its KV heads replicated as the plan says, `kinds` what is
    held quantised. `kernels`: attention and products of few rows are."""

    plan: Plan
    block: type[Block]
    whole: LocalModel
    dtype: str
    kinds: Sequence[Kinds] = ()
    kernels: bool = False

    def slice(self, device: int) -> LocalModel:
        """What one device of the plan holds."""
        layers = self.plan.layers
        start, stop = self.plan.vocab[device]
        return local_model(
            self.block,
            self.whole.cfg,
            [_count(layer.groups[device]) for layer in layers],
            [Columns(*(_count(r[device]) for r in _columns(layer))) for layer in layers],
            stop - start,
            self.dtype,
            self.kinds,
        )

    def padded(self) -> LocalModel:
        """The largest slice in every size: what each device of a fused mesh holds."""
        layers = self.plan.layers
        return local_model(
            self.block,
            self.whole.cfg,
            [max(map(_count, layer.groups)) for layer in layers],
            [Columns(*(max(map(_count, r)) for r in _columns(layer))) for layer in layers],
            max(map(_count, self.plan.vocab)),
            self.dtype,
            self.kinds,
        )


def _columns(layer: LayerPlan) -> tuple[Ranges, ...]:
    """The ranges of a layer in the order of `Columns`."""
    return layer.mlp, layer.shared_mlp, layer.states


def _count(part: tuple[int, int]) -> int:
    return part[1] - part[0]


def _cache_format(options: PlanOptions, layer: LayerConfig) -> CacheFormat:
    k, v = options.cache_type_k, options.cache_type_v
    if layer.latent is not None:
        return CacheFormat(k=CACHE_TYPES[k], v=CACHE_TYPES[k])
    if layer.indexer is not None:  # whose small keys are not to be mixed with the others
        return CacheFormat(k=CACHE_TYPES[k], v=CACHE_TYPES[v])
    return CacheFormat(
        k=CACHE_TYPES[k],
        v=CACHE_TYPES[v],
        rotate_k=rotates(k, layer.k_dim, options.kv_rotate),
        rotate_v=rotates(v, layer.v_dim, options.kv_rotate),
    )


def _check_blocks(cfg: ModelConfig, options: PlanOptions) -> None:
    """Where layers choose blocks of keys, pages hold whole ones."""
    sizes = [c.indexer.size for c in cfg.layers if isinstance(c.indexer, BlockIndexer)]
    if sizes and options.page % max(sizes):
        raise OptionError(
            f"page is {options.page}; {cfg.architecture} chooses blocks of {max(sizes)} keys, of "
            "which it must be a multiple"
        )


def plan_model(
    block: type[Block],
    cfg: ModelConfig,
    mesh: Mesh,
    options: PlanOptions,
    dtype: str,
    mlp_block: int = 32,
    keep: StoredTypes | None = None,
    kernels: bool = False,
) -> PlannedModel:
    """The plan of a model over a mesh, every parameter counted. dtype names a numpy type; `keep`
    has the types of tensors that stay quantised where that is possible, `kernels` says that all
    devices have those of attention and of products of a few rows."""
    cfg, shape = cfg.in_context(options.ctx), cfg.shape(mlp_block)
    _check_blocks(cfg, options)
    options = replace(options, itemsize=np.dtype(jax.numpy.dtype(dtype)).itemsize)
    times = replications(shape, mesh, options)
    layers = [
        replace(c.replicated(r), cache=_cache_format(options, c), kernels=kernels)
        for c, r in zip(cfg.layers, times, strict=True)
    ]
    cfg = replace(cfg, layers=tuple(layers))
    whole = whole_model(block, cfg, dtype)
    kinds, notes = [], ()
    if keep is not None:
        kinds, notes = keep_quantised(slots(whole), keep, make_plan(shape, mesh, options), kernels)
        whole = whole_model(block, cfg, dtype, kinds)
    plan = make_plan(shape, mesh, options, [t for slot in slots(whole) for t in slot.tensors])
    plan = replace(plan, notes=plan.notes + notes)
    return PlannedModel(plan, block, whole, dtype, kinds, kernels)


def build_engine(
    model: PlannedModel,
    source: Source,
    progress: Progress | None = None,
    place: Callable[[int, int, int], Place] | None = None,
) -> Engine:
    """Load every device's slice and make the engine that the plan names.

    place(device, layer, first position) overrides where full pages of a staged engine live.

    Raises:
        DoesNotFit: before anything is allocated where the plan tells, or when an allocation fails;
            what was taken is free again.
        PlanError: before anything is allocated where host memory has not enough.
    """
    model.plan.check_fit()
    check_host(model.plan)
    try:
        return _build(model, source, progress, place)
    except DoesNotFit as error:
        refused = error.bare()
    free_frames()
    raise refused


def _build(
    model: PlannedModel,
    source: Source,
    progress: Progress | None,
    place: Callable[[int, int, int], Place] | None,
) -> Engine:
    plan = model.plan
    devices = list(plan.mesh.jax_devices or ())
    if plan.engine == "fused":
        if not plan.padded:
            (only,) = plan.used_devices
            local = model.slice(only)
            with memory_of(plan, only):
                whole = model.whole
                leaves = load_device(plan, whole, local, source, only, devices[only], progress)
                return _fused(model, local, leaves, devices[only])
        mesh = JaxMesh(np.asarray(devices), (AXIS,), axis_types=(AxisType.Auto,))
        local = model.padded()
        with memory_of(plan):
            leaves = load_stacked(plan, model.whole, local, source, mesh, progress)
            return _fused(model, local, leaves, mesh)
    models = [model.slice(i) for i in range(len(devices))]
    leaves = []
    on_host = host_place(devices, plan.options.kv_pinned)
    for i, local in enumerate(models):
        with memory_of(plan, i):
            own = load_device(plan, model.whole, local, source, i, devices[i], progress)
            leaves.append(own)

    def planned(device: int, layer: int, first: int) -> Place:
        return "device" if plan.resident(device, layer, first) else on_host

    def of_context(context: Context) -> StagedEngine:
        own = [m.of_context(context) for m in models]
        arrays = [each.of(m) for m, each in zip(own, leaves, strict=True)]

        def placed(device: int, layer: int, first: int) -> Place:
            return (place or planned)(device, own[0].first + layer, first)

        drafting = bool(model.whole.cfg.ahead)
        states: Place = on_host if plan.options.recurrent_state == "host" else "device"
        return StagedEngine(
            plan.of_context(context),
            own,
            arrays,
            devices,
            placed,
            drafting,
            states,
            model.kernels,
        )

    return _in_contexts(model.plan, model.whole, of_context, model.dtype)


def _fused(
    model: PlannedModel, local: LocalModel, leaves: Leaves, where: Device | JaxMesh
) -> Engine:
    def of_context(context: Context) -> FusedEngine:
        own, plan = local.of_context(context), model.plan.of_context(context)
        return FusedEngine(plan, own, leaves.of(own), where, model.dtype, model.kernels)

    return _in_contexts(model.plan, local, of_context, model.dtype)


def _in_contexts(
    plan: Plan, model: LocalModel, engine: Callable[[Context], Engine], dtype: str
) -> Engine:
    """The engine of the model, in step with that of its draft where it has one."""
    if not model.cfg.ahead:
        return engine("main")
    return DraftingEngine(plan, engine("main"), engine("draft"), dtype)
