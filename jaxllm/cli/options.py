"""Options that several subcommands share, and what the library calls them.

Names are llama.cpp's where it has the option. Defaults are the library's own: an option that is
not given is not passed on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from jaxllm.errors import OptionError
from sharding import BYTES_HELP, CACHE_BLOCKS, Mesh, PlanOptions
from sharding.machine import read_machine

DEFAULT_MODEL = "smollm2-135m"
MODEL_HELP = "path of a .gguf file, a name from `jaxllm models`, or hf:owner/repo/file.gguf"


class Parser(argparse.ArgumentParser):
    """Usage errors are `OptionError`s like any other bad input; options are never abbreviated."""

    def __init__(self, **settings: Any):
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        settings.setdefault("allow_abbrev", False)
        super().__init__(**settings)

    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{message}; see {self.prog} --help")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Help and version; argparse itself would drop an error of writing them."""
        (file or sys.stdout).write(message)


Subparsers = argparse._SubParsersAction  # pyright: ignore[reportPrivateUsage]
Run = Callable[[argparse.Namespace], int]


def add_command(subparsers: Any, name: str, run: Run, summary: str, examples: str) -> Parser:
    """Declare a subcommand; `examples` are shown under its options. --json is added to each."""
    parser = subparsers.add_parser(
        name, help=summary, description=f"{summary}.", epilog=f"examples:\n{examples}"
    )
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="print one JSON object, for machines")
    return parser


def add_model(parser: argparse.ArgumentParser) -> None:
    """-m, with the default model."""
    parser.add_argument(
        "-m",
        "--model",
        default=DEFAULT_MODEL,
        metavar="MODEL",
        help=f"{MODEL_HELP} (default {DEFAULT_MODEL})",
    )


def add_machine(parser: argparse.ArgumentParser) -> None:
    """--devices-file, beside --devices."""
    there = "plan for the machine of a TOML file, which need not be here; see docs/fit.md"
    parser.add_argument("--devices-file", metavar="FILE", help=there)


def mesh_of(args: argparse.Namespace) -> Mesh:
    """The mesh of --devices-file, or of the devices that are here."""
    if args.devices_file is None:
        from jaxllm.llm import open_mesh

        return open_mesh(args.devices)
    if args.devices is not None:
        raise OptionError("--devices does not go with --devices-file, which names its devices")
    return read_machine(args.devices_file)


def add_split(parser: argparse.ArgumentParser) -> None:
    """Everything that decides the plan: devices, shares, cache, engine."""
    plan = PlanOptions
    types = tuple(CACHE_BLOCKS)
    group = parser.add_argument_group("devices, split and cache")
    add = group.add_argument
    add("--devices", type=int, metavar="N", help="devices to use (default all); virtual on a CPU")
    modes = ("none", "layer", "tensor")
    add("-sm", "--split-mode", choices=modes, help="one device, whole layers or every layer cut")
    add("-ts", "--tensor-split", metavar="SHARES", help="a share of weights a device, as 3,1")
    shares = "a share of attention heads and cache a device, as 2,1,0 (default as -ts); needs "
    shares += "-sm tensor"
    add("-as", "--attn-split", metavar="SHARES", help=shares)
    host = "keep the KV cache in host memory and stream it"
    add("-nkvo", "--no-kv-offload", action="store_true", help=host)
    add("-ctk", "--cache-type-k", choices=types, help="type of cached keys (default as --dtype)")
    add("-ctv", "--cache-type-v", choices=types, help="type of cached values (default as --dtype)")
    kept = "of a host cache, layers to keep on the devices, the slowest link first"
    add("-kvgl", "--kv-gpu-layers", type=int, metavar="N", help=kept)
    room = f"of a host cache, what to keep on each device: {BYTES_HELP}, or auto: what is free"
    add("--kv-device-bytes", metavar="BYTES", help=room)
    pinned = "a host cache in memory that devices read by themselves (default: where there is)"
    add("--kv-pinned", action=argparse.BooleanOptionalAction, help=pinned)
    rates = "GB/s from host memory to each device, as 24.2,3.3 (default: measured if needed)"
    add("--link-gbps", metavar="RATES", help=rates)
    turn = "rotate what a quantised cache stores (default on)"
    add("--kv-rotate", action=argparse.BooleanOptionalAction, help=turn)
    ctx = "positions a sequence may have (default 2048, or the model's if that is less)"
    add("-c", "--ctx-size", type=int, metavar="N", help=ctx)
    add("-np", "--parallel", type=int, metavar="N", help="sequences that run at once (default 1)")
    chunk = f"tokens of a prefill chunk, a power of two (default {plan.ubatch})"
    add("-ub", "--ubatch-size", type=int, metavar="N", help=chunk)
    dtypes = ("float32", "bfloat16", "float16")
    add("--dtype", choices=dtypes, help="of weights and activations (default by the platform)")
    held = "hold them in --dtype or as the file does (default dequantised)"
    add("--weights", choices=("dequantised", "quantised"), help=held)
    engines = ("auto", "fused", "staged")
    add("--engine", choices=engines, help="one program, one a stage, or what fits (default auto)")
    cuts = ("nearest", "llama.cpp")
    add("--rounding", choices=cuts, help=f"how shares become heads (default {plan.rounding})")
    add("--dither", action="store_true", help="round over layers so that the mean follows shares")
    copies = "store KV heads more than once rather than leave devices without attention"
    add("--kv-replicate", action="store_true", help=copies)
    page = f"positions of a cache page, a power of two (default {plan.page})"
    add("--page", type=int, metavar="N", help=page)
    pages = f"pages of the largest copy from host memory (default {plan.group_pages})"
    add("--group-pages", type=int, metavar="N", help=pages)
    ahead = f"copies in flight; 0: each only when needed (default {plan.prefetch})"
    add("--prefetch", type=int, metavar="N", help=ahead)


