"""A fit as text, HTML, plain data, and as arguments and options that make its plan again."""

from __future__ import annotations

import html
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sharding.cost import CostModel
from sharding.options import PlanOptions

if TYPE_CHECKING:
    from sharding.fit import Fit
    from sharding.fit_search import Considered

_HEADER = ("way", "-ts", "-as", "cache", "-ub", "prefetch", "prompt t/s", "decode t/s", "request")
_CHOSEN = {
    "split_mode": "-sm",
    "tensor_split": "-ts",
    "attn_split": "-as",
    "kv_device_bytes": "--kv-device-bytes",
    "cache_type_k": "-ctk",
    "cache_type_v": "-ctv",
    "ctx": "-c",
    "ubatch": "-ub",
    "prefetch": "--prefetch",
}
_OPTIONS = {
    "path": "-m",
    "devices": "--devices",
    "kv": "-nkvo",
    **_CHOSEN,
    "parallel": "-np",
    "batch": "-b",
    "dtype": "--dtype",
    "weights": "--weights",
    "page": "--page",
    "group_pages": "--group-pages",
    "tail_pages": "--tail-pages",
    "link_gbps": "--link-gbps",
    "kv_rotate": "--kv-rotate",
}


def arguments(options: PlanOptions) -> dict[str, Any]:
    """What a fit chose, as arguments of `LLM`; what is None there is left out."""
    names = (*_CHOSEN, "kv")
    return {n: getattr(options, n) for n in names if getattr(options, n) is not None}


def command_options(fit: Fit) -> str:
    """The same, and what the fit was given, as options of `jaxllm generate`."""
    parts, found = [], fit.arguments()
    for name, option in _OPTIONS.items():
        value = found.get(name)
        if name == "kv":
            parts += [option] if value == "host" else []
        elif isinstance(value, bool):
            parts.append(option if value else option.replace("--", "--no-", 1))
        elif isinstance(value, list | tuple):
            parts += [option, shares(value)]
        elif value is not None:
            parts += [option, str(value)]
    return shlex.join(parts)


def shares(values: Sequence[float] | None) -> str:
    """Shares, or rates, as they are typed."""
    return "-" if values is None else ",".join(f"{v:g}" for v in values)


def _row(one: Considered) -> tuple[str, ...]:
    options = one.options
    if options is None:
        return (one.kind, *["-"] * (len(_HEADER) - 1))
    place = {"device": "device", "host": "host"}[options.kv]
    if options.kv == "host" and options.kv_device_bytes is not None:
        place = "both"
    return (
        one.kind,
        shares(options.tensor_split),
        shares(options.attn_split),
        f"{place} {options.cache_type_k}/{options.cache_type_v}",
        str(options.ubatch),
        str(options.prefetch),
        f"{one.prefill_rate:.4g}",
        f"{one.decode_rate:.4g}",
        f"{one.seconds:.4g} s",
    )


def _verdict(fit: Fit, one: Considered) -> str:
    """Why it was chosen or was not."""
    return ", ".join(filter(None, ("chosen" if one is fit.chosen else "", one.why)))


def _title(fit: Fit) -> str:
    load, options = fit.workload, fit.plan.options
    return (
        f"{fit.plan.model.name or 'model'}: context {options.ctx} x {options.slots}, a request of"
        f" {load.prompt} prompt and {load.predict} generated tokens"
    )


def to_text(fit: Fit) -> str:
    """A table of what was considered, the choice first, with why the others lost; then its
    options."""
    table: list[tuple[str, ...]] = [(*_HEADER, "")]
    for one in fit.considered:
        table.append((*_row(one), _verdict(fit, one)))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
    lines.insert(1, "-" * len(lines[0]))
    lines = [_title(fit), *lines, *_unproved(fit)]
    return "\n".join([*lines, f"options: {command_options(fit)}"])


def _unproved(fit: Fit) -> list[str]:
    """What a search that ended without a proof leaves open."""
    if not fit.missed:
        return []
    return [f"not proved to be the fastest: a plan may be up to {100 * fit.missed:.2g} % faster"]


def to_html(fit: Fit) -> str:
    """The same as an HTML table, for notebooks."""

    def row(cells: tuple[str, ...], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    body = "".join(row((*_row(one), _verdict(fit, one)), "td") for one in fit.considered)
    chosen = html.escape(command_options(fit))
    title = html.escape("; ".join([_title(fit), *_unproved(fit)]))
    return (
        f"<p>{title}</p><table><thead>{row((*_HEADER, ''), 'th')}</thead>"
        f"<tbody>{body}</tbody></table><p>options: <code>{chosen}</code></p>"
    )


def explain(fit: Fit) -> str:
    """What the steps of the chosen plan take, by part, and what each device has left."""
    plan = fit.plan
    cost, load = CostModel(plan), fit.workload
    lines = [str(plan)]
    if fit.chosen.why:
        lines.append(f"chosen: {fit.chosen.why}")
    chunk = load.prefill_at(plan.options.ubatch)
    for name, step in (
        (f"decode at {load.decode_at}", cost.decode(load.decode_at)),
        (f"chunk of {plan.options.ubatch} at {chunk}", cost.prefill(chunk)),
    ):
        links = ", ".join(
            f"{info.label} {1e3 * link:.3g} ms"
            for info, link in zip(plan.mesh.devices, step.links, strict=True)
        )
        lines.append(
            f"{name}: {1e3 * cost.seconds(step):.4g} ms, limited by {step.limit}; computing"
            f" {1e3 * sum(step.turns):.3g} ms, exchange {1e3 * step.exchange:.3g} ms, host thread"
            f" {1e3 * step.dispatch:.3g} ms, links {links}"
        )
    for i, info in enumerate(plan.mesh.devices):
        needed = plan.needed_bytes(i)
        free = "not told" if info.free is None else f"{info.free}, {info.free - needed} left"
        lines.append(f"{info.label}: needs {needed} bytes; free {free}")
    return "\n".join(lines)


def to_dict(fit: Fit) -> dict[str, Any]:
    """Plain data: the choice, its plan and what was considered."""
    return {
        "arguments": fit.arguments(),
        "options": command_options(fit),
        "may_be_faster_by": fit.missed,
        "workload": {"prompt": fit.workload.prompt, "predict": fit.workload.predict},
        "considered": [
            {
                "way": one.kind,
                "arguments": None if one.options is None else arguments(one.options),
                "planned": one.plan is not None,
                "prompt_rate": one.prefill_rate,
                "decode_rate": one.decode_rate,
                "seconds": one.seconds if one.options is not None else None,
                "why": one.why,
            }
            for one in fit.considered
        ],
        "plan": fit.plan.to_dict(),
    }
