"""Runs the few instructions of PTX that the kernel of quantised products consists of, a block of
threads at a time, every lane of a register in one numpy array."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

CHUNK = 1 << 32  # addresses that an array of device memory has to itself


def _bfloat16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _rounded(values: np.ndarray) -> np.ndarray:
    """Bits of bfloat16 of values that have them exactly."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    assert not (bits & 0xFFFF).any()
    return bits >> 16


def _of_halves(words: Sequence[np.ndarray], what: Callable[..., np.ndarray]) -> np.ndarray:
    """What is done to both bfloat16 of words."""
    halves = ([_bfloat16(word >> s & 0xFFFF) for word in words] for s in (0, 16))
    low, high = (_rounded(what(*each)).astype(int) for each in halves)
    return low | high << 16


def _converted(to: str, source: str, value: np.ndarray) -> np.ndarray:
    if to == "u32":
        return value & 0xFFFFFFFF
    if source == "f16":
        return value.astype(np.uint16).view(np.float16).astype(np.float32)
    return value.astype(np.float32)


def _by_table(given: Sequence[np.ndarray], table: int) -> np.ndarray:
    """The bits that a table of eight has for the bits of three words."""
    found = np.zeros_like(given[0])
    for row in range(8):
        if table >> row & 1:
            a, b, c = (v if row >> k & 1 else ~v for k, v in zip((2, 1, 0), given, strict=True))
            found = found | a & b & c
    return found & 0xFFFFFFFF


SIMPLE: dict[str, Callable[..., np.ndarray]] = {
    "add": lambda a, b: a + b,
    "and": lambda a, b: a & b,
    "div": lambda a, b: a // b,
    "fma": lambda a, b, c: a * b + c,
    "mad": lambda a, b, c: a * b + c,
    "mov": lambda a: a,
    "mul": lambda a, b: a * b,
    "rem": lambda a, b: a % b,
    "shr": lambda a, b: a >> b,
    "sub": lambda a, b: a - b,
    "xor": lambda a, b: a ^ b,
}


