"""From the arguments of `LLM`, named as llama.cpp's options, to the plan of a model."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from inspect import signature
from itertools import product
from numbers import Integral
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from jaxllm.cache.groups import group_sizes
from jaxllm.calibration import calibrated_mesh
from jaxllm.engine.build import PlannedModel, plan_model
from jaxllm.engine.quantising import TYPE_NAMES, StoredTypes
from jaxllm.errors import ModelError, OptionError, cut
from jaxllm.gguf.blocks import BLOCK_TYPES
from jaxllm.gguf.metadata import Metadata
from jaxllm.gguf.reader import GGUFFile
from jaxllm.models.block import Block
from jaxllm.models.config import ModelConfig
from jaxllm.models.registry import family
from jaxllm.models.sources import GGUFSource
from jaxllm.models.weights import slots
from jaxllm.progress import measure_aloud, measuring, searching
from jaxllm.runtime import default_dtype, has_kernels, links_file
from sharding import Mesh, Plan, PlanOptions, parse_shares, position_bytes
from sharding.errors import FitError
from sharding.fit import Fit
from sharding.fit import fit as fastest
from sharding.fit_search import Allowed
from sharding.fit_tables import Workload
from sharding.links import Delivery, host_place, measure_link, measured, with_links
from sharding.options import SplitMode
from sharding.residency_notes import format_layers

DEFAULT_CTX = 2048
LARGE_GROUP = 64  # pages of the largest copy to an accelerator,
COPY_BYTES = 64 << 20  # and how many bytes these may be
AHEAD_BYTES = 256 << 20  # of copies to an accelerator that exist at a time,
MOST_AHEAD = 16  # and how many these may be
TAIL_BYTES = 512 << 20  # of pages that gather on accelerators before they leave together
TAIL_PART = 4  # and no more than this part of a context, as 1 / TAIL_PART
DTYPES = ("float32", "bfloat16", "float16")
WEIGHTS = ("dequantised", "quantised")
SPEC_TYPES = ("none", "draft-mtp")
IMPLS = ("jnp", "kernel")


def options_from(
    *,
    mesh: Mesh,
    ctx_train: int = 0,
    split_mode: str | None = None,
    tensor_split: str | Sequence[float] | None = None,
    attn_split: str | Sequence[float] | None = None,
    kv: str = "device",
    cache_type_k: str | None = None,
    cache_type_v: str | None = None,
    dtype: str | None = None,
    ctx: int | None = None,
    parallel: int = 1,
    batch: int | None = None,
    ubatch: int | None = None,
    **more: Any,
) -> tuple[PlanOptions, str]:
    """Plan options and dtype from the arguments of `LLM`, with their defaults.

    The cache has the compute dtype, the context the model's own up to 2048, several devices
    `layer` unless these say otherwise. Of batch and ubatch one that is not given goes with the
    other.
    """
    dtype = dtype or default_dtype(mesh.devices[0].platform)
    if dtype not in DTYPES:
        raise OptionError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    own_type = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[dtype]
    if ctx is not None and not _counts(ctx):
        raise OptionError(f"the context (-c) must be a whole number of at least 1, not {ctx!r}")
    return (
        PlanOptions(
            split_mode=split_mode or ("layer" if len(mesh) > 1 else "none"),  # type: ignore
            tensor_split=parse_shares(tensor_split, len(mesh), "--tensor-split/-ts"),
            attn_split=parse_shares(attn_split, len(mesh), "--attn-split/-as"),
            kv=kv,  # type: ignore
            cache_type_k=cache_type_k or own_type,  # type: ignore
            cache_type_v=cache_type_v or own_type,  # type: ignore
            ctx=ctx or min(ctx_train or DEFAULT_CTX, DEFAULT_CTX),
            slots=parallel,
            batch=batch,
            ubatch=_default_ubatch(batch) if ubatch is None else ubatch,
            **more,
        ),
        dtype,
    )


def _default_ubatch(batch: Any) -> int:
    """512, or the largest power of two that a smaller batch has."""
    most = min(PlanOptions.ubatch, batch) if _counts(batch) else PlanOptions.ubatch
    return 1 << (int(most).bit_length() - 1)


def _counts(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


def check_names(arguments: Iterable[str], others: Iterable[str]) -> None:
    """OptionError for a keyword that `plan_config` does not take, with the nearest that it or its
    caller (`others`) does."""
    own = {*signature(options_from).parameters, *signature(plan_config).parameters}
    own -= {"block", "cfg", "mesh", "ctx_train", "mlp_block", "stored", "arguments", "more"}
    own |= {field.name for field in fields(PlanOptions)} - {"slots", "itemsize"}
    for name in arguments:
        if name not in own:
            near = get_close_matches(name, {*own, *others}, n=1, cutoff=0.0)
            raise OptionError(f"there is no argument {name!r}; the nearest is {near[0]!r}")


CHOSEN = (  # by a fit
    "tensor_split",
    "attn_split",
    "kv",
    "kv_gpu_layers",
    "kv_gpu_layers_draft",
    "kv_device_bytes",
    "kv_pinned",
    "recurrent_state",
    "engine",
    "prefetch",
    "rounding",
    "dither",
    "kv_replicate",
)


def fit_config(
    block: type[Block],
    cfg: ModelConfig,
    mesh: Mesh,
    *,
    mlp_block: int = 32,
    link_gbps: str | Sequence[float] | None = None,
    split_mode: SplitMode | None = None,
    cache_type_k: str | Sequence[str] | None = None,
    cache_type_v: str | Sequence[str] | None = None,
    ubatch: int | None = None,
    workload: Workload | None = None,
    weights: str = "dequantised",
    stored: StoredTypes | None = None,
    progress: bool = False,
    **arguments: Any,
) -> Fit:
    """The fastest split of a model over a mesh, whose rates are measured where it tells none.

    Args:
        split_mode, ubatch: the only one to consider, where given; a batch that is given bounds
            ubatch.
        cache_type_k, cache_type_v: types that may be chosen, as "f16,q8_0" or a sequence.
        workload: the request whose time counts.
        weights, stored: "quantised" counts matrices as they are stored; `stored` has their types.
        progress: show what is measured and searched.
        arguments: those of `LLM` that a fit does not choose.

    Raises:
        OptionError: for an argument that a fit chooses, and for a model with an encoder.
        FitError: when nothing fits.
    """
    for name in CHOSEN:
        if name in arguments:
            raise OptionError(f"{name} is what a fit chooses; drop it, or drop the fit")
    if cfg.encoder:
        raise OptionError(f"a fit does not count the encoder of {cfg.architecture}; drop the fit")
    keep = _kept(weights, stored)
    options, dtype = _options(cfg, mesh, arguments | {"ubatch": ubatch})
    if workload is not None:
        workload.check(options.ctx)  # before anything is measured
    if link_gbps is not None:
        mesh = with_links(mesh, link_gbps)
    with measuring(progress) as tell:
        mesh = calibrated_mesh(mesh, dtype, tell)
    alone = replace(options, split_mode="none")
    whole = plan_model(block, cfg, Mesh(mesh.devices[:1]), alone, dtype, mlp_block, keep).plan
    own = (options.cache_type_k,)
    pairs = product(_types(cache_type_k) or own, _types(cache_type_v) or own)
    allowed = Allowed(tuple(pairs))
    if split_mode is not None:
        allowed = replace(allowed, split_modes=(split_mode,))
    chunks = [n for n in allowed.ubatches if n <= options.prompt_batch] if ubatch is None else []
    allowed = replace(allowed, ubatches=tuple(chunks) or (options.ubatch,))
    cut = whole.tensors
    if keep is not None:  # what stays quantised wherever groups are cut
        most = max(max(layer.kv_heads, layer.states) for layer in whole.model.layers)
        alone, paper = replace(options, split_mode="tensor"), Mesh.virtual(max(1, most))
        cut = plan_model(block, cfg, paper, alone, dtype, mlp_block, keep).plan.tensors
    with searching(progress) as tell:
        what = whole.model, mesh, whole.options, whole.tensors, allowed
        return fastest(*what, workload, cut, tell)


def _kept(weights: str, stored: StoredTypes | None) -> StoredTypes | None:
    """The types of the tensors that stay quantised where they can, None for none of them."""
    if weights not in WEIGHTS:
        raise OptionError(f"weights must be one of {', '.join(WEIGHTS)}, not {weights!r}")
    if weights == "dequantised":
        return None
    if stored is None:
        raise OptionError(
            "weights quantised without a file need random_type (--random-type), one of"
            f" {TYPE_NAMES}"
        )
    return stored


def _types(given: str | Sequence[str] | None) -> tuple[str, ...]:
    return tuple(given.split(",") if isinstance(given, str) else given or ())


def plan_config(
    block: type[Block],
    cfg: ModelConfig,
    mesh: Mesh,
    *,
    mlp_block: int = 32,
    link_gbps: str | Sequence[float] | None = None,
    progress: bool = False,
    fit: bool = False,
    weights: str = "dequantised",
    stored: StoredTypes | None = None,
    spec_type: str = "none",
    impl: str | None = None,
    **arguments: Any,
) -> PlannedModel:
    """The plan of a model over a mesh; `arguments` are those of `LLM`, of which a fit chooses the
    split, the place of the cache and more. `stored` has the types of the tensors of its file, or is
    that of random matrices.

    Link rates decide which device keeps pages of a host cache; where they are needed and not given
    they are measured, once, and `progress` says so.
    """
    keep = _kept(weights, stored)
    if isinstance(stored, GGMLQuantizationType):
        mlp_block = max(mlp_block, GGML_QUANT_SIZES[stored][0])
    if impl is not None and impl not in IMPLS:
        raise OptionError(f"impl must be one of {', '.join(IMPLS)}, not {impl!r}")
    able = all(map(has_kernels, mesh.jax_devices or ()))
    if impl == "kernel" and not able:
        raise OptionError("impl kernel needs Hopper GPUs and jax 0.11; drop it for jnp")
    if spec_type not in SPEC_TYPES:
        raise OptionError(f"spec_type must be one of {', '.join(SPEC_TYPES)}, not {spec_type!r}")
    if spec_type != "none":
        if fit:
            raise OptionError("a fit does not count a draft; drop spec_type, or drop the fit")
        cfg = cfg.with_draft()
    if fit:
        given: dict[str, Any] = {"mlp_block": mlp_block, "link_gbps": link_gbps, "weights": weights}
        given |= {"stored": stored, "progress": progress}
        found = fit_config(block, cfg, mesh, **given, **arguments)
        mesh, link_gbps = found.plan.mesh, None
        arguments |= found.arguments()
    options, dtype = _options(cfg, mesh, arguments)
    if spec_type != "none" and options.spec_draft_n_max >= options.ubatch:
        raise OptionError(
            f"--spec-draft-n-max is {options.spec_draft_n_max}; it must be less than"
            f" --ubatch-size/-ub {options.ubatch}"
        )
    if link_gbps is not None:
        mesh = with_links(mesh, link_gbps)
    elif options.kv_gpu_layers and len(mesh) > 1 and mesh.jax_devices is not None:
        measure = measure_aloud if progress else measure_link
        mesh = measured(mesh, _delivery(cfg, mesh, options), links_file(), measure)
    kernels = able if impl is None else impl == "kernel"
    model = plan_model(block, cfg, mesh, options, dtype, mlp_block, keep, kernels)
    _warn_of_residency(model.plan)
    return model


def _warn_of_residency(plan: Plan) -> None:
    """Say where less of a host cache stays on a device than was asked for."""
    for info, kept in zip(plan.mesh.devices, plan.residency.devices, strict=True):
        if kept.layers < kept.requested_layers - 1e-9:
            warnings.warn(
                f"device {info.label} keeps {format_layers(kept.layers)} ({kept.bytes} bytes) of"
                f" cache, where {format_layers(kept.requested_layers)} ({kept.requested_bytes}"
                " bytes) were asked for; the notes of the plan say why",
                stacklevel=3,
            )


def _options(cfg: ModelConfig, mesh: Mesh, arguments: dict[str, Any]) -> tuple[PlanOptions, str]:
    """`options_from` for a model. On accelerators groups have more pages by default, if those of
    the widest layer are no more than `COPY_BYTES`: each copy, and each program that folds one,
    takes the host's thread about as long as 16 MB take on a link. Pages leave a tail many at a
    time, if that does not make it large: as a few groups of one size, where single pages would be
    several small ones. Both count in the compute type, so that a fit, which chooses the cache's,
    has the same. And more groups of few bytes are copied ahead: the link goes on while the host
    makes one step's logits the next one's token."""
    options, dtype = options_from(mesh=mesh, ctx_train=cfg.ctx_train, **arguments)
    if any(d.platform == "cpu" for d in mesh.devices):
        return options, dtype
    untyped = {n: v for n, v in arguments.items() if not n.startswith("cache_type")}
    plain, _ = options_from(mesh=mesh, ctx_train=cfg.ctx_train, **untyped)
    large = LARGE_GROUP * plain.page * _widest(cfg, plain) <= COPY_BYTES
    if "group_pages" not in arguments and large:
        options = replace(options, group_pages=LARGE_GROUP)
    if "tail_pages" not in arguments:
        together = _tail_pages(cfg, replace(plain, group_pages=options.group_pages))
        options = replace(options, tail_pages=together)
    if "prefetch" not in arguments:
        ahead = AHEAD_BYTES // _group_bytes(cfg, options, _largest_share(mesh, options))
        options = replace(options, prefetch=max(options.prefetch, min(MOST_AHEAD, ahead)))
    return options, dtype


def _tail_pages(cfg: ModelConfig, options: PlanOptions) -> int:
    """The largest size of groups, less than that of the largest, of which a tail may have one."""
    position = sum(
        shape.kv_heads * position_bytes(shape, options)
        for shape in cfg.shape().layers
        if shape.has_pages
    )
    most = min(options.ctx // TAIL_PART, TAIL_BYTES // max(1, options.slots * position))
    fitting = [n for n in group_sizes(options.group_pages)[:-1] if n * options.page <= most]
    return max(fitting, default=1)


def _widest(cfg: ModelConfig, options: PlanOptions) -> int:
    """Bytes of a position of the layer that has the most."""
    return max(shape.kv_heads * position_bytes(shape, options) for shape in cfg.shape().layers)


def _delivery(cfg: ModelConfig, mesh: Mesh, options: PlanOptions) -> Delivery:
    """How full pages are sent: copies as large as an even share of the widest layer makes them,
    in a power of two so that models of about one size share a measurement."""
    even = 1 / len(mesh) if options.split_mode == "tensor" else 1.0
    size = _group_bytes(cfg, options, even)
    place = host_place(mesh.jax_devices or (), options.kv_pinned)
    return Delivery(place, 1 << (size - 1).bit_length(), options.prefetch)


def _group_bytes(cfg: ModelConfig, options: PlanOptions, share: float) -> int:
    """Of a share of a group of the widest layer, at least one."""
    return max(1, int(options.group_pages * options.page * _widest(cfg, options) * share))


def _largest_share(mesh: Mesh, options: PlanOptions) -> float:
    """Of a layer's heads that one device has, about."""
    if options.split_mode != "tensor":
        return 1.0
    shares = options.attn_split or options.tensor_split or (1.0,) * len(mesh)
    return max(shares) / sum(shares)


