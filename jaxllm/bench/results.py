"""Rows of a bench: one for every model, set of options, test and side; plain data in files.

A row has what was run (`SETTINGS`), the test and its side, rates in tokens a second of all
sequences together (median, mean, deviation, min, max, samples), what they are held against
(predicted, limit, share of it), bytes of the plan, seconds of warm-up, the machine's rates, and an
error where nothing was measured. `given` names the settings that were asked for.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from jaxllm.bench.measure import Measured
from jaxllm.errors import OptionError, shown
from jaxllm.json_text import to_json

Row = dict[str, Any]
SETTINGS = (
    "model",
    "dtype",
    "weights",
    "random_type",
    "impl",
    "engine",
    "devices",
    "split_mode",
    "tensor_split",
    "attn_split",
    "kv",
    "kv_gpu_layers",
    "kv_device_bytes",
    "kv_pinned",
    "recurrent_state",
    "cache_type_k",
    "cache_type_v",
    "kv_rotate",
    "parallel",
    "batch",
    "ubatch",
    "ctx",
    "page",
    "group_pages",
    "tail_pages",
    "prefetch",
    "rounding",
    "dither",
    "kv_replicate",
    "jax",
)
NUMBERS = (
    *("median", "mean", "deviation", "min", "max", "predicted", "limit", "share", "ratio"),
    *("weight_bytes", "cache_bytes", "link_bytes", "compute_bytes"),
    *("warmup_seconds", "compile_seconds", "read_gb_s", "matmul_gflop_s", "link_gb_s"),
    *("cores", "load_before"),
)


def figures(measured: Measured) -> Row:
    """Columns of what was measured; deviation is the sample's, None for a single run."""
    each = measured.samples
    found: Row = {
        "warmup_seconds": measured.warmup_seconds,
        "compile_seconds": measured.compile_seconds,
        "error": measured.error,
    }
    if each:
        found |= {
            "median": median(each),
            "mean": mean(each),
            "deviation": stdev(each) if len(each) > 1 else None,
            "min": min(each),
            "max": max(each),
            "samples": each,
        }
    return found


@dataclass(frozen=True)
class Results:
    """Rows in the order of measurement; prints as a table, and shows as one in a notebook."""

    rows: tuple[Row, ...]

    @classmethod
    def read(cls, *paths: str | Path) -> Results:
        """Rows of files that `jaxllm bench -o jsonl` wrote.

        Raises:
            OptionError: for a file that is not one.
        """
        rows: list[Row] = []
        for path in paths:
            try:
                lines = Path(path).read_text("utf-8").splitlines()
                found = [json.loads(line) for line in lines if line.strip()]
                whole = all(isinstance(r, dict) and r.get("test") and r.get("side") for r in found)
                if not found or not whole:
                    raise ValueError("no rows of tests")
                for row in found:
                    _check(row)
            except (OSError, ValueError, RecursionError) as error:
                reason = getattr(error, "strerror", None) or error
                raise OptionError(
                    f"{str(path)!r} cannot be read as results ({reason}); write them with"
                    " jaxllm bench -o jsonl"
                ) from error
            rows += found
        return cls(tuple(rows))

    def to_json(self) -> str:
        """One object."""
        return to_json({"rows": self.rows})

    def to_jsonl(self) -> str:
        """A row a line."""
        return "\n".join(to_json(row) for row in self.rows)

    def to_csv(self) -> str:
        """Every column that any row has; a list is joined by spaces."""
        return to_csv(self.rows)

    def to_markdown(self) -> str:
        """Settings that differ or were given, and figures, as a table."""
        from jaxllm.bench.tables import markdown, table

        return markdown(table(self))

    def __str__(self) -> str:
        from jaxllm.bench.tables import remarks, table, text, title

        return "\n".join([*title(self), text(table(self)), *remarks(self)])

    def _repr_html_(self) -> str:
        from jaxllm.bench.tables import html, remarks, table, title

        return html(table(self), title(self), remarks(self))


def _check(row: Row) -> None:
    """ValueError for values of a row that no bench writes."""
    for name, value in row.items():
        if value is None or name == "samples":
            continue
        if name == "given":
            good = isinstance(value, list) and all(isinstance(each, str) for each in value)
        elif name in NUMBERS:
            good = isinstance(value, int | float) and 0 <= value <= sys.float_info.max
            good = good and not isinstance(value, bool)
        elif name in ("side", "test"):
            good = isinstance(value, str)
        else:
            good = not isinstance(value, list | dict)
        if not good:
            raise ValueError(f"{name} is {shown(value)}")


def to_csv(rows: Iterable[Row]) -> str:
    """Rows as comma-separated values with a header."""
    rows = list(rows)
    out = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(
            {n: " ".join(map(str, v)) if isinstance(v, list) else v for n, v in row.items()}
        )
    return out.getvalue().rstrip("\n")