class Block:
    """A block of `threads` over arrays of device memory; `run` leaves what they write in those."""

    def __init__(self, text: str, arrays: list[np.ndarray], shared: list[int], threads: int):
        self.lines = [line.strip().rstrip(";") for line in text.splitlines()]
        self.device = [array.reshape(-1).view(np.uint8) for array in arrays]
        self.shared = np.full(sum(shared), 0xFF, np.uint8)  # NaN where nothing was written
        self.threads = np.arange(threads)
        starts = np.cumsum([0, *shared[:-1]])
        given = [*((i + 1) * CHUNK for i in range(len(arrays))), *starts]
        self.given = {f"${i}": np.full(threads, value) for i, value in enumerate(given)}

    def run(self, group: int) -> None:
        """All instructions of the block with this number."""
        numbers = np.full(len(self.threads), group), self.threads
        names = (f"${len(self.given) + i}" for i in range(2))
        self.values = self.given | dict(zip(names, numbers, strict=True))
        self.pending: list[list[tuple[np.ndarray, np.ndarray]]] = [[]]
        at = 0
        while at < len(self.lines):
            guard, name, rest = re.fullmatch(r"(?:@(\S+) )?(\S+)\s*(.*)", self.lines[at]).groups()
            at += 1
            if name.startswith((".", "{", "}", "bar.")) or name.endswith(":"):
                continue
            self.on = self.values[guard] if guard else np.ones(len(self.threads), bool)
            if name == "bra":
                assert self.on.all() or not self.on.any()
                at = self.lines.index(f"{rest}:") if self.on.all() else at
                continue
            args = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)
            self.step(name.split("."), args)

    def value(self, arg: str) -> np.ndarray:
        """Of a register, or of a number in all threads."""
        if arg in self.values:
            return self.values[arg]
        number = np.uint32(int(arg[2:], 16)).view(np.float32) if arg[:2] == "0f" else int(arg, 0)
        return np.full(len(self.threads), number)

    def place(self, arg: str) -> np.ndarray:
        """The addresses of [register+number]."""
        register, _, number = arg.strip("[]").partition("+")
        return self.value(register) + int(number or 0)

    def bytes_at(self, places: np.ndarray, count: int, device: bool) -> np.ndarray:
        """Bytes [threads, count]; addresses that no array has are errors."""
        each = np.arange(count)
        if not device:
            return self.shared[places[:, None] + each]
        which, offset = np.divmod(places, CHUNK)
        found = [self.device[a - 1][o + each] for a, o in zip(which, offset, strict=True)]
        return np.asarray(found, np.uint8).reshape(-1, count)

    def names(self, arg: str) -> list[str]:
        return [name.strip() for name in arg.strip("{}").split(",")]

    def step(self, name: list[str], args: list[str]) -> None:
        """One instruction of all threads."""
        head, kind = name[0], name[-1]
        if head == "cp":
            self.copy(name, args)
        elif head == "ld":
            size, registers = int(kind[1:]) // 8, self.names(args[0])
            places = np.where(self.on, self.place(args[1]), 0)
            assert not (places % (size * len(registers))).any()
            found = self.bytes_at(places, size * len(registers), False)
            for i, register in enumerate(registers):
                one = np.ascontiguousarray(found[:, size * i : size * (i + 1)])
                one = one.view(f"u{size}")[:, 0]
                self.values[register] = one.view(np.float32) if kind == "f32" else one.astype(int)
        elif head == "st":
            self.store(name[1] == "global", self.place(args[0]), self.value(args[1]))
        elif head == "mma":
            self.multiply(*map(self.names, args))
        elif head == "mov" and args[0][0] == "{":
            for i, register in enumerate(self.names(args[0])):
                self.values[register] = self.value(args[1]) >> 16 * i & 0xFFFF
        else:
            self.values[args[0]] = self.simple(name, *map(self.value, args[1:]))

    def copy(self, name: list[str], args: list[str]) -> None:
        """Of device memory to shared memory, done when its group is waited for."""
        if name[2] == "commit_group":
            self.pending.append([])
        elif name[2] == "wait_group":
            while len(self.pending) - 1 > int(args[0]):
                for to, found in self.pending.pop(0):
                    self.shared[to] = found
        else:
            count, to, source = int(args[2]), self.place(args[0]), self.place(args[1])
            to, source = to[self.on], source[self.on]
            assert not (to % count).any()
            assert not (source % count).any()
            found = self.bytes_at(source, count, True)
            self.pending[-1].append((to[:, None] + np.arange(count), found))

    def store(self, device: bool, places: np.ndarray, values: np.ndarray) -> None:
        kind = np.float32 if values.dtype.kind == "f" else np.uint32
        for place, value in zip(places[self.on], values[self.on].astype(kind), strict=True):
            array, start = (
                (self.device[place // CHUNK - 1], place % CHUNK) if device else (self.shared, place)
            )
            array[start : start + 4] = np.frombuffer(value.tobytes(), np.uint8)

    def simple(self, name: list[str], *given: np.ndarray) -> np.ndarray:
        """An instruction of registers alone; those of 32 bits are not negative here."""
        head, kind = name[0], name[-1]
        if kind == "bf16x2":
            return _of_halves(given, lambda a, b: a - b)
        if head == "cvt":
            return _converted(name[1], kind, given[0])
        if head == "prmt":
            word, other, picks = given
            pool = [value >> 8 * i & 255 for value in (word, other) for i in range(4)]
            return sum(pool[int(picks[0]) >> 4 * i & 7] << 8 * i for i in range(4))
        if head == "lop3":
            return _by_table(given[:3], int(given[3][0]))
        if head == "bfe":
            found = given[0] >> given[1] & (1 << int(given[2][0])) - 1
            return np.where(found > 127, found - 256, found) if kind == "s32" else found
        if head == "shfl":
            return given[0][np.arange(len(given[0])) ^ int(given[1][0])]
        if head == "setp":
            return {"eq": np.equal, "lt": np.less}[name[1]](*given)
        if head == "selp":
            return np.where(given[2], given[0], given[1])
        if kind == "f32":
            given = tuple(value.astype(np.float32) for value in given)
        return SIMPLE[head](*given)

    def multiply(self, found: list[str], a: list[str], b: list[str], sums: list[str]) -> None:
        """m16n8k16 of every warp."""
        lanes = np.arange(32)
        row, quarter = lanes >> 2, lanes & 3
        result = np.empty((4, len(self.threads)), np.float32)
        for start in range(0, len(self.threads), 32):
            own = slice(start, start + 32)
            left, right, total = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
            for i, register in enumerate(a):
                for j in range(2):
                    bits = self.values[register][own] >> 16 * j & 0xFFFF
                    left[row + 8 * (i % 2), 2 * quarter + j + 8 * (i // 2)] = _bfloat16(bits)
            for i, register in enumerate(b):
                for j in range(2):
                    bits = self.values[register][own] >> 16 * j & 0xFFFF
                    right[2 * quarter + j + 8 * i, row] = _bfloat16(bits)
            for i, register in enumerate(sums):
                total[row + 8 * (i // 2), 2 * quarter + i % 2] = self.values[register][own]
            total = total + left @ right
            for i in range(4):
                result[i, own] = total[row + 8 * (i // 2), 2 * quarter + i % 2]
        self.values |= dict(zip(found, result, strict=True))
