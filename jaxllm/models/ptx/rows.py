"""The rows that a matrix is multiplied by: read, normalised, and written to shared memory."""

from __future__ import annotations

from jaxllm.models.ptx.share import BLOCKS, Share
from jaxllm.models.ptx.writer import float_bits

EVERY = (16, 8, 4, 2, 1)  # distances of lanes that make up a warp


class Rows(Share):
    """A warp's part of x, of which a lane has eight values of each turn and row."""

    def read_norm(self) -> None:
        """Read the norm's weights, if there is a norm."""
        self.gains = [self._gain(turn) for turn in range(self.turns)] if self.step.norm else []

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
            has = self.get("and.pred", has, self.has, kind="pred")
        span = self.add(self.member, 1, turn * self.team)
        at = self.far(array, span, self.columns // 8 * each)
        return self.far(at, self.lanes.lane, each), has

    def place_x(self) -> None:
        """Where x is read for the codes of each set: zeros, but for the one set where their block
        is the lane's column."""
        lanes = self.lanes
        self.own_x = self.add(lanes.x, self.member, self.n * self.x_row)
        zeros = self.add(self.own_x, 1, 2 * self.columns)
        self.vectors = []
        for s in range(self.sets):
            first = self.get("mul.lo.u32", self.add(lanes.quarter, 1, 4 * s), self.codes)
            column = self.quotient(first, self.kind.block)
            meets = self.get("setp.eq.u32", column, lanes.row, kind="pred")
            self.vectors.append(self.get("selp.b32", self.add(self.own_x, first, 2), zeros, meets))
        self.sums_x = self.add(self.add(zeros, 1, 2 * self.codes), lanes.quarter, 8)
        blank = self.get("setp.lt.u32", lanes.lane, self.codes // 2, kind="pred")
        at = self.add(zeros, lanes.lane, 4)
        for turn in range(self.turns):
            if self.rest and turn == self.turns - 1:
                blank = self.get("and.pred", blank, self.has, kind="pred")
            for r in range(self.n):
                self.do(f"@{blank} st.shared.b32 [{at}+{turn * self.x_turn + r * self.x_row}], 0")

    def read_x(self) -> None:
        """Read what a warp needs of x, which other groups may have written."""
        self.places = [(turn, r) for turn in range(self.turns) for r in range(self.n)]
        self.values = []
        for turn, r in self.places:
            at, on = self._own(self.given[self.step.x], turn, 16)
            self.values.append((self.read_four(on, f"{at}+{2 * self.step.size * r}"), on))

    def put_x(self) -> None:
        """Write x to shared memory, normalised if there is a norm, as it is multiplied."""
        words = [four for four, _ in self.values]
        if self.step.norm or self.scales:
            words = self._converted(words)
        to = self.add(self.own_x, self.lanes.lane, 16)
        for (turn, r), four, (_, on) in zip(self.places, words, self.values, strict=True):
            beyond = turn * self.x_turn + r * self.x_row
            self.do(f"@{on} st.shared.v4.b32 [{to}+{beyond}], {{{', '.join(four)}}}")
        self.do("bar.warp.sync -1")

    def _converted(self, words: list[list[str]]) -> list[list[str]]:
        """The same normalised, and as float16 where codes are."""
        wide = [[self.wide_of(word, odd) for word in four for odd in (0, 1)] for four in words]
        if self.step.norm:
            wide = self.normalised(self.places, wide)
        if self.scales:
            wide = self.scaled(self.places, wide)
            for (turn, r), eight, (_, on) in zip(self.places, wide, self.values, strict=True):
                self.write_sums(eight, turn * self.x_turn + r * self.x_row, on)
        narrow = "cvt.rn.f16x2.f32" if self.scales else "cvt.rn.bf16x2.f32"
        order = (0, 2, 1, 3, 4, 6, 5, 7) if self.scales else range(8)  # of codes: `Matrix.pairs`
        ordered = ([eight[i] for i in order] for eight in wide)
        return [[self.get(narrow, e[i + 1], e[i]) for i in range(0, 8, 2)] for e in ordered]

    def scaled(self, places: list[tuple[int, int]], wide: list[list[str]]) -> list[list[str]]:
        """The same times a power of two for each row, so that float16 has room for what is much
        smaller than the largest. What meets the second half of a block of four bits is divided by
        16, as its codes are that much larger."""
        self.units: list[str] = []  # of each row: what one is afterwards
        factors = []
        for r in range(self.n):
            largest = self.zero
            for (_, own), eight in zip(places, wide, strict=True):
                for value in eight if own == r else ():
                    size = self.get("abs.f32", value, kind="f32")
                    largest = self.get("max.f32", largest, size, kind="f32")
            largest = self.over_lanes(largest, EVERY, "max.f32")
            # The largest becomes 2^13 to 2^14, by the exponents of float32; zeros stay zeros.
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
        place = self.remainder(self.lanes.lane, lanes)
        return self.get("setp.ge.u32", place, lanes // 2, kind="pred")

    def write_sums(self, eight: list[str], beyond: int, on: str) -> None:
        """What products with a block have in excess, and the sum of x over it if there is a shift;
        a lane has eight values of x."""
        values = eight
        while len(values) > 1:
            pairs = zip(values[::2], values[1::2], strict=True)
            values = [self.get("add.f32", *pair, kind="f32") for pair in pairs]
        lanes = self.kind.block // 8  # that share a block
        block = self.quotient(self.lanes.lane, lanes)
        first = self.get("setp.eq.u32", self.remainder(self.lanes.lane, lanes), 0, kind="pred")
        first = self.get("and.pred", first, on, kind="pred")
        at = self.add(self.add(self.own_x, 1, 2 * self.columns + 2 * self.codes), block, 4)
        second = self._in_second_half()
        halves = [self.excess, (1, self.larger)][: 1 + self.kind.minimum]
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
            total = self.over_lanes(own, EVERY)
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

    def x_of(self, begin: str, beyond: int) -> list[str]:
        """A row of x where it meets a lane's codes of a set, two values a register."""
        loads = (self.load(begin, beyond + i) for i in range(0, 2 * self.codes, 16))
        return [register for four in loads for register in four]

    def _of_blocks(self, beyond: int) -> list[str]:
        """What `write_sums` has for a lane's two blocks."""
        if not self.scales:
            return []
        found = [self.new("f32") for _ in range(2)]
        self.do(f"ld.shared.v2.f32 {{{', '.join(found)}}}, [{self.sums_x}+{beyond}]")
        return found
