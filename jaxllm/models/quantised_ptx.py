"""The kernel of products with a quantised matrix, in PTX, the assembly language of NVIDIA's GPUs.

A warp has 16 rows of the matrix and takes *spans* of them, eight blocks each, one in a turn. Codes
are exact in bfloat16, so tensor cores multiply them as they are. The eight columns of their
smallest product are the blocks of a span: column j has the values of x that meet block j, and zeros
elsewhere. So a span is one chain of products that ends with a sum of each block, and each sum meets
its scale once, in float32: exact but for the order of sums.

A group of warps shares a tile of rows, each with spans of its own, and goes from tile to tile. What
a warp needs in later turns is on its way to shared memory meanwhile; x is there from the beginning.
Of those products a lane has row `row` of eight and the one eight below, and a quarter of the
columns; it multiplies 16 bytes of codes of both rows at a time, so a span takes `sets` of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from jaxllm.gguf.blocks import BlockType
from jaxllm.models.ptx import Writer
from jaxllm.models.quantised import BLOCKS, ROWS, WARPS

LANES = 32  # of a warp
AHEAD = 4  # spans of a warp that are on their way, at most
MULTIPROCESSORS = 132


class Scale(NamedTuple):
    """A part that is not codes: its name, values that an element covers, and its bytes, those of
    a row, of what all warps have of a row in a turn, and that are copied of a row's span."""

    name: str
    packs: int
    item: int
    row: int
    turn: int
    copied: int


class Copy(NamedTuple):
    """Copies of a scale, and of another of its size if there is one: where the first begins in
    device memory, where it goes, bytes beyond that, and which lanes copy (all, if "")."""

    scale: Scale
    begin: str
    to: str
    offset: int
    half: str


