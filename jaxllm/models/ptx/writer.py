"""Text in PTX, the assembly language of NVIDIA's GPUs."""

from __future__ import annotations

import struct
from collections import Counter

REGISTERS = {"b16": "h", "b32": "r", "f32": "f", "b64": "d", "pred": "p"}  # names begin so


def float_bits(value: float) -> str:
    """A number of float32 as text."""
    return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08x}"


class Writer:
    """An instruction a line, each result in a register of its own; or on in another's text."""

    def __init__(self, on: Writer | None = None) -> None:
        self.lines: list[str] = [] if on is None else on.lines
        self.used: Counter[str] = Counter() if on is None else on.used

    def block(self) -> str:
        """All lines, with the registers that they use."""
        declared = [f".reg .{kind} {REGISTERS[kind]}<{n}>;" for kind, n in self.used.items()]
        return "\n".join(["{", *declared, *self.lines, " }"])

    def new(self, kind: str) -> str:
        """A register."""
        self.used[kind] += 1
        return f"{REGISTERS[kind]}{self.used[kind] - 1}"

    def do(self, text: str) -> None:
        """An instruction without a result of its own."""
        self.lines.append(text + ";")

    def mark(self, label: str) -> None:
        """A place to go on from."""
        self.lines.append(f"{label}:")

    def get(self, name: str, *given: object, kind: str = "b32") -> str:
        """The register that an instruction writes."""
        found = self.new(kind)
        self.do(f"{name} {found}, {', '.join(map(str, given))}")
        return found

    def load(self, at: str, beyond: int) -> list[str]:
        """Four registers read from shared memory."""
        found = [self.new("b32") for _ in range(4)]
        self.do(f"ld.shared.v4.b32 {{{', '.join(found)}}}, [{at}+{beyond}]")
        return found

    def add(self, a: str, b: object, times: int = 1) -> str:
        """a and so many times b."""
        return self.get("mad.lo.u32", b, times, a)

    def quotient(self, a: str, n: int) -> str:
        """a divided by n. A division takes some twenty instructions, of powers of two as well."""
        shift = n.bit_length() - 1
        return self.get("shr.u32", a, shift) if n == 1 << shift else self.get("div.u32", a, n)

    def remainder(self, a: str, n: int) -> str:
        """a modulo n."""
        return self.get("and.b32", a, n - 1) if not n & n - 1 else self.get("rem.u32", a, n)

    def far(self, a: str, b: str, times: int) -> str:
        """An address in device memory so many times b beyond a."""
        return self.get("mad.wide.u32", b, times, a, kind="b64")
