"""`jaxllm completion`: what makes a shell complete commands and options, through argcomplete.

The script calls `jaxllm` itself with _ARGCOMPLETE set; `complete` then answers from the parser.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from jaxllm.cli.options import add_command
from jaxllm.errors import OptionError
from jaxllm.json_text import to_json

SHELLS = ("bash", "zsh", "fish")
_EXAMPLES = """\
  eval "$(jaxllm completion bash)"
  eval "$(jaxllm completion zsh)"
  jaxllm completion fish | source
"""


def add(subparsers: Any) -> None:
    """Declare the subcommand."""
    summary = "Print a script by which a shell completes commands and options"
    parser = add_command(subparsers, "completion", run, summary, _EXAMPLES)
    parser.add_argument("shell", choices=SHELLS, help="which shell the script is for")


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    try:
        from argcomplete.shell_integration import shellcode
    except ImportError as error:
        raise OptionError(
            "completion needs argcomplete; install it with pip install 'jaxllm[completion]'"
        ) from error
    script = shellcode(["jaxllm"], shell=args.shell)
    print(to_json({"shell": args.shell, "script": script}) if args.json else script)
    return 0


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer a shell that asks for completions, and end the process; nothing for any other."""
    if "_ARGCOMPLETE" not in os.environ:
        return
    import argcomplete

    argcomplete.autocomplete(parser)