class Program(Writer):
    """The kernel for x [n, in] times a matrix of this shape [out, in].

    Operands are x, the parts, the result, memory of shapes `copies` (bytes) and `sums` that a group
    shares, and the numbers of the group and of the thread in it.
    """

    def __init__(self, kind: BlockType, n: int, shape: tuple[int, ...]):
        super().__init__()
        self.kind, self.n = kind, n
        self.out, self.size = shape
        names = ["x", *kind.parts, "found", "copies", "sums", "group", "thread"]
        self.given = {name: f"${i}" for i, name in enumerate(names)}
        self.codes = 128 // kind.bits  # of 16 bytes
        self.columns = BLOCKS * kind.block  # of a span
        self.bytes = self.columns * kind.bits // 8  # of its codes in a row
        self.sets = self.bytes // 64
        spans = self.size // self.columns
        self.turns = -(-spans // WARPS)
        self.rest = spans % WARPS  # spans of the last turn, 0 for one each
        tiles, at_once = self.out // ROWS, MULTIPROCESSORS * (3 if kind.minimum else 4)
        self.groups, self.more = min(tiles, at_once), tiles > at_once
        fitting = [d for d in range(1, AHEAD + 1) if self.turns % d == 0 or not self.more]
        self.ahead = min(fitting[-1], self.turns)
        self.scales = [self._scale(name) for name in kind.parts if name != "words"]
        # Bytes that a warp has of a span: codes and scales. And of x in all turns, with zeros
        # behind each row of a turn's part.
        self.buffer = ROWS * (self.bytes + sum(scale.copied for scale in self.scales))
        self.x_row = 2 * self.columns + 2 * self.codes
        self.x_turn = n * self.x_row
        self.copies = (WARPS, self.ahead * self.buffer + self.turns * self.x_turn)
        self.sums = (2, WARPS, n, ROWS)  # of a tile and the next

    def _scale(self, name: str) -> Scale:
        part = self.kind.parts[name]
        item, packs = part.dtype.itemsize, part.packs
        row, turn = self.size // packs * item, WARPS * self.columns // packs * item
        return Scale(name, packs, item, row, turn, max(4, turn // WARPS))

    def text(self) -> str:
        """The whole program."""
        self.place()
        self.place_x()
        self.place_scales()
        self.zero = self.get("mov.f32", "0f00000000", kind="f32")
        self.base = self.get("mov.b32", self.exponent())
        self.ones = self.get("mov.b32", "0x3f803f80")
        self.bring_x()
        for turn in range(self.ahead):
            self.bring(turn)
            self.do("cp.async.commit_group")
        self.lines.append("next:")
        following = self.add(self.tile, 1, self.groups)
        goes_on = self.get("setp.lt.u32", following, self.out // ROWS, kind="pred")
        total = [[self.zero] * 2 for _ in range(self.n)]
        for turn in range(self.turns):
            self.do(f"cp.async.wait_group {self.ahead - 1}")
            self.do("bar.warp.sync -1")
            total = self.fold(turn, total)
            self.do("bar.warp.sync -1")
            if turn + self.ahead < self.turns:
                self.bring(turn + self.ahead)
            elif self.more:
                if turn + self.ahead == self.turns:
                    self.advance()
                self.bring(turn + self.ahead - self.turns, goes_on)
            self.do("cp.async.commit_group")
        self.write(total)
        if self.more:
            self.do(f"mov.b32 {self.tile}, {following}")
            self.do(f"sub.u32 {self.sums_at}, {self.both_sums}, {self.sums_at}")
            self.do(f"@{goes_on} bra next")
        return self.block()

    def place(self) -> None:
        """Which part of the work a lane has, and where codes are copied and read."""
        thread = self.given["thread"]
        self.warp, self.lane = self.get("shr.u32", thread, 5), self.get("and.b32", thread, 31)
        self.row = self.get("shr.u32", self.lane, 2)
        self.quarter = self.get("and.b32", self.lane, 3)
        self.tile = self.get("mov.u32", self.given["group"])
        if self.rest:
            self.has = self.get("setp.lt.u32", self.warp, self.rest, kind="pred")
        self.own = self.add(self.given["copies"], self.warp, self.copies[1])
        # Two places for sums: one may be read while the other is written. Less the one it is other.
        self.sums_at = self.get("mov.b32", self.given["sums"])
        both = self.get("mul.lo.u32", self.sums_at, 2)
        self.both_sums = self.add(both, 1, 4 * WARPS * self.n * ROWS)
        # Lanes copy rows one after the other, each row's 16 bytes side by side. Those of odd rows
        # change places by fours, so that eight lanes read from all banks.
        across = self.bytes // 16
        self.down = LANES // across  # rows that are copied at a time
        row, chunk = self.get("div.u32", self.lane, across), self.get("rem.u32", self.lane, across)
        begin = self.far(self.given["words"], self._first(row), self.size * self.kind.bits // 8)
        begin = self.far(begin, self.warp, self.bytes)
        self.words = self.far(begin, chunk, 16)
        odd = self.get("and.b32", row, 1)
        chunk = self.get("xor.b32", chunk, self.get("mul.lo.u32", odd, 4))
        self.words_to = self.add(self.add(self.own, row, self.bytes), chunk, 16)
        odd = self.get("and.b32", self.row, 1)
        swapped = self.get("xor.b32", odd, 1)
        begin = self.add(self.add(self.own, self.row, self.bytes), self.quarter, 16)
        self.words_at = [self.add(begin, odd, 64), self.add(begin, swapped, 64)]

    def _first(self, row: str) -> str:
        """The matrix's row that is this one of the group's first tile."""
        return self.add(row, self.tile, ROWS)

    def place_x(self) -> None:
        """Where x is copied, a lane 16 bytes of a turn's part, and where it is read for the codes
        of each set: zeros, but for the one set where their block is the lane's column."""
        own = self.add(self.own, 1, self.ahead * self.buffer)
        self.zeros = self.add(own, 1, 2 * self.columns)
        self.vectors = []
        for s in range(self.sets):
            first = self.get("mul.lo.u32", self.add(self.quarter, 1, 4 * s), self.codes)
            column = self.get("div.u32", first, self.kind.block)
            meets = self.get("setp.eq.u32", column, self.row, kind="pred")
            self.vectors.append(self.get("selp.b32", self.add(own, first, 2), self.zeros, meets))
        self.x_to = self.add(own, self.lane, 16)
        self.x_from = self.far(
            self.far(self.given["x"], self.warp, 2 * self.columns), self.lane, 16
        )
        self.copies_x = self.get("setp.lt.u32", self.lane, self.columns // 8, kind="pred")
        blank = self.get("setp.lt.u32", self.lane, self.codes // 2, kind="pred")
        at = self.add(self.zeros, self.lane, 4)
        for row in range(self.turns * self.n):
            self.do(f"@{blank} st.shared.b32 [{at}+{row * self.x_row}], 0")

    def place_scales(self) -> None:
        """Where scales are copied, two alike at a time by 16 lanes each, and where read."""
        half, row = self.get("shr.u32", self.lane, 4), self.get("and.b32", self.lane, ROWS - 1)
        self.scale_copies: list[Copy] = []
        self.scales_at: dict[str, tuple[str, int]] = {}
        offset = ROWS * self.bytes
        for parts in self._pairs():
            count = parts[0].copied
            begins = [self._begin(scale, row) for scale in parts]
            to = self.add(self.add(self.own, row, count), half, ROWS * count * (len(parts) - 1))
            first = self.get("setp.eq.u32", half, 0, kind="pred")
            begin = self.get("selp.b64", begins[0], begins[-1], first, kind="b64")
            only = first if len(parts) == 1 else ""
            self.scale_copies.append(Copy(parts[0], begin, to, offset, only))
            for scale in parts:
                at = self.add(self.own, self.row, count)
                if count * WARPS > scale.turn:  # whichever half of the copied bytes it is
                    low = self.get("cvt.u32.u64", self._begin(scale, self.row, False))
                    at = self.add(at, self.get("and.b32", low, 3))
                pair = self.get("mul.lo.u32", self.quarter, 2 * self.kind.block)
                element = self.get("div.u32", pair, scale.packs)
                self.scales_at[scale.name] = self.add(at, element, scale.item), offset
                offset += ROWS * count

    def _pairs(self) -> Iterator[list[Scale]]:
        """Scales that are alike in all but their name, two at a time."""
        ordered = sorted(self.scales, key=lambda scale: scale[1:])
        for _, same in groupby(ordered, key=lambda scale: scale[1:]):
            parts = list(same)
            yield from (parts[i : i + 2] for i in range(0, len(parts), 2))

    def _begin(self, scale: Scale, row: str, aligned: bool = True) -> str:
        """Where a row's part begins that the warp has first."""
        begin = self.far(self.given[scale.name], self._first(row), scale.row)
        element = self.get("div.u32", self.get("mul.lo.u32", self.warp, self.columns), scale.packs)
        begin = self.far(begin, element, scale.item)
        return self.get("and.b64", begin, -4, kind="b64") if aligned else begin

    def at(self, turn: int, begin: str, each: int) -> tuple[str, int]:
        """Where a warp reads in a turn, given bytes a turn: a register and bytes beyond it. One
        that has no span then reads its first again."""
        beyond = turn * each
        if self.rest and turn == self.turns - 1:
            last = self.get("add.u64", begin, beyond, kind="b64")
            return self.get("selp.b64", last, begin, self.has, kind="b64"), 0
        return begin, beyond

    def copy(self, to: tuple[str, int], at: tuple[str, int], count: int, on: str = "") -> None:
        """Begin to copy bytes from device memory to shared memory, on a condition if given."""
        condition = f"@{on} " if on else ""
        here, there = f"[{to[0]}+{to[1]}]", f"[{at[0]}+{at[1]}]"
        self.do(f"{condition}cp.async.ca.shared.global {here}, {there}, {count}")

    def bring_x(self) -> None:
        """Begin to copy what a warp needs of x: by way of the L1 cache, as all groups read it."""
        for turn in range(self.turns):
            at, beyond = self.at(turn, self.x_from, WARPS * 2 * self.columns)
            for r in range(self.n):
                to = self.x_to, turn * self.x_turn + r * self.x_row
                self.copy(to, (at, beyond + 2 * self.size * r), 16, self.copies_x)

    def bring(self, turn: int, goes_on: str = "") -> None:
        """Begin to copy the codes and scales of a turn, perhaps on a condition."""
        buffer, condition = turn % self.ahead * self.buffer, f"@{goes_on} " if goes_on else ""
        at, beyond = self.at(turn, self.words, WARPS * self.bytes)
        for row in range(0, ROWS, self.down):
            to = f"[{self.words_to}+{buffer + row * self.bytes}]"
            source = f"[{at}+{beyond + row * self.size * self.kind.bits // 8}]"
            self.do(f"{condition}cp.async.cg.shared.global.L2::128B {to}, {source}, 16")
        for each in self.scale_copies:
            on = goes_on
            if each.half:
                on = self.get("and.pred", on, each.half, kind="pred") if on else each.half
            source = self.at(turn, each.begin, each.scale.turn)
            self.copy((each.to, buffer + each.offset), source, each.scale.copied, on)

    def advance(self) -> None:
        """Go on to where the rows of the next tile begin."""
        rows = self.groups * ROWS
        begins = {self.words: self.size * self.kind.bits // 8}
        begins |= {each.begin: each.scale.row for each in self.scale_copies}
        for begin, row in begins.items():
            self.do(f"add.u64 {begin}, {begin}, {rows * row}")

    def fold(self, turn: int, total: list[list[str]]) -> list[list[str]]:
        """For each row of x, sums of a lane's two rows of the matrix, with those of a turn."""
        buffer = turn % self.ahead * self.buffer
        scale = self.scale("d", buffer)
        shift = self.scale("m", buffer) if self.kind.minimum else None
        sums = [[[self.zero] * 4 for _ in range(2)] for _ in range(self.n)]  # two chains
        plain = [[self.zero] * 4 for _ in range(self.n)]  # sums of x
        for s in range(self.sets):
            at, beyond = self.words_at[s % 2], buffer + s // 2 * 128
            words = (self.load(at, beyond + i * 8 * self.bytes) for i in range(2))
            upper, lower = (self.pairs(four) for four in words)
            for r in range(self.n):
                b = self.x_of(turn, s, r)
                for k in range(0, len(b), 2):
                    a = [upper[k], lower[k], upper[k + 1], lower[k + 1]]
                    chain = k // 2 % 2
                    sums[r][chain] = self.multiply(sums[r][chain], a, b[k : k + 2])
                    if shift is not None:
                        plain[r] = self.multiply(plain[r], [self.ones] * 4, b[k : k + 2])
        found = []
        for r, rows in enumerate(total):
            both = [self.get("add.f32", *pair, kind="f32") for pair in zip(*sums[r], strict=True)]
            found.append([])
            for i, value in enumerate(rows):
                for j in range(2):
                    value = self.get("fma.rn.f32", both[2 * i + j], scale[i][j], value, kind="f32")
                    if shift is not None:
                        value = self.get("fma.rn.f32", plain[r][j], shift[i][j], value, kind="f32")
                found[-1].append(value)
        return found

    def scale(self, name: str, buffer: int) -> list[list[str]]:
        """Scales or shifts of a lane's two rows and two blocks, in float32."""
        own = self.floats(name, buffer)
        if not self.kind.nested:
            return own
        inner = self.floats(f"sub_{name}", buffer)
        return [
            [self.get("mul.f32", *pair, kind="f32") for pair in zip(*rows, strict=True)]
            for rows in zip(own, inner, strict=True)
        ]

    def floats(self, name: str, buffer: int) -> list[list[str]]:
        """A part's values for a lane's two rows and two blocks, in float32."""
        scale = next(scale for scale in self.scales if scale.name == name)
        at, offset = self.scales_at[name]
        sign = "s" if self.kind.parts[name].dtype.kind == "i" else "u"
        found = []
        for i in range(2):
            place = f"[{at}+{buffer + offset + i * 8 * scale.copied}]"
            if scale.item == 1:
                both = self.get("ld.shared.u16", place)
                bytes_ = (self.get(f"bfe.{sign}32", both, 8 * j, 8) for j in range(2))
                found.append([self.get(f"cvt.rn.f32.{sign}32", b, kind="f32") for b in bytes_])
                continue
            halves = [self.new("b16") for _ in range(2 if scale.packs == self.kind.block else 1)]
            many, into = (".v2", f"{{{', '.join(halves)}}}") if len(halves) > 1 else ("", halves[0])
            self.do(f"ld.shared{many}.b16 {into}, {place}")
            own = [self.get("cvt.f32.f16", half, kind="f32") for half in halves]
            found.append(own * (2 // len(own)))
        return found

    def exponent(self) -> str:
        """What codes become bfloat16 by, and is subtracted from them then: 128, and 8 for the sign
        of codes of four bits."""
        return "0x43084308" if self.kind.bits == 4 and self.kind.signed else "0x43004300"

    def pairs(self, words: list[str]) -> list[str]:
        """The codes of four words in bfloat16, two a register, in the order of their values: with
        4 bits the low halves of all bytes, then the high ones."""
        spread = [
            self.get("prmt.b32", word, self.base, bytes_)
            for word in words
            for bytes_ in ("0x5150", "0x5352")
        ]
        if self.kind.bits == 4:
            return [self.nibbles(two, shift) for shift in (0, 4) for two in spread]
        return [self.wide(two) for two in spread]

    def nibbles(self, spread: str, shift: int) -> str:
        """(bits and mask) or, for signed codes, exclusive or the exponent; less the exponent."""
        moved = self.get("shr.u32", spread, shift) if shift else spread
        table = (0xF0 & 0xCC) ^ 0xAA if self.kind.signed else (0xF0 & 0xCC) | 0xAA
        made = self.get("lop3.b32", moved, "0x000f000f", self.base, table)
        return self.get("sub.bf16x2", made, self.base)

    def wide(self, spread: str) -> str:
        """128 and the low seven bits, less 128 or, by the eighth bit of signed codes, 256."""
        if not self.kind.signed:
            return self.get("sub.bf16x2", spread, self.base)
        low = self.get("and.b32", spread, "0xff7fff7f")
        return self.get("sub.bf16x2", low, self.get("and.b32", spread, "0xff80ff80"))

    def x_of(self, turn: int, s: int, r: int) -> list[str]:
        """Row r of x where it meets a lane's codes of set s, two values a register."""
        begin = self.vectors[s]
        if self.rest and turn == self.turns - 1:
            begin = self.get("selp.b32", begin, self.zeros, self.has)
        beyond = turn * self.x_turn + r * self.x_row
        loads = (self.load(begin, beyond + i) for i in range(0, 2 * self.codes, 16))
        return [register for four in loads for register in four]

    def multiply(self, sums: list[str], a: list[str], b: list[str]) -> list[str]:
        """sums [16, 8] and what a [16, 16] times b [16, 8] adds, as lanes have them."""
        found = [self.new("f32") for _ in range(4)]
        operands = (f"{{{', '.join(each)}}}" for each in (found, a, b, sums))
        name = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
        self.do(f"{name} {', '.join(operands)}")
        return found

    def write(self, total: list[list[str]]) -> None:
        """Add the lanes of a row, then the warps, and write a tile of the result."""
        leads = self.get("setp.eq.u32", self.quarter, 0, kind="pred")
        own = self.add(self.add(self.sums_at, self.warp, 4 * self.n * ROWS), self.row, 4)
        for r, rows in enumerate(total):
            for i, value in enumerate(rows):
                for distance in (1, 2):
                    other = self.get("shfl.sync.bfly.b32", value, distance, 31, -1)
                    value = self.get("add.f32", value, other, kind="f32")
                self.do(f"@{leads} st.shared.f32 [{own}+{4 * (ROWS * r + 8 * i)}], {value}")
        self.do("bar.sync 0")
        thread = self.given["thread"]
        finishes = self.get("setp.lt.u32", thread, self.n * ROWS, kind="pred")
        at, value = self.add(self.sums_at, thread, 4), self.zero
        for warp in range(WARPS):
            part = self.get("mov.f32", self.zero, kind="f32")
            self.do(f"@{finishes} ld.shared.f32 {part}, [{at}+{4 * warp * self.n * ROWS}]")
            value = self.get("add.f32", value, part, kind="f32")
        r, row = self.get("shr.u32", thread, 4), self.get("and.b32", thread, ROWS - 1)
        to = self.far(self.given["found"], self.add(self._first(row), r, self.out), 4)
        self.do(f"@{finishes} st.global.f32 [{to}], {value}")
