"""Runs the few instructions of PTX that the kernels of products consist of: groups of warps that go
on in a random order, every lane of a warp's register in one numpy array."""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

GAP = 4096  # bytes between two arrays that nothing may touch
LANES = 32


def _bfloat16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _float16(bits: np.ndarray) -> np.ndarray:
    return bits.astype(np.uint16).view(np.float16)


def _nearest(values: np.ndarray) -> np.ndarray:
    """Bits of the nearest bfloat16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.int64)
    return np.where(np.isnan(values), 0x7FC0, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)


def _of_halves(words: Sequence[np.ndarray], what: Callable[..., np.ndarray]) -> np.ndarray:
    """What is done to both bfloat16 of words, exactly."""
    found = []
    for s in (0, 16):
        exact = what(*(_bfloat16(word >> s & 0xFFFF) for word in words))
        assert not (np.ascontiguousarray(exact, np.float32).view(np.uint32) & 0xFFFF).any()
        found.append(_nearest(exact))
    return found[0] | found[1] << 16


def _converted(to: str, source: str, given: Sequence[np.ndarray]) -> np.ndarray:
    value = given[0]
    match to, source:
        case "u32", _:
            return value & 0xFFFFFFFF
        case "u64", _:
            return value
        case "f32", "f16":
            return _float16(value).astype(np.float32)
        case "f32", "bf16":
            return _bfloat16(value)
        case "bf16", _:
            return _nearest(value)
        case "f16x2", _:
            low, high = (
                each.astype(np.float16).view(np.uint16).astype(int) for each in given[::-1]
            )
            return high << 16 | low
        case "bf16x2", _:
            return _nearest(value) << 16 | _nearest(given[1])
    return value.astype(np.float32)


def _by_table(given: Sequence[np.ndarray], table: int) -> np.ndarray:
    """The bits that a table of eight has for the bits of three words."""
    found = np.zeros_like(given[0])
    for row in range(8):
        if table >> row & 1:
            a, b, c = (v if row >> k & 1 else ~v for k, v in zip((2, 1, 0), given, strict=True))
            found = found | a & b & c
    return found & 0xFFFFFFFF


def _divided(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a / b if a.dtype.kind == "f" else a // b


SIMPLE: dict[str, Callable[..., np.ndarray]] = {
    "abs": np.abs,
    "add": lambda a, b: a + b,
    "and": lambda a, b: a & b,
    "div": _divided,
    "ex2": np.exp2,
    "fma": lambda a, b, c: a * b + c,
    "mad": lambda a, b, c: a * b + c,
    "max": np.maximum,
    "min": np.minimum,
    "mov": lambda a: a,
    "mul": lambda a, b: a * b,
    "neg": np.negative,
    "or": lambda a, b: a | b,
    "rem": lambda a, b: a % b,
    "rsqrt": lambda a: 1 / np.sqrt(a),
    "shl": lambda a, b: a << b & 0xFFFFFFFF,
    "shr": lambda a, b: a >> b,
    "sub": lambda a, b: a - b,
    "xor": lambda a, b: a ^ b,
}
COMPARED = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "ge": np.greater_equal}


def run(
    text: str, arrays: Mapping[str, np.ndarray], shared: int, groups: int, warps: int, seed: int = 0
) -> None:
    """All groups of a kernel whose operands are these arrays of device memory and memory of so many
    bytes that a group shares. Leaves what they write in the arrays."""
    program, labels = _parsed(text)
    starts, size = [], GAP
    for array in arrays.values():
        starts.append(size)
        size += -(-array.nbytes // GAP) * GAP + GAP
    device, known = np.zeros(size, np.uint8), np.zeros(size, bool)
    for start, array in zip(starts, arrays.values(), strict=True):
        device[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        known[start : start + array.nbytes] = True
    given = {f"${i}": np.full(LANES, start) for i, start in enumerate((*starts, 0))}
    running: list[tuple[int, Iterator[tuple[int, int] | None]]] = []
    for group in range(groups):
        own = np.full(shared, 0xFF, np.uint8)  # NaN where nothing was written
        for warp in range(warps):
            lanes = {"%ctaid.x": np.full(LANES, group), "%tid.x": LANES * warp + np.arange(LANES)}
            memory = _Memory(device, known, own)
            running.append((group, _Warp(program, labels, given | lanes, memory).run()))
    waiting: dict[tuple[int, int], list] = defaultdict(list)
    order = random.Random(seed)
    while running:
        group, warp = each = running.pop(order.randrange(len(running)))
        try:
            barrier = next(warp)
        except StopIteration:
            continue
        if barrier is None:
            running.append(each)
            continue
        number, count = barrier
        met = waiting[group, number]
        met.append(each)
        if len(met) == (count or LANES * warps) // LANES:
            running += waiting.pop((group, number))
    assert not any(waiting.values()), "warps that wait for ever"
    for start, array in zip(starts, arrays.values(), strict=True):
        array.reshape(-1).view(np.uint8)[:] = device[start : start + array.nbytes]


def _parsed(text: str) -> tuple[list[tuple[str | None, list[str], list[str]]], dict[str, int]]:
    """Instructions as guard, name and arguments; and where labels are."""
    program: list[tuple[str | None, list[str], list[str]]] = []
    labels = {}
    for line in map(str.strip, text.splitlines()):
        if line.endswith(":"):
            labels[line[:-1]] = len(program)
        elif not line.startswith((".reg", "{", "}")):
            found = re.fullmatch(r"(?:@(\S+) )?(\S+)\s*(.*);", line)
            assert found is not None, line
            guard, name, rest = found.groups()
            args = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)
            program.append((guard, name.split("."), args))
    return program, labels


class _Memory:
    """Bytes of the device, which of them are an array's, and bytes of a group."""

    def __init__(self, device: np.ndarray, known: np.ndarray, shared: np.ndarray):
        self.device, self.known, self.shared = device, known, shared

    def _of(self, device: bool, at: np.ndarray) -> np.ndarray:
        assert not device or self.known[at].all()
        return self.device if device else self.shared

    def read(self, device: bool, places: np.ndarray, count: int) -> np.ndarray:
        """Bytes [lanes, count]."""
        at = places[:, None] + np.arange(count)
        return self._of(device, at)[at]

    def write(self, device: bool, places: np.ndarray, found: np.ndarray) -> None:
        at = places[:, None] + np.arange(found.shape[1])
        self._of(device, at)[at] = found


