"""Keeping what people write in messages from being read as control tokens.

A template puts messages and its own control tokens into one text. To tell them apart after it has
trimmed, repeated or cut the messages, it is run on guarded ones: the first character of every
control token's text in them is replaced by one that occurs nowhere. That leaves lengths, white
space and all else as they are, so the result with the characters put back is what the template
makes of the messages themselves; only then is it used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_FIRST_STAND_IN = 0x100000  # a plane of Unicode for private use


class Guard:
    """Stand-ins for the first characters of control tokens, none of which is in `text`."""

    def __init__(self, names: Iterable[str], text: str):
        self._names = frozenset(names)
        self._lengths = sorted({len(name) for name in self._names})
        used, free = set(text), _FIRST_STAND_IN
        self._stand_ins: dict[str, str] = {}
        for first in sorted({name[0] for name in self._names}):
            while chr(free) in used:
                free += 1
            self._stand_ins[first] = chr(free)
            free += 1
        self._table = {ord(to): char for char, to in self._stand_ins.items()}

    def hide(self, value: Any) -> Any:
        """`value`, a text or a nest of lists and mappings, with the texts in it guarded.

        So is the beginning of a name at the end of a text, which could go on in the next text.
        """
        if isinstance(value, str):
            return self._hide(value)
        if isinstance(value, Mapping):
            return {key: self.hide(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(each) for each in value]
        return value

    def hide_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Messages with all but their roles guarded: templates make control tokens of roles."""
        return [
            {key: value if key == "role" else self.hide(value) for key, value in message.items()}
            for message in messages
        ]

    def show(self, text: str) -> str:
        """The text with the characters that were replaced put back."""
        return text.translate(self._table)

    def _hide(self, text: str) -> str:
        end = len(text.rstrip())
        return "".join(
            self._stand_ins[char]
            if char in self._stand_ins and self._begins_name(text, at, end)
            else char
            for at, char in enumerate(text)
        )

    def _begins_name(self, text: str, at: int, end: int) -> bool:
        if any(text[at : at + n] in self._names for n in self._lengths):
            return True
        rest = text[at:end]
        return len(rest) < self._lengths[-1] and any(n.startswith(rest) for n in self._names)