def plan_gguf(file: GGUFFile, mesh: Mesh, **arguments: Any) -> PlannedModel:
    """The plan of a GGUF file over a mesh, its tensors checked; `arguments` are those of `LLM`."""
    block, cfg, mlp_block = _model(file)
    stored = _stored_types(file)
    model = plan_config(block, cfg, mesh, mlp_block=mlp_block, stored=stored, **arguments)
    _warn_of_length(cfg, model.plan)
    GGUFSource(file, model.whole.cfg).check(slots(model.whole))
    return model


def fit_gguf(file: GGUFFile, mesh: Mesh, **arguments: Any) -> Fit:
    """The fastest split of a GGUF file over a mesh, with what was given; see `fit_config`."""
    block, cfg, mlp_block = _model(file)
    stored = _stored_types(file)
    try:
        found = fit_config(block, cfg, mesh, mlp_block=mlp_block, stored=stored, **arguments)
    except FitError as error:
        if arguments.get("weights", "dequantised") == "dequantised" and _has_blocks(stored):
            hint = "; --weights quantised keeps the file's types, which take less"
            raise FitError(f"{str(error).removesuffix('.')}{hint}.", error.largest_ctx) from None
        raise
    _warn_of_length(cfg, found.plan)
    own = {n: v for n, v in arguments.items() if n not in ("workload", "progress")}
    return replace(found, given=own)


