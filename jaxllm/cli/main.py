"""The `jaxllm` command: dispatch, and what every error looks like.

Exit codes: 0; 2 for bad input, or output that cannot be written, said in one sentence on stderr;
130 after Ctrl-C; 141 when the reader of stdout went away, as a shell reports a program that SIGPIPE
ended.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from jaxllm import __version__, interrupts
from jaxllm.cli import (
    bench,
    completion,
    fetch,
    fit,
    generate,
    inspection,
    links,
    models,
    perplexity,
    plan,
)
from jaxllm.cli.entry import INTERRUPTED
from jaxllm.cli.options import Parser
from jaxllm.errors import JaxllmError, OptionError
from sharding.errors import ShardingError
from sharding.memory import exhausted

BAD_INPUT, BROKEN_PIPE = 2, 141
COMMANDS = (
    generate,
    plan,
    fit,
    inspection,
    fetch,
    models,
    links,
    bench,
    perplexity,
    completion,
)

_EXAMPLES = """examples:
  jaxllm generate "The capital of France is" -n 32
  jaxllm generate -m model.gguf --devices 3 -sm tensor -as 2,1,0 -nkvo "Once upon a time"
  jaxllm plan model.gguf --devices 2 -sm tensor -ts 3,1
  jaxllm fit model.gguf -c 32768
  jaxllm inspect model.gguf
  jaxllm bench -p 512 -n 64
"""


def make_parser() -> Parser:
    """The parser of the command and all subcommands."""
    parser = Parser(
        prog="jaxllm",
        description="Run GGUF language models in JAX over devices that are not alike.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("--version", action="version", version=f"jaxllm {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", title="commands")
    for command in COMMANDS:
        command.add(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: the process's own) and return its exit code."""
    if sys.stdout is None:
        return _refuse("standard output is closed; redirect it to a file, or to /dev/null")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        with interrupts.kept():
            code = _dispatch(argv)
            sys.stdout.flush()  # here, where a write that fails is still an exception to catch
            return code
    except (JaxllmError, ShardingError) as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        _say("")
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return BROKEN_PIPE
    except OSError as error:
        if error.filename is not None:  # not of writing to what is already open
            raise
        _drop_output()
        return _refuse(f"cannot write to standard output: {error.strerror or error}")
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not exhausted(error):
            raise
        return _refuse(f"there is not enough memory for this; ask for less ({error})")


def _dispatch(argv: Sequence[str] | None) -> int:
    parser = make_parser()
    completion.complete(parser)
    try:
        args, unknown = parser.parse_known_args(argv)
    except SystemExit as stop:  # after --help or --version; usage errors are exceptions
        return int(stop.code or 0)
    if unknown:
        command = getattr(args, "prog", parser.prog)
        raise OptionError(f"there is no {' '.join(unknown)} here; see {command} --help")
    if not hasattr(args, "run"):
        parser.print_help()
        return 0
    return args.run(args)


def _refuse(message: str) -> int:
    _say(f"jaxllm: error: {' '.join(message.split())}")
    return BAD_INPUT


def _say(line: str) -> None:
    with suppress(OSError):  # stderr may be gone as well
        print(line, file=sys.stderr, flush=True)


def _drop_output() -> None:
    """Let what is still buffered go nowhere: it would raise again when the interpreter ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
