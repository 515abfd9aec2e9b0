"""Results as tables of text, Markdown and HTML."""

from __future__ import annotations

import html as escaping
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from jaxllm.bench.results import SETTINGS, Row

if TYPE_CHECKING:
    from jaxllm.bench.results import Results

Table = list[list[str]]  # the header first
TITLE = ("model", "dtype", "engine", "devices", "jax")  # above the table where all rows agree
FIGURES: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("median", "t/s", lambda v: f"{v:.2f}"),
    ("mean", "mean", lambda v: f"{v:.2f}"),
    ("deviation", "+-", lambda v: f"{v:.2f}"),
    ("predicted", "predicted", lambda v: f"{v:.1f}"),
    ("limit", "limit", lambda v: f"{v:.1f}"),
    ("share", "of limit", lambda v: f"{v:.0%}"),
    ("link_bytes", "link MB/token", lambda v: f"{v / 1e6:.2f}"),
    ("compute_bytes", "compute MB", lambda v: f"{v / 1e6:.1f}"),
    ("warmup_seconds", "warm-up s", lambda v: f"{v:.2f}"),
    ("compile_seconds", "compile s", lambda v: f"{v:.2f}"),
    ("ratio", "ratio", lambda v: f"{v:.2f}"),
    ("error", "not measured", str),
)


def _values(rows: Sequence[Row], name: str) -> list[Any]:
    """Of a setting, by row; a row of options that could not be run tells only those."""
    return [row[name] for row in rows if name in row]


def settings(rows: Sequence[Row]) -> list[str]:
    """Settings that differ between rows, or were given."""
    given = {name for row in rows for name in row.get("given", ())}
    differ = {n for n in SETTINGS if len(set(_values(rows, n))) > 1}
    return [n for n in SETTINGS if n in differ or (n in given and n not in TITLE)]


def cell(value: Any) -> str:
    """A setting in few words."""
    return "-" if value is None else str(value)


def table(results: Results) -> Table:
    """A header and a line for each row; columns of which no row has a figure are left out."""
    rows = results.rows
    names = settings(rows)
    sides = ["side"] if len({row["side"] for row in rows}) > 1 else []
    shown = [each for each in FIGURES if any(row.get(each[0]) for row in rows)]
    lines = [[*names, *sides, "test", *(header for _, header, _ in shown)]]
    for row in rows:
        figures = ("" if row.get(n) is None else form(row[n]) for n, _, form in shown)
        lines.append([*(cell(row.get(n)) for n in [*names, *sides, "test"]), *figures])
    return lines


def title(results: Results) -> list[str]:
    """What all rows have in common."""
    words = []
    for name in TITLE:
        values = set(_values(results.rows, name))
        if len(values) == 1:
            words.append(f"{'jax ' if name == 'jax' else ''}{values.pop()}")
    return [", ".join([*words, f"{results.rows[0].get('cores', '?')} cores"])]


def remarks(results: Results) -> list[str]:
    """The machine, the bytes of the last decoded token, and whether anything else ran."""
    lines = []
    known = [row for row in results.rows if row.get("read_gb_s") is not None]
    for row in known[-1:]:
        words = f"memory read {row['read_gb_s']:.1f} GB/s"
        words += f", {row['dtype']} matmul {row['matmul_gflop_s']:.0f} GFLOP/s"
        if row.get("link_gb_s") is not None:
            words += f", host link {row['link_gb_s']:.1f} GB/s"
        lines.append(words)
    decoded = [row for row in results.rows if row.get("weight_bytes") is not None]
    if decoded:
        last = decoded[-1]
        lines.append(
            f"{last['test']}: a token reads {last['weight_bytes'] / 1e9:.3f} GB of weights and"
            f" {last['cache_bytes'] / 1e9:.3f} GB of cache, {last['link_bytes'] / 1e9:.3f} GB of"
            " it over links"
        )
    peers = dict.fromkeys(row["peer"] for row in results.rows if row.get("peer"))
    lines += [f"peer: {peer}, float32" for peer in peers]
    row = results.rows[-1]
    if row.get("load_before", 0) > row.get("cores", 1) / 4:
        lines.append(f"the machine was not idle: load {row['load_before']:.1f} before")
    return lines


def text(lines: Table) -> str:
    """Aligned columns: numbers to the right."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    right = [_numbers(line[i] for line in lines[1:]) for i in range(len(lines[0]))]
    found = []
    for line in lines:
        cells = zip(line, widths, right, strict=True)
        joined = "  ".join(c.rjust(w) if number else c.ljust(w) for c, w, number in cells)
        found.append(joined.rstrip())
    found.insert(1, "-" * len(found[0]))
    return "\n".join(found)


def markdown(lines: Table) -> str:
    """A Markdown table, numbers to the right."""
    right = [_numbers(line[i] for line in lines[1:]) for i in range(len(lines[0]))]
    rule = ["---:" if number else "---" for number in right]
    cells = ([c.replace("|", "\\|") for c in line] for line in [lines[0], rule, *lines[1:]])
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def html(lines: Table, above: Iterable[str] = (), below: Iterable[str] = ()) -> str:
    """A table for notebooks."""

    def line(cells: Sequence[str], tag: str) -> str:
        inner = "".join(f"<{tag}>{escaping.escape(c)}</{tag}>" for c in cells)
        return f"<tr>{inner}</tr>"

    def paragraphs(texts: Iterable[str]) -> str:
        return "".join(f"<p>{escaping.escape(each)}</p>" for each in texts)

    body = "".join(line(each, "td") for each in lines[1:])
    head = f"<table><thead>{line(lines[0], 'th')}</thead><tbody>{body}</tbody></table>"
    return f"{paragraphs(above)}{head}{paragraphs(below)}"


def _numbers(cells: Iterable[str]) -> bool:
    return all(c in ("", "-") or c.strip("%+").replace(".", "", 1).isdigit() for c in cells)
