"""What a user is told of a residency: where it is not what was asked, and where it is vain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from sharding.mesh import host_rates
from sharding.options import Budget

if TYPE_CHECKING:
    from sharding.plan import Plan
    from sharding.residency import Kept, Residency


def format_layers(layers: float) -> str:
    """A number of layers with up to two decimals, such as "2.5 layers"."""
    number = f"{layers:.2f}".rstrip("0").rstrip(".")
    return f"{number} layer" if number == "1" else f"{number} layers"


def budget_notes(
    plan: Plan, budget: Budget, devices: Sequence[Kept], everything: Sequence[int], layers: int
) -> tuple[str, ...]:
    """One sentence for each difference between what was asked and what is kept. `everything` has
    the bytes a device that a budget counts, `layers` is how many layers have them."""
    asked, options = budget.layers, plan.options
    of = "cache" if budget.context == "main" else "the draft's cache"
    notes = []
    if asked is not None:
        given = sum(d.requested_layers for d in devices)
        if asked > layers:
            notes.append(
                f"{budget.option} {asked} is more than the {format_layers(layers)} with full pages"
                f" of a cache of their own in the {budget.context} context; {layers} are asked for."
            )
        elif asked - given > 1e-9:
            notes.append(
                f"{budget.option} {asked} buys {format_layers(given)} of cache: what is left"
                " is less than the next device's slice of a layer."
            )
    for info, kept, most in zip(plan.mesh.devices, devices, everything, strict=True):
        if kept.bytes == kept.requested_bytes:
            continue
        if asked is not None and kept.bytes > kept.requested_bytes:
            why = "it takes what other devices have no room for"
        elif asked is not None or kept.layers < kept.requested_layers:
            why = "it has no room for more beside weights, rings, staging and compute"
        elif budget.bytes == "auto":
            continue  # nobody asked for that very number
        elif kept.bytes == most:
            why = "that is all of its cache that a budget counts"
        else:
            why = f"pages are kept in whole layers or whole groups of {options.group_pages}"
        notes.append(
            f"device {info.label} was asked to keep {format_layers(kept.requested_layers)}"
            f" ({kept.requested_bytes} bytes) of {of} and keeps {format_layers(kept.layers)}"
            f" ({kept.bytes} bytes): {why}."
        )
    return tuple(notes)


def pay_note(plan: Plan, residency: Residency) -> tuple[str, ...]:
    """Where every layer waits for all devices, whether a budget shortens the longest stream."""
    position = plan.options.ctx
    if plan.options.split_mode != "tensor" or not any(d.bytes for d in residency.devices):
        return ()
    after = replace(plan, residency=residency)
    streaming = [i for i in range(len(plan.mesh)) if plan.link_bytes(i, position)]
    if not streaming:
        return ()
    rates = host_rates([plan.mesh.devices[i] for i in streaming])
    sent = [after.step_bytes(i, position) for i in streaming]
    times = [n / rate for n, rate in zip(sent, rates, strict=True)]
    before = [plan.step_bytes(i, position) / r for i, r in zip(streaming, rates, strict=True)]
    longest = max(times)
    if longest < max(before):
        return ()
    at = times.index(longest)
    return (
        "the cache kept on devices cannot make a decode step faster: each step still waits for"
        f" device {plan.mesh.devices[streaming[at]].label}, whose {sent[at]} bytes at the full"
        " context take as long as without it.",
    )
