"""`jaxllm inspect`: what a GGUF file holds, from its header alone.

Any architecture can be looked at, also one that this package does not run.
"""

from __future__ import annotations

import argparse
from collections import Counter
from typing import TYPE_CHECKING, Any

from jaxllm.cli.options import add_command, add_one_model, model_of
from jaxllm.json_text import to_json
from sharding import format_bytes

if TYPE_CHECKING:
    from jaxllm.gguf.metadata import Metadata
    from jaxllm.gguf.reader import GGUFFile

_EXAMPLES = """\
  jaxllm inspect model.gguf
  jaxllm inspect smollm2-135m --json
"""
_SIZES = {
    "layers": "block_count",
    "width": "embedding_length",
    "query_heads": "attention.head_count",
    "kv_heads": "attention.head_count_kv",
    "key_dim": "attention.key_length",
    "value_dim": "attention.value_length",
    "mlp_columns": "feed_forward_length",
    "sliding_window": "attention.sliding_window",
    "experts": "expert_count",
    "context": "context_length",
    "rope_base": "rope.freq_base",
    "rope_scaling": "rope.scaling.type",
}


def add(subparsers: Any) -> None:
    """Declare the subcommand."""
    summary = "Show a model's architecture, heads, layers, tensor types, tokenizer and bytes"
    parser = add_command(subparsers, "inspect", run, summary, _EXAMPLES)
    add_one_model(parser)


def run(args: argparse.Namespace) -> int:
    """Print the description as a table or JSON."""
    from jaxllm import hub
    from jaxllm.gguf.reader import open_gguf

    found = describe(open_gguf(hub.resolve(model_of(args))))
    print(to_json(found) if args.json else to_text(found))
    return 0


def describe(file: GGUFFile) -> dict[str, Any]:
    """What the header says, as plain data; absent sizes are left out, layers that differ give a
    list with one entry a layer."""
    from jaxllm.gguf.metadata import Metadata

    meta = Metadata.of(file)
    counts: Counter[str] = Counter()
    elements: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for info in file.tensors.values():
        counts[info.type.name] += 1
        elements[info.type.name] += info.rows * info.cols
        nbytes[info.type.name] += info.nbytes
    return {
        "name": str(meta.values.get("general.name", "")),
        "architecture": file.architecture,
        "files": [str(each) for each in file.files],
        "bytes": file.nbytes,
        "gguf_version": file.version,
        "parameters": elements.total(),
        "sizes": _sizes(meta),
        "tokenizer": _tokenizer(meta),
        "tensor_types": {
            kind: {"tensors": n, "elements": elements[kind], "bytes": nbytes[kind]}
            for kind, n in counts.most_common()
        },
    }


def _sizes(meta: Metadata) -> dict[str, Any]:
    sizes = {name: _plain(meta.get(key)) for name, key in _SIZES.items()}
    width, heads = sizes["width"], sizes["query_heads"]
    if isinstance(width, int) and isinstance(heads, int) and heads > 0:
        for name in ("key_dim", "value_dim"):
            sizes[name] = sizes[name] or width // heads
    if sizes["kv_heads"] is None:
        sizes["kv_heads"] = heads
    return {name: value for name, value in sizes.items() if value is not None}


def _plain(value: Any) -> Any:
    """Numpy arrays as lists, or as one number where all layers have the same."""
    values = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(values, list) and len(set(values)) == 1:
        return values[0]
    return values


def _tokenizer(meta: Metadata) -> dict[str, Any] | None:
    values = meta.values
    if "tokenizer.ggml.model" not in values:
        return None
    return {
        "kind": values["tokenizer.ggml.model"],
        "pre": values.get("tokenizer.ggml.pre"),
        "tokens": len(values.get("tokenizer.ggml.tokens", ())),
        "bos": values.get("tokenizer.ggml.bos_token_id"),
        "eos": values.get("tokenizer.ggml.eos_token_id"),
        "chat_template": "tokenizer.chat_template" in values,
    }


def to_text(found: dict[str, Any]) -> str:
    """The description for a person."""
    tokenizer = found["tokenizer"]
    if tokenizer is None:
        words = "none"
    else:
        pre = f", {tokenizer['pre']}" if tokenizer["pre"] else ""
        template = "with" if tokenizer["chat_template"] else "without"
        words = (
            f"{tokenizer['kind']}{pre}, {tokenizer['tokens']} tokens, {template} a chat template"
        )
    lines = [
        ("name", found["name"] or "-"),
        ("architecture", found["architecture"]),
        ("file", ", ".join(found["files"])),
        ("bytes", f"{found['bytes']} ({format_bytes(found['bytes'])})"),
        ("parameters", f"{found['parameters']:,}"),
        *((name.replace("_", " "), _short(value)) for name, value in found["sizes"].items()),
        ("tokenizer", words),
    ]
    text = [f"{name:<16}{value}" for name, value in lines]
    text.append(f"{'tensor type':<16}{'tensors':>8}{'elements':>16}{'bytes':>16}")
    for kind, row in found["tensor_types"].items():
        text.append(f"{kind:<16}{row['tensors']:>8}{row['elements']:>16,}{row['bytes']:>16,}")
    return "\n".join(text)


def _short(value: Any) -> str:
    if isinstance(value, list):
        return f"{min(value)} to {max(value)}, by layer"
    return f"{value:g}" if isinstance(value, float) else str(value)