def split_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `LLM.from_gguf` from the options of `add_split`."""
    given = {
        "split_mode": args.split_mode,
        "tensor_split": args.tensor_split,
        "attn_split": args.attn_split,
        "kv": "host" if args.no_kv_offload else None,
        "cache_type_k": args.cache_type_k,
        "cache_type_v": args.cache_type_v,
        "kv_gpu_layers": args.kv_gpu_layers,
        "kv_device_bytes": args.kv_device_bytes,
        "kv_pinned": args.kv_pinned,
        "link_gbps": args.link_gbps,
        "kv_rotate": args.kv_rotate,
        "ctx": args.ctx_size,
        "parallel": args.parallel,
        "ubatch": args.ubatch_size,
        "dtype": args.dtype,
        "weights": args.weights,
        "engine": args.engine,
        "rounding": args.rounding,
        "dither": args.dither or None,
        "kv_replicate": args.kv_replicate or None,
        "page": args.page,
        "group_pages": args.group_pages,
        "prefetch": args.prefetch,
    }
    return {name: value for name, value in given.items() if value is not None}


class SamplingOption(NamedTuple):
    """An option, the field of `SamplingParams` that it sets, and that field's default."""

    flags: tuple[str, ...]
    field: str
    kind: Callable[[str], Any]
    default: Any
    help: str


def _seed(text: str) -> int:
    value = int(text)
    if value < -1:
        raise ValueError(text)
    return value


_seed.__name__ = "seed"  # argparse names it in its message

SAMPLING = (
    SamplingOption(("-n", "--n-predict"), "max_tokens", int, 128, "tokens to generate at most"),
    SamplingOption(("-s", "--seed"), "seed", _seed, None, "-1: another each time"),
    SamplingOption(("--temp",), "temperature", float, 0.8, "0: always the likeliest token"),
    SamplingOption(("--top-k",), "top_k", int, 40, "draw among the k likeliest; 0: all"),
    SamplingOption(("--top-p",), "top_p", float, 0.95, "draw among the likeliest of this sum"),
    SamplingOption(("--min-p",), "min_p", float, 0.05, "least probability, of the likeliest's"),
    SamplingOption(("--repeat-penalty",), "repeat_penalty", float, 1.0, "1: none"),
    SamplingOption(("--repeat-last-n",), "repeat_last_n", int, 64, "tokens penalised; -1: all"),
    SamplingOption(("--presence-penalty",), "presence_penalty", float, 0.0, "0: none"),
    SamplingOption(("--frequency-penalty",), "frequency_penalty", float, 0.0, "0: none"),
    SamplingOption(("--logprobs",), "logprobs", int, None, "keep as many likeliest tokens; --json"),
)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """How tokens are drawn."""
    group = parser.add_argument_group("sampling")
    for option in SAMPLING:
        default = "" if option.default is None else f" (default {option.default})"
        letter = {int: "N", float: "X"}.get(option.kind, "SEED")  # type: ignore[call-overload]
        group.add_argument(
            *option.flags,
            dest=option.field,
            type=option.kind,
            metavar=letter,
            help=f"{option.help}{default}",
        )
    stop = "text that ends the completion; may be given several times"
    group.add_argument("--stop", action="append", metavar="TEXT", help=stop)
    group.add_argument("--ignore-eos", action="store_true", help="go on after the end token")


def sampling_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `SamplingParams` from the options of `add_sampling`."""
    given = {option.field: getattr(args, option.field) for option in SAMPLING}
    if given["seed"] == -1:
        given["seed"] = None
    given["stop"] = tuple(args.stop) if args.stop else None
    given["ignore_eos"] = args.ignore_eos or None
    return {name: value for name, value in given.items() if value is not None}
