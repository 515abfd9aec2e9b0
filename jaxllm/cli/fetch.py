"""`jaxllm fetch`: download a model once and print where it lies."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from jaxllm.cli.options import add_command
from jaxllm.errors import HubError
from jaxllm.json_text import to_json

_EXAMPLES = """\
  jaxllm fetch smollm2-135m
  jaxllm fetch gemma3-270m --verify
  jaxllm fetch hf:owner/repo/file.gguf
"""


def add(subparsers: Any) -> None:
    """Declare the subcommand."""
    summary = "Download a named model, check it, and print its path"
    parser = add_command(subparsers, "fetch", run, summary, _EXAMPLES)
    parser.add_argument(
        "name", metavar="NAME", help="a name from `jaxllm models`, or hf:owner/repo/file.gguf"
    )
    again = "hash a kept file again, and fetch it anew if it is damaged"
    parser.add_argument("--verify", action="store_true", help=again)


def run(args: argparse.Namespace) -> int:
    """Fetch and print the path."""
    from jaxllm import hub

    if Path(args.name).is_file():
        raise HubError(
            f"{args.name!r} is a file, so there is nothing to fetch; give a name from `jaxllm "
            "models`, or hf:owner/repo/file.gguf"
        )
    if args.name.startswith("hf:"):
        path = hub.resolve(args.name)
    else:
        path = hub.fetch(args.name, verify=args.verify)
    if args.json:
        size = path.stat().st_size
        print(to_json({"name": args.name, "path": str(path), "bytes": size}))
    else:
        print(path)
    return 0
