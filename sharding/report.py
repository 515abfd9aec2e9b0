"""A plan as text, HTML and plain data."""

from __future__ import annotations

import html
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sharding.residency import Kept
from sharding.residency_notes import format_layers
from sharding.splits import Ranges
from sharding.units import format_bytes

if TYPE_CHECKING:
    from sharding.plan import Plan

_HEADER = (
    "device",
    "layers",
    "KV groups",
    "MLP columns",
    "vocab rows",
    "weights",
    "cache (device)",
    "cache (host)",
    "staging",
    "compute",
)
_BUDGET_HEADER = ("kept", "asked to keep")
_DRAFT_HEADER = ("draft kept", "draft asked to keep")


def _spread(counts: list[int]) -> str:
    """Counts a layer in short: one number, or the least, most and mean."""
    if not counts:
        return "0"
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low}-{high} (mean {sum(counts) / len(counts):.2f})"


def _counts(per_layer: list[Ranges], device: int) -> list[int]:
    return [r[device][1] - r[device][0] for r in per_layer if any(stop for _, stop in r)]


def _rows(plan: Plan) -> list[tuple[str, ...]]:
    rows = []
    tensor = plan.options.split_mode == "tensor"
    for device, info in enumerate(plan.mesh.devices):
        own = [layer for layer in plan.layers if tensor or device in layer.devices]
        taking_part = sum(device in layer.devices for layer in plan.layers)
        start, stop = plan.vocab[device]
        cache = plan.cache_bytes(device)
        extra = _kept(plan.residency.devices[device]) if _budget(plan) else ()
        extra += _kept(plan.residency.drafts[device]) if _draft_budget(plan) else ()
        rows.append(
            (
                info.label,
                str(taking_part),
                _spread(_counts([layer.groups for layer in own], device)),
                *(
                    [_spread(_counts([layer.states for layer in own], device))]
                    if _recurrent(plan)
                    else []
                ),
                _spread(_counts([layer.mlp for layer in own], device)),
                str(stop - start),
                format_bytes(plan.weight_bytes(device)) if plan.tensors else "-",
                format_bytes(cache["device"]),
                format_bytes(cache["host"]),
                format_bytes(plan.staging_bytes(device)),
                format_bytes(plan.compute_bytes(device)),
                *extra,
            )
        )
    return rows


def _kept(kept: Kept) -> tuple[str, str]:
    return (
        f"{format_layers(kept.layers)}, {format_bytes(kept.bytes)}",
        f"{format_layers(kept.requested_layers)}, {format_bytes(kept.requested_bytes)}",
    )


def _draft_budget(plan: Plan) -> bool:
    """Whether some of a draft's host cache was asked to stay on the devices."""
    return plan.options.kv_gpu_layers_draft is not None


def _budget(plan: Plan) -> bool:
    """Whether some of a host cache was asked to stay on the devices."""
    options = plan.options
    return options.kv_gpu_layers is not None or options.kv_device_bytes is not None


def _recurrent(plan: Plan) -> bool:
    return any(shape.states for shape in plan.model.layers)


def _header(plan: Plan) -> tuple[str, ...]:
    at = _HEADER.index("MLP columns")
    states = ("state groups",) if _recurrent(plan) else ()
    budgets = _BUDGET_HEADER if _budget(plan) else ()
    budgets += _DRAFT_HEADER if _draft_budget(plan) else ()
    return _HEADER[:at] + states + _HEADER[at:] + budgets


def _title(plan: Plan) -> str:
    options = plan.options
    drafts = sum(shape.cache_context == "draft" for shape in plan.model.layers)
    ahead = f" and {drafts} of a draft" if drafts else ""
    return (
        f"{plan.model.name or 'model'}: {len(plan.layers) - drafts} layers{ahead}, vocabulary"
        f" {plan.model.vocab}, split by {options.split_mode}, context {options.ctx} x"
        f" {options.slots}, cache {options.cache_type_k}/{options.cache_type_v} on the {options.kv}"
    )


def _remarks(plan: Plan) -> list[str]:
    return [f"engine: {plan.engine}, {plan.why}", *(f"note: {note}" for note in plan.notes)]


def to_text(plan: Plan) -> str:
    """A table with one line a device, then the engine and why, then notes."""
    table = [_header(plan), *_rows(plan)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in table
    ]
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join([_title(plan), *lines, *_remarks(plan)])


def to_html(plan: Plan) -> str:
    """The same as an HTML table, for notebooks."""

    def row(cells: tuple[str, ...], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    body = "".join(row(cells, "td") for cells in _rows(plan))
    remarks = "".join(f"<p>{html.escape(line)}</p>" for line in _remarks(plan))
    return (
        f"<p>{html.escape(_title(plan))}</p><table><thead>{row(_header(plan), 'th')}</thead>"
        f"<tbody>{body}</tbody></table>{remarks}"
    )


def to_dict(plan: Plan) -> dict[str, Any]:
    """Plain data: what was asked, what was decided, bytes a device."""
    host = plan.options.kv == "host"
    return {
        "model": {
            "name": plan.model.name,
            "layers": len(plan.model.layers),
            "contexts": [shape.cache_context for shape in plan.model.layers],
            "vocab": plan.model.vocab,
            "embed": plan.model.embed,
        },
        "options": _plain(asdict(plan.options) | {"batch": plan.options.prompt_batch}),
        "engine": plan.engine,
        "why": plan.why,
        "notes": list(plan.notes),
        "devices": [
            {
                **asdict(info),
                "vocab": list(plan.vocab[device]),
                "weight_bytes": plan.weight_bytes(device),
                "cache_bytes": plan.cache_bytes(device),
                "staging_bytes": plan.staging_bytes(device),
                "compute_bytes": plan.compute_bytes(device),
                "kept": asdict(plan.residency.devices[device]) if host else None,
                "draft_kept": asdict(plan.residency.drafts[device]) if host else None,
            }
            for device, info in enumerate(plan.mesh.devices)
        ],
        "layers": [
            _plain(asdict(layer) | ({"resident_pages": pages} if host else {}))
            for layer, pages in zip(plan.layers, plan.residency.pages, strict=True)
        ],
    }


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    return value
