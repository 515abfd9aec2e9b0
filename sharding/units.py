"""Numbers and bytes as text: how options give them and how reports show them."""

from __future__ import annotations

import re
from fractions import Fraction

BYTES_HELP = "bytes, as 512M, 1.5G or 2GiB (powers of 1024) or 2GB (of 1000)"
_POWERS = {letter: power for power, letter in enumerate("kmgt", start=1)}
_TEXT = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*(?:([kmgt])(i?b)?|b)?", re.ASCII | re.IGNORECASE)


def parse_number(text: str) -> float:
    """A number in plain digits: float() alone takes "1_0" and the digits of all scripts, too.

    Raises:
        ValueError: for any other text.
    """
    if "_" in text or not text.isascii():
        raise ValueError(f"{text!r} is no number")
    return float(text)


def parse_bytes(text: str) -> int:
    """A number of bytes: plain, or with K, M, G or T (KiB and so on: powers of 1024; KB and so on:
    of 1000), in any case. A fraction is cut to whole bytes.

    Raises:
        ValueError: for any other text.
    """
    found = _TEXT.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no number of bytes")
    number, letter, unit = found.groups()
    base = 1000 if (unit or "").lower() == "b" else 1024
    return int(Fraction(number) * base ** _POWERS.get((letter or "").lower(), 0))


def format_bytes(n: int) -> str:
    """Bytes in the largest binary unit that leaves at least 1, such as "1.5 MiB"."""
    size = float(n)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{n} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
