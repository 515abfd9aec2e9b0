"""Options that decide the plan, and what the library calls them."""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

from sharding import BYTES_HELP, CACHE_BLOCKS, PlanOptions
from sharding.options import BATCH


class SplitOption(NamedTuple):
    """An option, the argument of `LLM.from_gguf` that it sets, its help, argparse's settings."""

    flags: tuple[str, ...]
    field: str
    help: str
    settings: dict[str, Any]


def _split_options() -> tuple[SplitOption, ...]:
    plan = PlanOptions
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    switch: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
    on: dict[str, Any] = {"action": "store_const", "const": True}
    types: dict[str, Any] = {"choices": tuple(CACHE_BLOCKS)}
    shares: dict[str, Any] = {"metavar": "SHARES"}
    option = SplitOption
    return (
        option(
            ("-sm", "--split-mode"),
            "split_mode",
            "one device, whole layers or every layer cut",
            {"choices": ("none", "layer", "tensor")},
        ),
        option(
            ("-ts", "--tensor-split"),
            "tensor_split",
            "a share of weights a device, as 3,1",
            shares,
        ),
        option(
            ("-as", "--attn-split"),
            "attn_split",
            "a share of attention heads and cache a device, as 2,1,0 (default as -ts); needs"
            " -sm tensor",
            shares,
        ),
        option(
            ("-nkvo", "--no-kv-offload"),
            "kv",
            "keep the KV cache in host memory and stream it",
            {"action": "store_const", "const": "host"},
        ),
        option(
            ("-ctk", "--cache-type-k"),
            "cache_type_k",
            "type of cached keys (default as --dtype)",
            types,
        ),
        option(
            ("-ctv", "--cache-type-v"),
            "cache_type_v",
            "type of cached values (default as --dtype)",
            types,
        ),
        option(
            ("-kvgl", "--kv-gpu-layers"),
            "kv_gpu_layers",
            "of a host cache, layers to keep on the devices, the slowest link first",
            number,
        ),
        option(
            ("-kvgld", "--kv-gpu-layers-draft"),
            "kv_gpu_layers_draft",
            "the same of a draft's cache (--spec-type); no other budget counts it",
            number,
        ),
        option(
            ("--kv-device-bytes",),
            "kv_device_bytes",
            f"of a host cache, what to keep on each device: {BYTES_HELP}, or auto: what is free",
            {"metavar": "BYTES"},
        ),
        option(
            ("--kv-pinned",),
            "kv_pinned",
            "a host cache in memory that devices read by themselves (default: where there is)",
            switch,
        ),
        option(
            ("--recurrent-state",),
            "recurrent_state",
            "where states of recurrent layers live between steps (default device)",
            {"choices": ("device", "host")},
        ),
        option(
            ("--link-gbps",),
            "link_gbps",
            "GB/s from host memory to each device, as 24.2,3.3 (default: measured if needed)",
            {"metavar": "RATES"},
        ),
        option(
            ("--kv-rotate",),
            "kv_rotate",
            "rotate what a quantised cache stores (default on)",
            switch,
        ),
        option(
            ("-c", "--ctx-size"),
            "ctx",
            "positions a sequence may have (default 2048, or the model's if that is less)",
            number,
        ),
        option(
            ("-np", "--parallel"),
            "parallel",
            "sequences that run at once (default 1)",
            number,
        ),
        option(
            ("-b", "--batch-size"),
            "batch",
            "tokens of prompts to compute, in whole chunks, between two steps of sequences that run"
            f" (default {BATCH}, or -ub if that is more)",
            number,
        ),
        option(
            ("-ub", "--ubatch-size"),
            "ubatch",
            "tokens of a prefill chunk, a power of two (default"
            f" {plan.ubatch}, or less with a smaller -b)",
            number,
        ),
        option(
            ("--dtype",),
            "dtype",
            "of weights and activations (default by the platform)",
            {"choices": ("float32", "bfloat16", "float16")},
        ),
        option(
            ("--weights",),
            "weights",
            "hold them in --dtype or as the file does (default dequantised)",
            {"choices": ("dequantised", "quantised")},
        ),
        option(
            ("--impl",),
            "impl",
            "attention in plain jnp, or by a kernel on Hopper GPUs (default: where it can)",
            {"choices": ("jnp", "kernel")},
        ),
        option(
            ("--spec-type",),
            "spec_type",
            "let the layer that predicts tokens ahead draft what --temp 0 generates (default none)",
            {"choices": ("none", "draft-mtp")},
        ),
        option(
            ("--spec-draft-n-max",),
            "spec_draft_n_max",
            f"tokens drafted at a time (default {plan.spec_draft_n_max})",
            number,
        ),
        option(
            ("--engine",),
            "engine",
            "one program, one a stage, or what fits (default auto)",
            {"choices": ("auto", "fused", "staged")},
        ),
        option(
            ("--rounding",),
            "rounding",
            f"how shares become heads (default {plan.rounding})",
            {"choices": ("nearest", "llama.cpp")},
        ),
        option(
            ("--dither",),
            "dither",
            "round over layers so that the mean follows shares",
            on,
        ),
        option(
            ("--kv-replicate",),
            "kv_replicate",
            "store KV heads more than once rather than leave devices without attention",
            on,
        ),
        option(
            ("--page",),
            "page",
            f"positions of a cache page, a power of two (default {plan.page})",
            number,
        ),
        option(
            ("--group-pages",),
            "group_pages",
            f"pages of the largest copy from host memory (default {plan.group_pages}, up to 64 on"
            " accelerators)",
            number,
        ),
        option(
            ("--tail-pages",),
            "tail_pages",
            f"full pages that leave the devices together (default {plan.tail_pages}, up to 16 on"
            " accelerators); fewer stay there",
            number,
        ),
        option(
            ("--prefetch", "--kv-prefetch"),
            "prefetch",
            f"copies in flight; 0: each only when needed (default {plan.prefetch}, up to 16 on"
            " accelerators)",
            number,
        ),
    )


SPLIT = _split_options()


def split_group(parser: argparse.ArgumentParser) -> Any:
    """The group of options that decide the plan, with --devices."""
    group = parser.add_argument_group("devices, split and cache")
    devices = "devices to use (default all); virtual on a CPU"
    group.add_argument("--devices", type=int, metavar="N", help=devices)
    return group


def add_split(parser: argparse.ArgumentParser) -> None:
    """Everything that decides the plan: devices, shares, cache, engine."""
    group = split_group(parser)
    for option in SPLIT:
        group.add_argument(*option.flags, dest=option.field, help=option.help, **option.settings)


def split_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `LLM.from_gguf` from the options of `add_split`."""
    given = {option.field: getattr(args, option.field) for option in SPLIT}
    return {name: value for name, value in given.items() if value is not None}
