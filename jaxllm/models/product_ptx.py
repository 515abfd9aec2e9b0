"""A product of a few rows with a matrix in PTX, the assembly language of NVIDIA's GPUs: one step of
a kernel's chain (`chain_ptx.py`).

A warp has 16 rows of the matrix and takes *spans* of them, eight blocks each, one in a turn. Codes
are exact in bfloat16, so tensor cores multiply them as they are. The eight columns of their
smallest product are the blocks of a span: column j has the values of x that meet block j, and zeros
elsewhere. So a span is one chain of products that ends with a sum of each block, and each sum meets
its scale once, in float32: exact but for the order of sums.

A team of warps shares a tile of rows, each with spans of its own, and goes from tile to tile. What
a warp needs in later turns is on its way to shared memory meanwhile; x is there from the beginning.
Of those products a lane has row `row` of eight and the one eight below, and a quarter of the
columns; it multiplies 16 bytes of codes of both rows at a time, so a span takes `sets` of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from jaxllm.gguf.blocks import BlockType
from jaxllm.models.ptx import Writer, float_bits

LANES = 32  # of a warp
WARPS = 16  # of a group: all that a multiprocessor runs
ROWS, BLOCKS = 16, 8  # of the matrix, and in a span


@dataclass(frozen=True)
class Step:
    """A product with a matrix [out, size], by the names of operands: what it reads, the matrix's
    parts, and what it writes.

    What it reads is normalised by a root mean square where there is a norm's weight. What it writes
    is the product, with something of its shape added, or, gated, silu of its first half times the
    other.
    """

    kind: BlockType
    out: int
    size: int
    x: str
    parts: tuple[str, ...]
    found: str
    norm: str = ""
    added: str = ""
    gated: bool = False

    @property
    def columns(self) -> int:
        """Of a span."""
        return BLOCKS * self.kind.block

    @property
    def spans(self) -> int:
        return self.size // self.columns

    def warps(self, groups: int) -> int:
        """How many share a tile, so that so many groups are done soonest."""
        tiles = self.out // ROWS

        def turns(warps: int) -> int:
            return -(-tiles // (groups * WARPS // warps)) * -(-self.spans // warps)

        return min((4, 8, 16), key=turns)


class Scale(NamedTuple):
    """A part that is not codes: its name, its operand, values that an element covers, and its
    bytes: those of an element, of a row, of what a team has of a row in a turn, and that are
    copied of a row's span."""

    name: str
    operand: str
    packs: int
    item: int
    row: int
    turn: int
    copied: int


class Copy(NamedTuple):
    """Copies of a scale, and of another of its size if there is one: where they begin in device
    memory and in the shared, and which lanes copy (all, if "")."""

    scale: Scale
    begin: str
    to: str
    half: str


class Lanes(NamedTuple):
    """Which part of the work a thread has, in registers, and where shared memory begins: copies on
    their way, x, sums of tiles and sums of squares."""

    group: str
    thread: str
    warp: str
    lane: str
    row: str
    quarter: str
    copies: str
    x: str
    sums: str
    squares: str


