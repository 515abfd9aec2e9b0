"""A product of a few rows with a matrix in PTX, the assembly language of NVIDIA's GPUs: one step of
a kernel's chain (`chain.py`).

A warp has 16 rows of the matrix and takes *spans* of them, eight blocks each, one in a turn. Codes
are exact in float16, and so is x times a power of two, but for values that are 2^26 times smaller
than the largest that a warp has; tensor cores multiply them. The eight columns of their smallest
product are the blocks of a span: column j has the values of x that meet block j, and zeros
elsewhere. So a span is one chain of products that ends with a sum of each block, and each sum meets
its scale once, in float32: exact but for the order of sums. A matrix in bfloat16 has no scales and
is multiplied as it is.

A team of warps shares a tile of rows, each with spans of its own, and goes from tile to tile. What
a warp needs in later turns is on its way to shared memory meanwhile; x is there from the beginning.
Of those products a lane has row `row` of eight and the one eight below, and a quarter of the
columns; it multiplies 16 bytes of codes of both rows at a time, so a span takes `sets` of them.
"""

from __future__ import annotations

from jaxllm.models.ptx.matrix import Matrix
from jaxllm.models.ptx.rows import Rows
from jaxllm.models.ptx.share import BLOCKS, LANES, ROWS, Lanes, Turned
from jaxllm.models.ptx.writer import float_bits


