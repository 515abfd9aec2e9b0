"""`jaxllm models`: the models that have a name."""

from __future__ import annotations

import argparse
from typing import Any

from jaxllm.cli.options import DEFAULT_MODEL, add_command
from jaxllm.json_text import to_json
from sharding import format_bytes

_EXAMPLES = """\
  jaxllm models
  jaxllm models --json
"""


def add(subparsers: Any) -> None:
    """Declare the subcommand."""
    add_command(subparsers, "models", run, "List the models that have a name", _EXAMPLES)


def run(args: argparse.Namespace) -> int:
    """Print one line a model; nothing is downloaded."""
    from jaxllm import hub

    rows = [
        {
            "name": model.name,
            "bytes": model.size,
            "licence": model.licence,
            "description": model.description,
            "fetched": (hub.cache_folder() / f"{model.name}.gguf").is_file(),
            "default": model.name == DEFAULT_MODEL,
        }
        for model in hub.MODELS.values()
    ]
    if args.json:
        print(to_json({"folder": str(hub.cache_folder()), "models": rows}))
        return 0
    for row in rows:
        marks = ", ".join(mark for mark in ("default", "fetched") if row[mark])
        print(
            f"{row['name']:<14}{format_bytes(row['bytes']):>11}  {row['licence']:<20}"
            f"{row['description']}{f' [{marks}]' if marks else ''}"
        )
    return 0