class Product(Writer):
    """A step of a chain for n rows of x, which so many groups of threads share."""

    def __init__(
        self, chain: Writer, step: Step, n: int, groups: int, given: dict[str, str], eps: float
    ):
        super().__init__(chain)
        kind = self.kind = step.kind
        self.step, self.n, self.given, self.eps = step, n, given, eps
        self.codes = 128 // kind.bits  # of 16 bytes
        self.columns = step.columns
        self.bytes = self.columns * kind.bits // 8  # of a span's codes in a row
        self.row_bytes = step.size * kind.bits // 8
        self.sets = self.bytes // 64
        self.team = step.warps(groups)
        self.turns = -(-step.spans // self.team)
        self.rest = step.spans % self.team  # warps that have a span in the last turn, 0 for all
        self.tiles = step.out // ROWS
        self.stride = groups * WARPS // self.team  # tiles between two of a team
        self.scales = [
            self._scale(name, operand)
            for name, operand in zip(kind.parts, step.parts, strict=True)
            if name != "words"
        ]
        # What codes of the first and of the second half of a block have in excess: see `pairs`.
        zero = 1 << kind.bits - 1 if kind.signed else 0
        self.excess = 1024 + zero, 1024 + zero * (16 if kind.bits == 4 else 1)
        # Bytes that a warp has of a span: codes and scales. And of x in all turns, with zeros and
        # the sums of blocks behind each row of a turn's part.
        self.buffer = ROWS * (self.bytes + sum(scale.copied for scale in self.scales))
        self.x_row = 2 * self.columns + 2 * self.codes + 8 * BLOCKS
        self.x_turn = n * self.x_row
        self.x_bytes = self.team * self.turns * self.x_turn
        self.label = f"{step.found}{len(self.lines)}"

    def _scale(self, name: str, operand: str) -> Scale:
        part = self.kind.parts[name]
        item, packs = part.dtype.itemsize, part.packs
        row, turn = self.step.size // packs * item, self.team * self.columns // packs * item
        return Scale(name, operand, packs, item, row, turn, max(4, turn // self.team))

    def begin(self, lanes: Lanes, ahead: int, waits: bool) -> None:
        """What does not depend on x. Where x has to be waited for, begin to copy what is needed of
        the matrix in half of the turns that may be ahead."""
        self.lanes, self.ahead = lanes, ahead
        self.zero = self.get("mov.f32", "0f00000000", kind="f32")
        self.place()
        self.gains = [self._gain(turn) for turn in range(self.turns)] if self.step.norm else []
        self.place_codes()
        self.place_scales()
        self.brought = ahead // 2 if waits else 0
        for turn in range(self.brought):
            self.bring(turn)

    def run(self) -> None:
        """Read x and do all tiles of a team. What a group asks for comes in turn, so x is asked for
        before more of the matrix."""
        self.read_x()
        self.do("bar.warp.sync -1")  # or else copies are moved before what is read
        for turn in range(self.brought, self.ahead):
            self.bring(turn)
        self.place_x()
        self.put_x()
        self.do(f"@{self._beyond(0)} bra {self.label}done")
        self.mark(f"{self.label}tile")
        count = 2 if self.scales else 4  # sums of a row of x
        total = [
            [self.get("mov.f32", self.zero, kind="f32") for _ in range(count)]
            for _ in range(self.n)
        ]
        for turn in range(self.turns):
            self.do(f"cp.async.wait_group {self.ahead - 1}")
            self.do("bar.warp.sync -1")
            if self.rest and turn == self.turns - 1:
                self.do(f"@{self.has_none} bra {self.label}folded")
            self.fold(turn, total)
            if self.rest and turn == self.turns - 1:
                self.mark(f"{self.label}folded")
            self.do("bar.warp.sync -1")
            self.bring(turn + self.ahead)
        self.write(total)
        rows = self.stride * self.tile_rows
        begins = {self.words: self.row_bytes}
        begins |= {each.begin: each.scale.row for each in self.scale_copies}
        for begin, row in begins.items():
            self.do(f"add.u64 {begin}, {begin}, {rows * row}")
        self.do(f"add.u32 {self.tile}, {self.tile}, {self.stride}")
        more = self.get("setp.lt.u32", self.tile, self.tiles, kind="pred")
        self.do(f"@{more} bra {self.label}tile")
        self.mark(f"{self.label}done")

    def _beyond(self, tiles: int) -> str:
        """Whether so many tiles on is past the last."""
        return self.get("setp.ge.u32", self.tile, self.tiles - tiles * self.stride, kind="pred")

    def place(self) -> None:
        """Which tiles and spans a warp has."""
        lanes = self.lanes
        self.team_of = self.get("div.u32", lanes.warp, self.team)
        self.member = self.get("rem.u32", lanes.warp, self.team)
        self.tile = self.add(lanes.group, self.team_of, self.stride * self.team // WARPS)
        if self.rest:
            self.has = self.get("setp.lt.u32", self.member, self.rest, kind="pred")
            self.has_none = self.get("setp.ge.u32", self.member, self.rest, kind="pred")

    def place_codes(self) -> None:
        """Where codes are copied and read, and where sums are written."""
        lanes = self.lanes
        self.slot = self.get("mov.b32", 0)  # where in the ring of copies a turn's are
        # Two places for sums: one may be read while the other is written. Less the one it is other.
        self.sums_at = self.get("mov.b32", lanes.sums)
        both = self.get("mul.lo.u32", self.sums_at, 2)
        self.both_sums = self.add(both, 1, 4 * WARPS * self.n * ROWS)
        # Lanes copy rows one after the other, each row's 16 bytes side by side. Those of odd rows
        # change places by fours, so that eight lanes read from all banks.
        across = self.bytes // 16
        self.down = LANES // across  # rows that are copied at a time
        row, chunk = (
            self.get("div.u32", lanes.lane, across),
            self.get("rem.u32", lanes.lane, across),
        )
        begin = self.far(self.given[self.step.parts[0]], self._first(row), self.row_bytes)
        begin = self.far(begin, self.member, self.bytes)
        self.words = self.far(begin, chunk, 16)
        odd = self.get("and.b32", row, 1)
        chunk = self.get("xor.b32", chunk, self.get("mul.lo.u32", odd, 4))
        self.words_to = self.add(self.add(lanes.copies, row, self.bytes), chunk, 16)
        odd = self.get("and.b32", lanes.row, 1)
        swapped = self.get("xor.b32", odd, 1)
        begin = self.add(self.add(lanes.copies, lanes.row, self.bytes), lanes.quarter, 16)
        self.words_at = [self.add(begin, odd, 64), self.add(begin, swapped, 64)]

    def row(self, row: int) -> int:
        """The matrix's row that is this one of the first tile. Gated, the last eight of a tile are
        what those before them gate."""
        return row + (self.step.out // 2 - ROWS // 2 if self.step.gated and row >= ROWS // 2 else 0)

    @property
    def tile_rows(self) -> int:
        """Rows between two tiles."""
        return ROWS // 2 if self.step.gated else ROWS

    def _first(self, row: str) -> str:
        """`row` in the team's first tile, of a register."""
        if self.step.gated:
            lower = self.get("setp.ge.u32", row, ROWS // 2, kind="pred")
            row = self.add(row, self.get("selp.b32", self.row(ROWS) - ROWS, 0, lower))
        return self.add(row, self.tile, self.tile_rows)

    def place_scales(self) -> None:
        """Where scales are copied, two alike at a time by 16 lanes each, and where read."""
        lanes = self.lanes
        half, row = self.get("shr.u32", lanes.lane, 4), self.get("and.b32", lanes.lane, ROWS - 1)
        self.scale_copies: list[Copy] = []
        self.scales_at: dict[str, tuple[str, int]] = {}
        offset = ROWS * self.bytes
        for parts in self._pairs():
            count = parts[0].copied
            begins = [self._begin(scale, row) for scale in parts]
            to = self.add(self.add(lanes.copies, row, count), half, ROWS * count * (len(parts) - 1))
            first = self.get("setp.eq.u32", half, 0, kind="pred")
            begin = self.get("selp.b64", begins[0], begins[-1], first, kind="b64")
            only = first if len(parts) == 1 else ""
            self.scale_copies.append(Copy(parts[0], begin, self.add(to, 1, offset), only))
            for scale in parts:
                at = self.add(lanes.copies, lanes.row, count)
                if count * self.team > scale.turn:  # whichever half of the copied bytes it is
                    low = self.get("cvt.u32.u64", self._begin(scale, lanes.row, False))
                    at = self.add(at, self.get("and.b32", low, 3))
                pair = self.get("mul.lo.u32", lanes.quarter, 2 * self.kind.block)
                element = self.get("div.u32", pair, scale.packs)
                self.scales_at[scale.name] = self.add(at, element, scale.item), offset
                offset += ROWS * count

    def _pairs(self) -> Iterator[list[Scale]]:
        """Scales that are alike in all but their name, two at a time."""
        ordered = sorted(self.scales, key=lambda scale: scale[2:])
        for _, same in groupby(ordered, key=lambda scale: scale[2:]):
            parts = list(same)
            yield from (parts[i : i + 2] for i in range(0, len(parts), 2))

    def _begin(self, scale: Scale, row: str, aligned: bool = True) -> str:
        """Where a row's part begins that the warp has first."""
        begin = self.far(self.given[scale.operand], self._first(row), scale.row)
        element = self.get(
            "div.u32", self.get("mul.lo.u32", self.member, self.columns), scale.packs
        )
        begin = self.far(begin, element, scale.item)
        return self.get("and.b64", begin, -4, kind="b64") if aligned else begin

    def bring(self, turn: int) -> None:
        """Begin to copy the codes and scales of a turn, counted from the first of a tile."""
        tiles, turn = divmod(turn, self.turns)
        left = self.tiles - tiles * self.stride
        if left > 0:
            on = self.get("setp.lt.u32", self.tile, left, kind="pred")
            if self.rest and turn == self.turns - 1:
                on = self.get("and.pred", on, self.has, kind="pred")
            rows = tiles * self.stride * self.tile_rows
            beyond = rows * self.row_bytes + turn * self.team * self.bytes
            to = self.add(self.words_to, self.slot)
            for row in range(0, ROWS, self.down):
                source = f"[{self.words}+{beyond + self.row(row) * self.row_bytes}]"
                here = f"[{to}+{row * self.bytes}]"
                self.do(f"@{on} cp.async.cg.shared.global.L2::128B {here}, {source}, 16")
            for scale, begin, at, half in self.scale_copies:
                own = self.get("and.pred", on, half, kind="pred") if half else on
                source = f"[{begin}+{rows * scale.row + turn * scale.turn}]"
                here = self.add(at, self.slot)
                self.do(f"@{own} cp.async.ca.shared.global [{here}], {source}, {scale.copied}")
        self.do("cp.async.commit_group")
        self._advance_slot()

    def _advance_slot(self) -> None:
        """Go on to the next of the places that copies take in turn."""
        self.do(f"add.u32 {self.slot}, {self.slot}, {self.buffer}")
        end = self.get("setp.eq.u32", self.slot, self.ahead * self.buffer, kind="pred")
        self.do(f"selp.b32 {self.slot}, 0, {self.slot}, {end}")

    def _gain(self, turn: int) -> list[str]:
        """The norm's weights for what a lane has of x in a turn."""
        found = [self.get("mov.f32", self.zero, kind="f32") for _ in range(8)]
        at, on = self._own(self.given[self.step.norm], turn, 32)
        for i in (0, 4):
            four = ", ".join(found[i : i + 4])
            self.do(f"@{on} ld.global.v4.f32 {{{four}}}, [{at}+{4 * i}]")
        return found

    def _own(self, array: str, turn: int, each: int) -> tuple[str, str]:
        """Where a lane's eight values of a turn are, of so many bytes, and whether it has any."""
        has = self.get("setp.lt.u32", self.lanes.lane, self.columns // 8, kind="pred")
        if self.rest and turn == self.turns - 1:
            own = self.get("setp.lt.u32", self.member, self.rest, kind="pred")
            has = self.get("and.pred", has, own, kind="pred")
        span = self.add(self.member, 1, turn * self.team)
        at = self.far(array, span, self.columns // 8 * each)
        return self.far(at, self.lanes.lane, each), has

    def place_x(self) -> None:
        """Where x is read for the codes of each set: zeros, but for the one set where their block
        is the lane's column."""
        lanes = self.lanes
        self.own_x = self.add(lanes.x, self.member, self.turns * self.x_turn)
        zeros = self.add(self.own_x, 1, 2 * self.columns)
        self.vectors = []
        for s in range(self.sets):
            first = self.get("mul.lo.u32", self.add(lanes.quarter, 1, 4 * s), self.codes)
            column = self.get("div.u32", first, self.kind.block)
            meets = self.get("setp.eq.u32", column, lanes.row, kind="pred")
            self.vectors.append(self.get("selp.b32", self.add(self.own_x, first, 2), zeros, meets))
        self.sums_x = self.add(self.add(zeros, 1, 2 * self.codes), lanes.quarter, 8)
        blank = self.get("setp.lt.u32", lanes.lane, self.codes // 2, kind="pred")
        at = self.add(zeros, lanes.lane, 4)
        for row in range(self.turns * self.n):
            self.do(f"@{blank} st.shared.b32 [{at}+{row * self.x_row}], 0")

    def read_x(self) -> None:
        """Read what a warp needs of x, which other groups may have written."""
        self.places = [(turn, r) for turn in range(self.turns) for r in range(self.n)]
        self.values = []
        for turn, r in self.places:
            at, on = self._own(self.given[self.step.x], turn, 16)
            four = [self.get("mov.b32", 0) for _ in range(4)]
            place = f"[{at}+{2 * self.step.size * r}]"
            self.do(f"@{on} ld.relaxed.gpu.global.v4.b32 {{{', '.join(four)}}}, {place}")
            self.values.append((four, on))

    def put_x(self) -> None:
        """Write x to shared memory, normalised if there is a norm, as it is multiplied."""
        places, values = self.places, self.values
        wide = [[self.wide_of(word, odd) for word in four for odd in (0, 1)] for four, _ in values]
        if self.step.norm:
            wide = self.normalised(places, wide)
        if self.scales:
            wide = self.scaled(places, wide)
        to = self.add(self.own_x, self.lanes.lane, 16)
        narrow = "cvt.rn.f16x2.f32" if self.scales else "cvt.rn.bf16x2.f32"
        order = (0, 2, 1, 3, 4, 6, 5, 7) if self.scales else range(8)  # that of codes: see `pairs`
        for (turn, r), eight, (_, on) in zip(places, wide, values, strict=True):
            beyond = turn * self.x_turn + r * self.x_row
            if self.scales:
                self.write_sums(eight, beyond, on)
            ordered = [eight[i] for i in order]
            four = [self.get(narrow, ordered[i + 1], ordered[i]) for i in range(0, 8, 2)]
            self.do(f"@{on} st.shared.v4.b32 [{to}+{beyond}], {{{', '.join(four)}}}")
        self.do("bar.warp.sync -1")

    def scaled(self, places: list[tuple[int, int]], wide: list[list[str]]) -> list[list[str]]:
        """The same times a power of two for each row, so that float16 has room for what is much
        smaller than the largest. What meets the second half of a block of four bits is divided by
        16, as its codes are that much larger."""
        self.units = []
        factors = []
        for r in range(self.n):
            largest = self.zero
            for (_, own), eight in zip(places, wide, strict=True):
                for value in eight if own == r else ():
                    size = self.get("abs.f32", value, kind="f32")
                    largest = self.get("max.f32", largest, size, kind="f32")
            for distance in (16, 8, 4, 2, 1):
                other = self.get("shfl.sync.bfly.b32", largest, distance, 31, -1, kind="f32")
                largest = self.get("max.f32", largest, other, kind="f32")
            exponent = self.get("and.b32", self.get("mov.b32", largest), 0x7F800000)
            exponent = self.get("max.u32", exponent, 27 << 23)
            factor = self.get("sub.u32", 254 + 13 << 23, exponent)
            unit = self.get("sub.u32", exponent, 13 << 23)
            self.units.append(self.get("mov.b32", unit, kind="f32"))
            if self.kind.bits == 4:
                second = self._in_second_half()
                less = self.get("sub.u32", factor, 4 << 23)
                factor = self.get("selp.b32", less, factor, second)
            factors.append(self.get("mov.b32", factor, kind="f32"))
        return [
            [self.get("mul.f32", value, factors[r], kind="f32") for value in eight]
            for (_, r), eight in zip(places, wide, strict=True)
        ]

    def _in_second_half(self) -> str:
        """Whether what a lane has of x meets the second half of a block."""
        lanes = self.kind.block // 8  # that share a block
        place = self.get("rem.u32", self.lanes.lane, lanes)
        return self.get("setp.ge.u32", place, lanes // 2, kind="pred")

    def write_sums(self, eight: list[str], beyond: int, on: str) -> None:
        """What products with a block have in excess, and the sum of x over it if there is a shift;
        a lane has eight values of x."""
        values = eight
        while len(values) > 1:
            pairs = zip(values[::2], values[1::2], strict=True)
            values = [self.get("add.f32", *pair, kind="f32") for pair in pairs]
        lanes = self.kind.block // 8  # that share a block
        block = self.get("div.u32", self.lanes.lane, lanes)
        first = self.get("setp.eq.u32", self.get("rem.u32", self.lanes.lane, lanes), 0, kind="pred")
        first = self.get("and.pred", first, on, kind="pred")
        at = self.add(self.add(self.own_x, 1, 2 * self.columns + 2 * self.codes), block, 4)
        second = self._in_second_half()
        halves = [self.excess, (1, 16 if self.kind.bits == 4 else 1)][: 1 + self.kind.minimum]
        for i, (low, high) in enumerate(halves):
            times = self.get("selp.f32", float_bits(high), float_bits(low), second, kind="f32")
            total = self.get("mul.f32", values[0], times, kind="f32")
            total = self.over_lanes(total, tuple(1 << i for i in range(lanes.bit_length() - 1)))
            self.do(f"@{first} st.shared.f32 [{at}+{beyond + 4 * BLOCKS * i}], {total}")

    def normalised(self, places: list[tuple[int, int]], wide: list[list[str]]) -> list[list[str]]:
        """The same over the root of their mean square, times the norm's weight, in bfloat16."""
        squares = [self.get("mov.f32", self.zero, kind="f32") for _ in range(self.n)]
        for (_, r), eight in zip(places, wide, strict=True):
            for value in eight:
                self.do(f"fma.rn.f32 {squares[r]}, {value}, {value}, {squares[r]}")
        at = self.add(self.lanes.squares, self.lanes.warp, 4 * self.n)
        leads = self.get("setp.eq.u32", self.lanes.lane, 0, kind="pred")
        for r, own in enumerate(squares):
            total = self.over_lanes(own, (16, 8, 4, 2, 1))
            self.do(f"@{leads} st.shared.f32 [{at}+{4 * r}], {total}")
        self.meet()
        at = self.add(self.lanes.squares, self.team_of, 4 * self.n * self.team)
        roots = []
        for r in range(self.n):
            total = self.zero
            for warp in range(self.team):
                part = self.get("ld.shared.f32", f"[{at}+{4 * (warp * self.n + r)}]", kind="f32")
                total = self.get("add.f32", total, part, kind="f32")
            size, eps = float_bits(1 / self.step.size), float_bits(self.eps)
            mean = self.get("fma.rn.f32", total, size, eps, kind="f32")
            roots.append(self.get("rsqrt.approx.f32", mean, kind="f32"))
        found = []
        for (turn, r), eight in zip(places, wide, strict=True):
            made = [self.get("mul.f32", value, roots[r], kind="f32") for value in eight]
            pairs = zip(made, self.gains[turn], strict=True)
            made = [self.get("mul.f32", *pair, kind="f32") for pair in pairs]
            four = [self.get("cvt.rn.bf16x2.f32", made[i + 1], made[i]) for i in range(0, 8, 2)]
            found.append([self.wide_of(word, odd) for word in four for odd in (0, 1)])
        return found

    def wide_of(self, word: str, odd: int) -> str:
        """One of two values of bfloat16, in float32."""
        bits = self.get("and.b32", word, "0xffff0000") if odd else self.get("shl.b32", word, 16)
        return self.get("mov.b32", bits, kind="f32")

    def over_lanes(self, value: str, distances: tuple[int, ...]) -> str:
        """The sum of lanes at these distances."""
        for distance in distances:
            other = self.get("shfl.sync.bfly.b32", value, distance, 31, -1, kind="f32")
            value = self.get("add.f32", value, other, kind="f32")
        return value

    def meet(self) -> None:
        """Wait for the team."""
        number = self.add(self.team_of, 1)
        self.do(f"bar.sync {number}, {self.team * LANES}")

    def fold(self, turn: int, total: list[list[str]]) -> None:
        """For each row of x, add a turn's sums to those of a lane's two rows of the matrix: each
        once, or in two parts if there are no scales."""
        at = [self.add(place, self.slot) for place in self.words_at]
        beyond = turn * self.x_turn
        excess = [self._of_blocks(beyond + r * self.x_row) for r in range(self.n)]
        sums = [self._begun(own) for own in excess]
        for s in range(self.sets):
            offset = s // 2 * 128
            words = (self.load(at[s % 2], offset + i * 8 * self.bytes) for i in range(2))
            upper, lower = (self.pairs(four) for four in words)
            for r in range(self.n):
                b = self.x_of(self.vectors[s], beyond + r * self.x_row)
                for k in range(0, len(b), 2):
                    a = [upper[k], lower[k], upper[k + 1], lower[k + 1]]
                    chain = k // 2 % 2
                    sums[r][chain] = self.multiply(sums[r][chain], a, b[k : k + 2])
        scale = self.scale("d") if self.scales else None
        shift = self.scale("m") if self.kind.minimum else None
        for r, rows in enumerate(total):
            both = [self.get("add.f32", *pair, kind="f32") for pair in zip(*sums[r], strict=True)]
            if scale is None:
                for value, part in zip(rows, both, strict=True):
                    self.do(f"add.f32 {value}, {value}, {part}")
                continue
            for i, value in enumerate(rows):
                for j in range(2):
                    self.do(f"fma.rn.f32 {value}, {both[2 * i + j]}, {scale[i][j]}, {value}")
            if shift is None:
                continue
            blocks = self._of_blocks(beyond + r * self.x_row + 4 * BLOCKS)
            for i, value in enumerate(rows):
                for j in range(2):
                    self.do(f"fma.rn.f32 {value}, {blocks[j]}, {shift[i][j]}, {value}")

    def _of_blocks(self, beyond: int) -> list[str]:
        """What `write_sums` has for a lane's two blocks."""
        if not self.scales:
            return []
        found = [self.new("f32") for _ in range(2)]
        self.do(f"ld.shared.v2.f32 {{{', '.join(found)}}}, [{self.sums_x}+{beyond}]")
        return found

    def _begun(self, excess: list[str]) -> list[list[str]]:
        """What two chains of products begin with."""
        less = [self.get("neg.f32", value, kind="f32") for value in excess]
        return [less * 2 if less else [self.zero] * 4, [self.zero] * 4]

    def scale(self, name: str) -> list[list[str]]:
        """Scales or shifts of a lane's two rows and two blocks, in float32."""
        own = self.floats(name)
        if not self.kind.nested:
            return own
        inner = self.floats(f"sub_{name}")
        return [
            [self.get("mul.f32", *pair, kind="f32") for pair in zip(*rows, strict=True)]
            for rows in zip(own, inner, strict=True)
        ]

    def floats(self, name: str) -> list[list[str]]:
        """A part's values for a lane's two rows and two blocks, in float32."""
        scale = next(scale for scale in self.scales if scale.name == name)
        at, offset = self.scales_at[name]
        at = self.add(at, self.slot)
        sign = "s" if self.kind.parts[name].dtype.kind == "i" else "u"
        found = []
        for i in range(2):
            place = f"[{at}+{offset + i * 8 * scale.copied}]"
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

    def pairs(self, words: list[str]) -> list[str]:
        """The codes of four words as float16, two a register, in the order of x. As low bits of a
        mantissa under the exponent of 1024 they are that much in excess, and half their range with
        the sign turned. High halves of a byte stay where they are, 16 times as large."""
        if not self.scales:
            return words
        if self.kind.bits == 8:
            base = 0x64806480 if self.kind.signed else 0x64006400
            return [
                self.bits(word, 0x00FF00FF, base) for pair in self.moved(words) for word in pair
            ]
        low, high = (0x64086408, 0x64806480) if self.kind.signed else (0x64006400, 0x64006400)
        moved = [word for pair in self.moved(words) for word in pair]
        first = [self.bits(word, 0x000F000F, low) for word in moved]
        return first + [self.bits(word, 0x00F000F0, high) for word in moved]

    def moved(self, words: list[str]) -> list[tuple[str, str]]:
        """Words, and with their odd bytes in the place of the even ones."""
        return [(word, self.get("shr.u32", word, 8)) for word in words]

    def bits(self, word: str, mask: int, base: int) -> str:
        """(word and mask) exclusive or base."""
        return self.get("lop3.b32", word, mask, base, (0xF0 & 0xCC) ^ 0xAA)

    def x_of(self, begin: str, beyond: int) -> list[str]:
        """A row of x where it meets a lane's codes of a set, two values a register."""
        loads = (self.load(begin, beyond + i) for i in range(0, 2 * self.codes, 16))
        return [register for four in loads for register in four]

    def multiply(self, sums: list[str], a: list[str], b: list[str]) -> list[str]:
        """sums [16, 8] and what a [16, 16] times b [16, 8] adds, as lanes have them."""
        found = [self.new("f32") for _ in range(4)]
        operands = (f"{{{', '.join(each)}}}" for each in (found, a, b, sums))
        kind = "f16" if self.scales else "bf16"
        name = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
        self.do(f"{name} {', '.join(operands)}")
        return found

    def write(self, total: list[list[str]]) -> None:
        """Add the lanes of a row, then the warps, and write a tile of the result."""
        lanes = self.lanes
        leads = self.get("setp.eq.u32", lanes.quarter, 0, kind="pred")
        own = self.add(self.add(self.sums_at, lanes.warp, 4 * self.n * ROWS), lanes.row, 4)
        for r, rows in enumerate(total):
            if not self.scales:
                rows = [self.get("add.f32", *rows[i : i + 2], kind="f32") for i in (0, 2)]
            for i, value in enumerate(rows):
                value = self.over_lanes(value, (1, 2))
                if self.scales:
                    value = self.get("mul.f32", value, self.units[r], kind="f32")
                self.do(f"@{leads} st.shared.f32 [{own}+{4 * (ROWS * r + 8 * i)}], {value}")
        thread = self.get("rem.u32", lanes.thread, self.team * LANES)
        finishes = self.get("setp.lt.u32", thread, self.n * ROWS, kind="pred")
        r, row = self.get("shr.u32", thread, 4), self.get("and.b32", thread, ROWS - 1)
        width = self.step.out // 2 if self.step.gated else self.step.out
        place = self.add(self.add(row, self.tile, self.tile_rows), r, width)
        value = self.zero
        if self.step.added:
            half = self.get("mov.b16", 0, kind="b16")
            at = self.far(self.given[self.step.added], place, 2)
            self.do(f"@{finishes} ld.global.cg.b16 {half}, [{at}]")
            value = self.get("cvt.f32.bf16", half, kind="f32")
        self.meet()
        others = self.get("setp.ge.u32", self.member, -(-self.n * ROWS // LANES), kind="pred")
        self.do(f"@{others} bra {self.label}written")
        at = self.add(self.sums_at, self.team_of, 4 * self.team * self.n * ROWS)
        at = self.add(at, thread, 4)
        for warp in range(self.team):
            part = self.get("mov.f32", self.zero, kind="f32")
            self.do(f"@{finishes} ld.shared.f32 {part}, [{at}+{4 * warp * self.n * ROWS}]")
            value = self.get("add.f32", value, part, kind="f32")
        if self.step.gated:
            other = self.get("shfl.sync.down.b32", value, ROWS // 2, 31, -1, kind="f32")
            value = self.get("mul.f32", self.silu(value), other, kind="f32")
            upper = self.get("setp.lt.u32", row, ROWS // 2, kind="pred")
            finishes = self.get("and.pred", finishes, upper, kind="pred")
        half = self.get("cvt.rn.bf16.f32", value, kind="b16")
        to = self.far(self.given[self.step.found], place, 2)
        self.do(f"@{finishes} st.global.b16 [{to}], {half}")
        self.mark(f"{self.label}written")
        self.do(f"sub.u32 {self.sums_at}, {self.both_sums}, {self.sums_at}")

    def silu(self, value: str) -> str:
        """value / (1 + exp(-value))."""
        power = self.get("mul.f32", value, float_bits(-1.4426950408889634), kind="f32")
        power = self.get("ex2.approx.f32", power, kind="f32")
        below = self.get("add.f32", power, float_bits(1.0), kind="f32")
        return self.get("div.full.f32", value, below, kind="f32")