class Product(Rows, Matrix):
    """A step of a chain for n rows of x, which so many groups of threads share."""

    def begin(self, lanes: Lanes, ahead: int, waits: bool, idle: str) -> None:
        """What does not depend on x. Where x has to be waited for, begin to copy the matrix: one
        turn, which keeps memory busy, as what a group asks for comes in turn. Groups that have long
        to wait bring others when those before have come."""
        self.ahead, self.waits, self.long = ahead, waits, idle
        self.place(lanes)
        self.read_norm()
        self.place_codes()
        self.place_scales()
        if waits:
            self.bring(0)
        if waits and idle:
            self.do(f"@!{idle} bra {self.label}begun")
            for turn in range(1, ahead):
                self.do("cp.async.wait_group 0")
                self.bring(turn)
            self.mark(f"{self.label}begun")

    def run(self) -> None:
        """Read x and do all tiles of a team."""
        self.read_x()
        self.do("bar.warp.sync -1")  # or else copies are moved before what is read
        if not self.waits:
            self.bring(0)
        self.place_x()
        if self.long:
            self.do(f"@{self.long} bra {self.label}brought")
        for turn in range(1, self.ahead):
            self.bring(turn)
        self.mark(f"{self.label}brought")
        self.put_x()
        none = self.get("setp.ge.u32", self.tile, self.tiles, kind="pred")
        self.do(f"@{none} bra {self.label}done")
        self.mark(f"{self.label}tile")
        count = 2 if self.scales else 4  # sums of a row of x
        total = [
            [self.get("mov.f32", self.zero, kind="f32") for _ in range(count)]
            for _ in range(self.n)
        ]
        for turn in range(self.turns):
            self.do(f"cp.async.wait_group {self.ahead - 1}")
            self.do("bar.warp.sync -1")
            partly = self.rest and turn == self.turns - 1
            if partly:
                none = self.get("setp.ge.u32", self.member, self.rest, kind="pred")
                self.do(f"@{none} bra {self.label}folded")
            self.fold(turn, total)
            if partly:
                self.mark(f"{self.label}folded")
            self.do("bar.warp.sync -1")
            self.bring(turn + self.ahead)
        self.write(total)
        self.advance()
        more = self.get("setp.lt.u32", self.tile, self.tiles, kind="pred")
        self.do(f"@{more} bra {self.label}tile")
        self.mark(f"{self.label}done")

    def fold(self, turn: int, total: list[list[str]]) -> None:
        """For each row of x, add a turn's sums to those of a lane's two rows of the matrix: each
        once, or in two parts if there are no scales."""
        at = [self.add(place, self.slot) for place in self.words_at]
        beyond = turn * self.x_turn
        excess = [self._of_blocks(beyond + r * self.x_row) for r in range(self.n)]
        sums = [self._begun(own) for own in excess]
        kind = "f16" if self.scales else "bf16"
        for s in range(self.sets):
            offset = s // 2 * 128
            words = (self.load(at[s % 2], offset + i * 8 * self.bytes) for i in range(2))
            upper, lower = (self.pairs(four) for four in words)
            for r in range(self.n):
                b = self.x_of(self.vectors[s], beyond + r * self.x_row)
                for k in range(0, len(b), 2):
                    a = [upper[k], lower[k], upper[k + 1], lower[k + 1]]
                    chain = k // 2 % 2
                    sums[r][chain] = self.multiply(sums[r][chain], a, b[k : k + 2], kind)
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

    def _begun(self, excess: list[str]) -> list[list[str]]:
        """What two chains of products begin with."""
        less = [self.get("neg.f32", value, kind="f32") for value in excess]
        return [less * 2 if less else [self.zero] * 4, [self.zero] * 4]

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
        thread = self.remainder(lanes.thread, self.team * LANES)
        finishes = self.get("setp.lt.u32", thread, self.n * ROWS, kind="pred")
        r, row = self.get("shr.u32", thread, 4), self.get("and.b32", thread, ROWS - 1)
        width = self.step.out // 2 if self.step.gated else self.step.out
        at = self.get("add.u32", self.below(row), self.first_row())
        place = self.add(at, r, width)
        value, cos, sin = self.zero, "", ""
        if self.step.added:
            half = self.get("mov.b16", 0, kind="b16")
            there = self.far(self.given[self.step.added], place, 2)
            self.do(f"@{finishes} ld.global.cg.b16 {half}, [{there}]")
            value = self.get("cvt.f32.bf16", half, kind="f32")
        if self.step.turned:
            cos, sin = self.angle(self.step.turned, r, row, at, finishes)
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
        if self.step.turned:
            distance = ROWS // 2 if self.step.turned.halves else 1
            other = self.get("shfl.sync.bfly.b32", value, distance, 31, -1, kind="f32")
            value = self.get("mul.f32", value, cos, kind="f32")
            value = self.get("fma.rn.f32", other, sin, value, kind="f32")
        half = self.get("cvt.rn.bf16.f32", value, kind="b16")
        to = self.far(self.given[self.step.found], place, 2)
        self.do(f"@{finishes} st.global.b16 [{to}], {half}")
        self.mark(f"{self.label}written")
        self.do(f"sub.u32 {self.sums_at}, {self.both_sums}, {self.sums_at}")

    def angle(self, turned: Turned, r: str, row: str, place: str, on: str) -> tuple[str, str]:
        """By what a value and the other of its pair are multiplied to turn it: one and zero for
        others."""
        at = self.remainder(place, turned.rows)
        half = turned.rows // 2
        pair = self.remainder(at, half) if turned.halves else self.quotient(at, 2)
        pair = self.add(pair, r, half)
        head = self.quotient(place, turned.rows)
        part = self.remainder(head, turned.per_head + 2)
        turns = self.get("setp.lt.u32", part, turned.per_head + 1, kind="pred")
        turns = self.get("and.pred", turns, on, kind="pred")
        cos = self.get("mov.f32", float_bits(1.0), kind="f32")
        sin = self.get("mov.f32", self.zero, kind="f32")
        for value, name in ((cos, turned.cos), (sin, turned.sin)):
            self.do(f"@{turns} ld.global.f32 {value}, [{self.far(self.given[name], pair, 4)}]")
        second = self.get("and.b32", row, ROWS // 2 if turned.halves else 1)
        first = self.get("setp.eq.u32", second, 0, kind="pred")
        less = self.get("neg.f32", sin, kind="f32")
        return cos, self.get("selp.f32", less, sin, first, kind="f32")

    def silu(self, value: str) -> str:
        """value / (1 + exp(-value))."""
        power = self.get("mul.f32", value, float_bits(-1.4426950408889634), kind="f32")
        power = self.get("ex2.approx.f32", power, kind="f32")
        below = self.get("add.f32", power, float_bits(1.0), kind="f32")
        return self.get("div.full.f32", value, below, kind="f32")
