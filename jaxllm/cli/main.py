"""The `jaxllm` command: dispatch, and what every error looks like.

Exit codes: 0; 2 for bad input, said in one sentence on stderr; 130 after Ctrl-C; 141 when the
reader of stdout went away, as a shell reports a program that SIGPIPE ended.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

from jaxllm import __version__
from jaxllm.cli import bench, fetch, fit, generate, inspection, links, models, perplexity, plan
from jaxllm.cli.options import Parser
from jaxllm.errors import JaxllmError
from sharding.errors import ShardingError

BAD_INPUT, INTERRUPTED, BROKEN_PIPE = 2, 130, 141

_EXAMPLES = """examples:
  jaxllm generate "The capital of France is" -n 32
  jaxllm generate -m model.gguf --devices 3 -sm tensor -as 2,1,0 -nkvo "Once upon a time"
  jaxllm plan model.gguf --devices 2 -sm tensor -ts 3,1
  jaxllm inspect model.gguf
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
    for command in (generate, plan, fit, inspection, fetch, models, links, bench, perplexity):
        command.add(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: the process's own) and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        parser = make_parser()
        args = parser.parse_args(argv)
        if not hasattr(args, "run"):
            parser.print_help()
            return 0
        code = args.run(args)
        sys.stdout.flush()  # here, where a closed pipe is still an exception to catch
        return code
    except (JaxllmError, ShardingError) as error:
        print(f"jaxllm: error: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # What is still buffered would raise again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


if __name__ == "__main__":
    sys.exit(main())