class _Warp:
    """A warp: `run` yields the number and the threads of a barrier that it has come to, or None
    where others may go on."""

    def __init__(
        self,
        program: list[tuple[str | None, list[str], list[str]]],
        labels: dict[str, int],
        values: dict[str, np.ndarray],
        memory: _Memory,
    ):
        self.program, self.labels, self.values, self.memory = program, labels, values, memory
        self.pending: list[list[tuple[np.ndarray, np.ndarray]]] = [[]]

    def run(self) -> Iterator[tuple[int, int] | None]:
        at, every = 0, np.ones(LANES, bool)
        while at < len(self.program):
            guard, name, args = self.program[at]
            at += 1
            self.on = every
            if guard:
                self.on = ~self.values[guard[1:]] if guard[0] == "!" else self.values[guard]
            if name[0] == "bra":
                assert self.on.all() or not self.on.any()
                if self.on.all():
                    at = self.labels[args[0]]
                    yield None
            elif name[:2] == ["bar", "sync"]:
                number, count = (int(self.value(arg)[0]) for arg in (*args, "0")[:2])
                yield number, count
            elif name[0] not in ("bar", "fence"):
                self.step(name, args)

    def value(self, arg: str) -> np.ndarray:
        """Of a register, or of a number in all lanes."""
        if arg in self.values:
            return self.values[arg]
        number = np.uint32(int(arg[2:], 16)).view(np.float32) if arg[:2] == "0f" else int(arg, 0)
        return np.full(LANES, number)

    def place(self, arg: str) -> np.ndarray:
        """The addresses of [register+number], of lanes that take part."""
        register, _, number = arg.strip("[]").partition("+")
        return (self.value(register) + int(number or 0))[self.on]

    def put(self, register: str, found: np.ndarray) -> None:
        """A result, of lanes that take part."""
        if not self.on.all():
            found = np.where(self.on, found, self.values[register])
        self.values[register] = found

    def step(self, name: list[str], args: list[str]) -> None:
        """One instruction."""
        match name[0]:
            case "cp":
                self.copy(name, args)
            case "ld":
                self.load(name, args)
            case "st":
                self.store(name, args)
            case "red" | "atom":
                self.count(name, args)
            case "ldmatrix":
                self.load_matrices(_names(args[0]), args[1])
            case "movmatrix":
                halves = self.values[args[1]][:, None] >> np.array([0, 16]) & 0xFFFF
                self.put(args[0], _transposed(halves.reshape(8, 8)))
            case "mma":
                self.multiply(name[-2] == "bf16", *map(_names, args))
            case _:
                found = self.simple(name, *map(self.value, args[1:]))
                if name == ["mov", "b32"] and args[0][0] == "f" and found.dtype.kind != "f":
                    found = found.astype(np.uint32).view(np.float32)  # the bits of a word
                elif name == ["mov", "b32"] and args[0][0] == "r" and found.dtype.kind == "f":
                    found = found.astype(np.float32).view(np.uint32).astype(int)
                self.put(args[0], found)

    def copy(self, name: list[str], args: list[str]) -> None:
        """Of device memory to shared memory, done when its group is waited for."""
        if name[2] == "commit_group":
            self.pending.append([])
        elif name[2] == "wait_group":
            while len(self.pending) - 1 > int(args[0]):
                for to, found in self.pending.pop(0):
                    self.memory.write(False, to, found)
        else:
            count, to, source = int(args[2]), self.place(args[0]), self.place(args[1])
            assert not (to % count).any()
            assert not (source % count).any()
            self.pending[-1].append((to, self.memory.read(True, source, count)))

    def load(self, name: list[str], args: list[str]) -> None:
        kind, registers = name[-1], _names(args[0])
        size, places = int(kind[1:]) // 8, self.place(args[1])
        assert not (places % (size * len(registers))).any()
        found = np.zeros((LANES, size * len(registers)), np.uint8)
        found[self.on] = self.memory.read("global" in name, places, found.shape[1])
        for i, register in enumerate(registers):
            one = np.ascontiguousarray(found[:, size * i : size * (i + 1)]).view(f"u{size}")[:, 0]
            self.put(register, one.view(np.float32) if kind == "f32" else one.astype(int))

    def load_matrices(self, registers: list[str], place: str) -> None:
        """Transposed ones [8, 8] of two bytes, of whose rows lanes have the addresses."""
        at = self.place(place)
        assert not (at % 16).any()
        rows = np.ascontiguousarray(self.memory.read(False, at, 16)).view(np.uint16).astype(int)
        for register, matrix in zip(registers, rows.reshape(-1, 8, 8), strict=True):
            self.put(register, _transposed(matrix))

    def store(self, name: list[str], args: list[str]) -> None:
        size, places = int(name[-1][1:]) // 8, self.place(args[0])
        assert not (places % (size * len(_names(args[1])))).any()
        kind = np.float32 if name[-1] == "f32" else f"u{size}"
        found = [self.value(register)[self.on].astype(kind) for register in _names(args[1])]
        self.memory.write("global" in name, places, np.stack(found, axis=1).view(np.uint8))

    def count(self, name: list[str], args: list[str]) -> None:
        """Add to a number in device memory, lane by lane, or begin anew where it is the last."""
        for lane, own in zip(np.flatnonzero(self.on), self.place(args[-2])[:, None], strict=True):
            old = int(self.memory.read(True, own, 4).view(np.uint32)[0, 0])
            given = int(self.value(args[-1])[lane])
            new = old + given if name[-2] == "add" else (0 if old >= given else old + 1)
            self.memory.write(True, own, np.array([[new]], np.uint32).view(np.uint8))
            if name[0] == "atom":
                self.values[args[0]] = self.values[args[0]].copy()
                self.values[args[0]][lane] = old

    def simple(self, name: list[str], *given: np.ndarray) -> np.ndarray:
        """An instruction of registers alone; those of 32 bits are not negative here."""
        head, kind = name[0], name[-1]
        if head == "cvt":
            to, source = [part for part in name[1:] if part != "rn"]
            return _converted(to, source, given)
        if kind == "bf16x2":
            return _of_halves(given, lambda a, b: a - b)
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
            lanes, distance = np.arange(LANES), int(given[1][0])
            other = lanes ^ distance if name[2] == "bfly" else lanes + distance
            return given[0][np.where(other < LANES, other, lanes)]
        if head == "setp":
            return COMPARED[name[1]](*given)
        if head == "selp":
            return np.where(given[2], given[0], given[1])
        if kind == "f32":
            return SIMPLE[head](*(value.astype(np.float32) for value in given))
        if kind == "s32":
            given = tuple(((value & 0xFFFFFFFF) ^ 1 << 31) - (1 << 31) for value in given)
        found = SIMPLE[head](*given)
        narrow = kind in ("u32", "s32", "b32") and "wide" not in name and found.dtype.kind == "i"
        return found & 0xFFFFFFFF if narrow else found

    def multiply(
        self, wide: bool, found: list[str], a: list[str], b: list[str], sums: list[str]
    ) -> None:
        """m16n8k16."""
        of, lanes = _bfloat16 if wide else _float16, np.arange(LANES)
        row, quarter = lanes >> 2, lanes & 3
        left, right, total = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
        for i, register in enumerate(a):
            for j in range(2):
                bits = self.values[register] >> 16 * j & 0xFFFF
                left[row + 8 * (i % 2), 2 * quarter + j + 8 * (i // 2)] = of(bits)
        for i, register in enumerate(b):
            for j in range(2):
                bits = self.values[register] >> 16 * j & 0xFFFF
                right[2 * quarter + j + 8 * i, row] = of(bits)
        for i, register in enumerate(sums):
            total[row + 8 * (i // 2), 2 * quarter + i % 2] = self.values[register]
        total = (total + left @ right).astype(np.float32)
        for i, register in enumerate(found):
            self.put(register, total[row + 8 * (i // 2), 2 * quarter + i % 2])


def _transposed(matrix: np.ndarray) -> np.ndarray:
    """What lanes have of a matrix [8, 8] the other way round, two numbers each."""
    pairs = matrix.T.reshape(LANES, 2)
    return pairs[:, 0] | pairs[:, 1] << 16


def _names(arg: str) -> list[str]:
    return [name.strip() for name in arg.strip("{}").split(",")]