def _warn_of_length(cfg: ModelConfig, plan: Plan) -> None:
    """Say where positions are more than a model knows."""
    ctx = plan.options.ctx
    if 0 < cfg.ctx_train < ctx:
        warnings.warn(
            f"the context (-c) of {ctx} positions is longer than the {cfg.ctx_train} that the "
            "model was trained for; expect poor text past those",
            stacklevel=3,
        )


def _has_blocks(stored: Mapping[str, GGMLQuantizationType]) -> bool:
    """Whether tensors of a file may stay quantised."""
    return any(kind in BLOCK_TYPES for kind in stored.values())


def _stored_types(file: GGUFFile) -> dict[str, GGMLQuantizationType]:
    return {name: info.type for name, info in file.tensors.items()}


def _model(file: GGUFFile) -> tuple[type[Block], ModelConfig, int]:
    """Block, sizes and columns of a block of the down projection's type."""
    kin = family(file.architecture)
    try:
        cfg = kin.configure(Metadata.of(file), file.tensors)
    except (TypeError, ValueError, ArithmeticError, LookupError) as error:
        raise ModelError(
            f"{file.path.name}: metadata of {file.architecture} cannot be understood "
            f"({cut(str(error))}); convert the model again"
        ) from error
    blocks = [
        GGML_QUANT_SIZES[info.type][0]
        for name, info in file.tensors.items()
        if name.endswith(("ffn_down.weight", "ffn_down_exps.weight"))
    ]
    return kin.block, cfg, max([32, *blocks])
