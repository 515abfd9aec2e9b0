"""What a user may ask of a plan. Every bad value is an error that names the command-line option."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from numbers import Integral
from typing import Literal

from sharding.cache_types import CACHE_BLOCKS, CacheType
from sharding.errors import PlanError
from sharding.shapes import Context
from sharding.shares import parse_shares
from sharding.units import BYTES_HELP, parse_bytes

SplitMode = Literal["none", "layer", "tensor"]
EngineName = Literal["fused", "staged"]

_CHOICES = {
    "split_mode": ("--split-mode/-sm", ("none", "layer", "tensor")),
    "kv": ("--no-kv-offload/-nkvo", ("device", "host")),
    "recurrent_state": ("--recurrent-state", ("device", "host")),
    "cache_type_k": ("--cache-type-k/-ctk", tuple(CACHE_BLOCKS)),
    "cache_type_v": ("--cache-type-v/-ctv", tuple(CACHE_BLOCKS)),
    "engine": ("--engine", ("auto", "fused", "staged")),
    "rounding": ("--rounding", ("nearest", "llama.cpp")),
}
_COUNTS = {
    "ctx": "--ctx-size/-c",
    "slots": "--parallel/-np",
    "page": "--page",
    "group_pages": "--group-pages",
    "tail_pages": "--tail-pages",
    "prefetch": "--prefetch",
    "ubatch": "--ubatch-size/-ub",
    "batch": "--batch-size/-b",
    "spec_draft_n_max": "--spec-draft-n-max",
    "itemsize": "--dtype",
}
_SWITCHES = {"dither": "--dither", "kv_replicate": "--kv-replicate"}

MOST = 2**31 - 1  # positions and sizes are numbers of 32 bits
BATCH = 2048
TENSOR_SPLIT = "--tensor-split/-ts"
ATTN_SPLIT = "--attn-split/-as"
KV_GPU_LAYERS = "--kv-gpu-layers/-kvgl"
KV_GPU_LAYERS_DRAFT = "--kv-gpu-layers-draft/-kvgld"
KV_DEVICE_BYTES = "--kv-device-bytes"


@dataclass(frozen=True)
class Budget:
    """What was asked to stay on devices of one context's host cache: layers' worth of it, by an
    option of that name, or bytes on each device."""

    context: Context
    option: str
    layers: int | None
    bytes: int | str | None = None


@dataclass(frozen=True)
class PlanOptions:
    """The knobs of a plan.

    Attributes:
        split_mode: all on the first device, whole layers a device, or every layer over devices.
        tensor_split: weight shares, one a device.
        attn_split: shares of attention heads and their cache; unset follows `tensor_split`.
        kv: where full pages of the cache live.
        kv_gpu_layers: layers' worth of a host cache that stay on devices.
        kv_gpu_layers_draft: the same of the cache of a draft, which no other budget counts.
        kv_pinned: keep a host cache in pinned memory, which devices read by themselves; None is on
            where all of them have it.
        kv_device_bytes: bytes of a host cache that stay on each device, a number or text such as
            "1.5G" (which becomes the number); "auto" is what is free there beside everything else,
            less a reserve.
        recurrent_state: where states of recurrent layers live between steps, of all slots.
        cache_type_k, cache_type_v: element types of the cache.
        kv_rotate: rotate rows before they are quantised, so that none of their values is far larger
            than the others; None is on.
        engine: one program ("fused"), one a device and stage ("staged"), or whichever fits.
        rounding: largest remainder, or llama.cpp's cuts.
        dither: round attention over layers so that the model-wide mean follows the request.
        kv_replicate: store KV heads more than once rather than leave devices without attention.
        ctx: positions a slot.
        slots: sequences in the batch.
        page: positions of a page, a power of two.
        group_pages: pages of the largest copy from host memory, a power of two.
        tail_pages: full pages that leave a tail together, a power of two; fewer stay on the device.
        prefetch: groups in flight or in use at a time; 0 or 1 copies one only when it is needed.
        ubatch: positions of a prefill chunk, a power of two.
        batch: tokens of prompts that are computed, in whole chunks, between two steps of sequences
            that run; at least `ubatch`. None is 2048, or a larger `ubatch`; `prompt_batch` tells.
        spec_draft_n_max: tokens that a draft predicts before they are verified; 0 for none.
        itemsize: bytes of the compute type.
    """

    split_mode: SplitMode = "layer"
    tensor_split: tuple[float, ...] | None = None
    attn_split: tuple[float, ...] | None = None
    kv: Literal["device", "host"] = "device"
    kv_gpu_layers: int | None = None
    kv_gpu_layers_draft: int | None = None
    kv_device_bytes: int | str | None = None
    kv_pinned: bool | None = None
    recurrent_state: Literal["device", "host"] = "device"
    cache_type_k: CacheType = "f32"
    cache_type_v: CacheType = "f32"
    kv_rotate: bool | None = None
    engine: Literal["auto", "fused", "staged"] = "auto"
    rounding: Literal["nearest", "llama.cpp"] = "nearest"
    dither: bool = False
    kv_replicate: bool = False
    ctx: int = 2048
    slots: int = 1
    page: int = 256
    group_pages: int = 16
    tail_pages: int = 1
    prefetch: int = 4
    ubatch: int = 512
    batch: int | None = None
    spec_draft_n_max: int = 3
    itemsize: int = 4

    def __post_init__(self) -> None:
        for field, (argument, choices) in _CHOICES.items():
            value = getattr(self, field)
            if value not in choices:
                raise PlanError(f"{argument} is {value!r}; it must be one of {', '.join(choices)}.")
        for field, argument in _COUNTS.items():
            value = getattr(self, field)
            if field == "batch" and value is None:
                continue
            least = 0 if field in ("prefetch", "spec_draft_n_max") else 1
            if not _natural(value) or value < least:
                raise PlanError(
                    f"{argument} is {value!r}; it must be a whole number of at least {least}."
                )
            if value > MOST:
                raise PlanError(f"{argument} is {value}; it must be at most {MOST}.")
            object.__setattr__(self, field, int(value))  # numpy's integers are taken, too
        for field, argument in _SWITCHES.items():
            if not isinstance(getattr(self, field), bool):
                raise PlanError(f"{argument} is {getattr(self, field)!r}; it is on or off.")
        for field, argument in (("kv_rotate", "--kv-rotate"), ("kv_pinned", "--kv-pinned")):
            if not isinstance(getattr(self, field), bool | None):
                raise PlanError(f"{argument} is {getattr(self, field)!r}; it is on, off or None.")
        for field in ("page", "group_pages", "tail_pages", "ubatch"):
            value = getattr(self, field)
            if value & (value - 1):
                raise PlanError(f"{_COUNTS[field]} is {value}; it must be a power of two.")
        if self.prompt_batch < self.ubatch:
            raise PlanError(
                f"{_COUNTS['batch']} is {self.batch}; it must be at least {_COUNTS['ubatch']}"
                f" {self.ubatch}."
            )
        self._check_shares()
        self._check_residency()
        if self.dither and self.rounding == "llama.cpp":
            raise PlanError("--dither does not go with --rounding llama.cpp; drop one of them.")
        if self.engine == "fused" and self.kv == "host":
            raise PlanError(
                "--engine fused keeps the cache on the device; drop it to use --no-kv-offload/-nkvo"
                " (the staged engine streams)."
            )
        if self.engine == "fused" and self.recurrent_state == "host":
            raise PlanError(
                "--engine fused keeps recurrent states on the device; drop it to use"
                " --recurrent-state host."
            )

    def _check_shares(self) -> None:
        for field, argument in (("tensor_split", TENSOR_SPLIT), ("attn_split", ATTN_SPLIT)):
            value = getattr(self, field)
            if value is None:
                continue
            if isinstance(value, str):
                count = value.count(",") + 1
            else:
                count = len(value) if hasattr(value, "__len__") else 0
            object.__setattr__(self, field, parse_shares(value, count, argument))
        if self.tensor_split is not None and self.split_mode == "none":
            raise PlanError(f"{TENSOR_SPLIT} does not go with -sm none; use -sm layer or tensor.")
        if self.attn_split is not None and self.split_mode != "tensor":
            raise PlanError(f"{ATTN_SPLIT} does not go with -sm {self.split_mode}; use -sm tensor.")

    @property
    def prompt_batch(self) -> int:
        """`batch`, or what it is by default."""
        return max(BATCH, self.ubatch) if self.batch is None else self.batch

    @property
    def budgets(self) -> tuple[Budget, Budget]:
        """Of each context, in the order in which they are spent."""
        return (
            Budget("draft", KV_GPU_LAYERS_DRAFT, self.kv_gpu_layers_draft),
            Budget("main", KV_GPU_LAYERS, self.kv_gpu_layers, self.kv_device_bytes),
        )

    def _check_residency(self) -> None:
        layers, size = self.kv_gpu_layers, _read_bytes(self.kv_device_bytes)
        object.__setattr__(self, "kv_device_bytes", size)
        both = ("kv_gpu_layers", KV_GPU_LAYERS), ("kv_gpu_layers_draft", KV_GPU_LAYERS_DRAFT)
        for field, name in both:
            value = getattr(self, field)
            if value is None:
                continue
            if not _natural(value):
                raise PlanError(f"{name} is {value!r}; it must be a whole number of at least 0.")
            object.__setattr__(self, field, int(value))
        if size is not None and size != "auto" and not _natural(size):
            raise PlanError(f"{KV_DEVICE_BYTES} is {size!r}; give {BYTES_HELP}, or auto.")
        if layers is not None and size is not None:
            raise PlanError(
                f"{KV_GPU_LAYERS} does not go with {KV_DEVICE_BYTES}; give one of them."
            )
        on_devices = self.kv == self.recurrent_state == "device"
        if on_devices and self.kv_pinned is not None:
            raise PlanError(
                "--kv-pinned says where a host cache lives; give --no-kv-offload/-nkvo with it, or"
                " drop it."
            )
        given = [b.option for b in reversed(self.budgets) if b.layers is not None]
        given += [KV_DEVICE_BYTES] if size is not None else []
        if self.kv == "device" and given:
            raise PlanError(
                f"{given[0]} says how much of a host cache stays on devices; give"
                " --no-kv-offload/-nkvo with it, or drop it."
            )


def _read_bytes(value: object) -> object:
    """The number that a text of bytes or a number of numpy stands for; the rest as it is."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, str) and value != "auto":
        with suppress(ValueError):
            return parse_bytes(value)
    return value


def _natural(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0
