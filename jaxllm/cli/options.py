"""Options that several subcommands share, and what the library calls them.

Names are llama.cpp's where it has the option. Defaults are the library's own: an option that is
not given is not passed on.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from jaxllm.errors import OptionError
from sharding import Mesh
from sharding.machine import read_machine

if TYPE_CHECKING:
    from jaxllm.engine.sampling import SamplingParams

DEFAULT_MODEL = "smollm2-135m"
MODEL_HELP = "path of a .gguf file, a name from `jaxllm models`, or hf:owner/repo/file.gguf"


class Parser(argparse.ArgumentParser):
    """Usage errors are `OptionError`s like any other bad input; options are never abbreviated."""

    def __init__(self, **settings: Any):
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        settings.setdefault("allow_abbrev", False)
        super().__init__(**settings)
        # No option begins with a digit: what looks like one is a value, for its reader to judge.
        self._negative_number_matcher = re.compile(r"-\.?\d")

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
    parser.set_defaults(run=run, prog=parser.prog)
    parser.add_argument("--json", action="store_true", help="print one JSON object, for machines")
    return parser


def add_model(parser: argparse._ActionsContainer) -> None:  # pyright: ignore[reportPrivateUsage]
    """-m, with the default model."""
    parser.add_argument(
        "-m",
        "--model",
        default=DEFAULT_MODEL,
        metavar="MODEL",
        help=f"{MODEL_HELP} (default {DEFAULT_MODEL})",
    )


def add_one_model(parser: argparse.ArgumentParser) -> None:
    """MODEL by its place or behind -m, as in other commands; `model_of` tells which."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    again = "MODEL, as other commands take it"
    parser.add_argument("-m", "--model", dest="model_option", metavar="MODEL", help=again)


def model_of(args: argparse.Namespace) -> str:
    """The one model of `add_one_model`."""
    given = [each for each in (args.model, args.model_option) if each is not None]
    if len(given) != 1:
        wrong = f"two models, {' and '.join(given)}" if given else "no MODEL"
        raise OptionError(f"{wrong}; name one, by its place or with -m; see {args.prog} --help")
    return given[0]


def add_machine(parser: argparse.ArgumentParser) -> None:
    """--devices-file, beside --devices."""
    there = "plan for the machine of a TOML file, which need not be here; see docs/fit.md"
    parser.add_argument("--devices-file", metavar="FILE", help=there)


def add_again(parser: argparse.ArgumentParser) -> None:
    """--again, of commands that keep what they measure."""
    parser.add_argument("--again", action="store_true", help="measure anew what is already known")


def mesh_of(args: argparse.Namespace) -> Mesh:
    """The mesh of --devices-file, or of the devices that are here."""
    if args.devices_file is None:
        from jaxllm.llm import open_mesh

        return open_mesh(args.devices)
    if args.devices is not None:
        raise OptionError("--devices does not go with --devices-file, which names its devices")
    return read_machine(args.devices_file)


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


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """What the options of `add_sampling` ask for; errors name the option."""
    from jaxllm.engine.sampling import SamplingParams

    given = {option.field: getattr(args, option.field) for option in SAMPLING}
    if given["logprobs"] is not None and not args.json:
        raise OptionError("--logprobs needs --json, which prints them")
    if given["seed"] == -1:
        given["seed"] = None
    given["stop"] = tuple(args.stop) if args.stop else None
    given["ignore_eos"] = args.ignore_eos or None
    try:
        return SamplingParams(**{k: value for k, value in given.items() if value is not None})
    except OptionError as error:
        field, _, rest = str(error).partition(" ")
        flags = {option.field: "/".join(reversed(option.flags)) for option in SAMPLING}
        raise OptionError(f"{flags.get(field, field)} {rest}") from error
