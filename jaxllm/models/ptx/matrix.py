"""A warp's part of a matrix: copied to shared memory ahead of its turn, and read from there."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from jaxllm.models.ptx.share import LANES, ROWS, WARPS, Scale, Share


class Copy(NamedTuple):
    """Copies of a scale, and of another of its size if there is one: where they begin in device
    memory and in the shared, and which lanes copy (all, if "")."""

    scale: Scale
    begin: str
    to: str
    half: str


class Matrix(Share):
    """Codes and scales of a team's tiles of rows."""

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
        row = self.quotient(lanes.lane, across)
        chunk = self.remainder(lanes.lane, across)
        begin = self.far(self.given[self.step.parts[0]], self._first(row), self.row_bytes)
        begin = self.far(begin, self.member, self.bytes)
        self.words = self.far(begin, chunk, 16)
        odd = self.get("and.b32", row, 1)
        chunk = self.get("xor.b32", chunk, self.get("mul.lo.u32", odd, 4))
        self.words_to = self.add(self.add(lanes.copies, row, self.bytes), chunk, 16)
        self.words_at = self.halves_at(self.bytes)

    def row(self, row: int) -> int:
        """How far a tile's row is below its first."""
        return row + (self.apart - ROWS // 2 if row >= ROWS // 2 else 0)

    def _first(self, row: str) -> str:
        """The matrix's row that is `row` of the team's first tile, of a register."""
        return self.get("add.u32", self.below(row), self.first_row())

    def below(self, row: str) -> str:
        """`row` of a register."""
        lower = self.get("setp.ge.u32", row, ROWS // 2, kind="pred")
        return self.add(row, self.get("selp.b32", self.row(ROWS) - ROWS, 0, lower))

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
                element = self.quotient(pair, scale.packs)
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
        column = self.get("mul.lo.u32", self.member, self.columns)
        element = self.quotient(column, scale.packs)
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
        self.advance_slot()

    def advance(self) -> None:
        """Go on to the team's next tile."""
        rows = self.stride * self.tile_rows
        begins = {self.words: self.row_bytes}
        begins |= {each.begin: each.scale.row for each in self.scale_copies}
        for begin, row in begins.items():
            self.do(f"add.u64 {begin}, {begin}, {rows * row}")
        self.do(f"add.u32 {self.tile}, {self.tile}, {self.stride}")

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
        moved = [each for word in words for each in (word, self.get("shr.u32", word, 8))]
        masks = (0xFF,) if self.kind.bits == 8 else (0x0F, 0xF0)
        return [
            self.bits(word, mask, excess)
            for mask, excess in zip(masks, self.excess, strict=False)
            for word in moved
        ]

    def bits(self, word: str, mask: int, excess: int) -> str:
        """(bits and mask) exclusive or what is in excess as float16, of both halves of a word."""
        base = 0x6400 + excess - 1024  # whose low bits count by one from 1024 on
        return self.get("lop3.b32", word, mask * 0x10001, base * 0x10001, (0xF0 & 0xCC) ^ 0xAA)
