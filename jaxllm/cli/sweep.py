"""Options that take several values, for `jaxllm bench`: every combination is run."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import product
from typing import Any

from jaxllm.cli.split import SPLIT, SplitOption, split_group

_SHARES = "; several as llama-bench takes them, 3/1,1/1, or by repeating the option"


def listed(one: Callable[[str], Any], what: str) -> Callable[[str], list[Any]]:
    """A reader of comma-separated values."""

    def read(text: str) -> list[Any]:
        try:
            return [one(part) for part in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not {what}, or several with commas between them"
            ) from None

    return read


def natural(text: str) -> int:
    """A whole number of at least 0."""
    value = int(text)
    if value < 0:
        raise ValueError(text)
    return value


def add_swept_split(parser: argparse.ArgumentParser) -> None:
    """The options of `add_split`, those with values as lists. An option may also be repeated."""
    group = split_group(parser)
    for option in SPLIT:
        settings, more = _swept(option)
        group.add_argument(
            *option.flags, dest=option.field, help=f"{option.help}{more}", **settings
        )


def combinations(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Keyword arguments of `LLM.from_gguf`, by combination; the last option varies fastest."""
    given = {option.field: getattr(args, option.field) for option in SPLIT}
    lists = {
        name: list(dict.fromkeys(value)) if isinstance(value, list) else [value]
        for name, value in given.items()
        if value is not None
    }
    return [dict(zip(lists, each, strict=True)) for each in product(*lists.values())]


def _swept(option: SplitOption) -> tuple[dict[str, Any], str]:
    """Settings of argparse for several values, and what to add to the help."""
    settings = dict(option.settings)
    extend: dict[str, Any] = {"action": "extend"}
    if option.field == "kv":
        places = {"0": "device", "1": "host"}
        read = listed(lambda part: places[part] if part in places else _refuse(part), "0 or 1")
        more = {"nargs": "?", "const": ["host"], "metavar": "0,1", "type": read}
        return extend | more, "; 0,1: both ways"
    if option.field in ("tensor_split", "attn_split"):
        return settings | extend | {"type": _shares}, _SHARES
    if "action" in settings or option.field == "link_gbps":
        return settings, ""
    if "choices" in settings:
        choices = settings.pop("choices")
        one = f"one of {', '.join(choices)}"
        read = listed(lambda part: part if part in choices else _refuse(part), one)
        return settings | extend | {"type": read, "metavar": f"{'|'.join(choices)},..."}, ""
    kind = settings.pop("type", str)
    read = listed(kind, "a number" if kind is int else "a value")
    return settings | extend | {"type": read, "metavar": f"{settings['metavar']},..."}, ""


def _refuse(part: str) -> Any:
    raise ValueError(part)


def _shares(text: str) -> list[str]:
    """Alternatives as llama-bench writes them, 3/1,1/1; else one list of shares, 3,1."""
    if "/" not in text:
        return [text]
    return [part.replace("/", ",") for part in text.split(",")]
