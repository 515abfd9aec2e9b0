"""What warps and groups of threads have of a head's attention, added up, in PTX; see
`attention.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxllm.models.ptx.share import LANES, LOAD, WARPS, Part
from jaxllm.models.ptx.writer import Writer, float_bits

KEYS = 16  # of a tile
TOGETHER = 8  # groups that are added up at a time
QUERIES = 8  # of a head, at most
LOWEST = float_bits(-1e30)  # finite, so that a maximum less itself is zero
ACROSS = (4, 8, 16)  # distances of lanes that have the same queries


@dataclass(frozen=True)
class Attend:
    """Attention by names of operands, all bfloat16 but for places and sums: of each row and head
    its queries, key and value [N, heads, per_head * k_dim + k_dim + v_dim], rings [rows, heads,
    capacity, ...]; places int32 [N + 1], the position of each row, negative for one that sees
    nothing, and the ring's row of the first; and what is written [N, heads * per_head * v_dim].
    `counts` uint32 [N * heads], zeros before and after; `sums` float32 is room.
    """

    heads: int
    per_head: int
    k_dim: int
    v_dim: int
    capacity: int
    scale: float
    window: int | None
    qkv: str
    k_ring: str
    v_ring: str
    places: str
    counts: str
    sums: str
    found: str

    def parts(self, n: int, groups: int) -> int:
        """Groups that share a head."""
        return max(1, min(groups // (n * self.heads), self.capacity // KEYS))

    def room(self, n: int, groups: int) -> int:
        """Numbers of `sums`."""
        return n * self.heads * self.parts(n, groups) * self.per_head * (self.v_dim + 2)


class Joined(Part):
    """An `Attend` of a chain for n rows, of which a group has a part of a head: of a lane's two
    queries the largest score, the sum of weights and, of two values in each eight, the weighted
    sums."""

    unit: str  # which head, of all rows
    part: str  # of its keys
    among: str  # how many groups have one
    first_part: str  # where numbers of the first of them are in device memory
    own_part: str  # and those of this group
    zero: str
    most: list[str]
    total: list[str]
    sums: list[list[str]]

    def __init__(self, chain: Writer, step: Attend, n: int, groups: int, given: dict[str, str]):
        super().__init__(chain)
        self.step, self.n, self.given = step, n, given
        self.units = n * step.heads
        self.parts = step.parts(n, groups)
        self.at_a_time = groups // self.parts
        self.buffer = 2 * KEYS * max(step.k_dim, step.v_dim)
        self.least_ahead, self.most_ahead, self.x_bytes = 2, 3, 0
        self.sums_bytes, self.squares_bytes = 2 * 4 * WARPS * QUERIES, 16
        self.reach = step.capacity * 2 * max(step.k_dim, step.v_dim)
        self.size = step.per_head * step.v_dim  # numbers that a head's queries have together
        self.part_bytes = 4 * (self.size + 2 * step.per_head)
        self.padded = step.v_dim + 4  # of a query in shared memory, for its banks

    def join(self) -> None:
        """Add up what the warps of a group have, and write it; or have the last group of a head add
        up what groups have."""
        self._share()
        self.do("bar.sync 0")
        if self.parts == 1:
            self._each_number("all", self._write_alone)
            return
        many = self.get("setp.ne.u32", self.among, 1, kind="pred")
        self.do(f"@{many} bra several")
        self._each_number("all", self._write_alone)
        self.do("bra joined")
        self.mark("several")
        self._each_number("warps", self._write_part)
        lanes, last = self.lanes, self.get("sub.u32", self.among, 1)
        self.do("bar.sync 0")
        first = self.get("setp.eq.u32", lanes.thread, 0, kind="pred")
        done = self.get("mov.b32", 0)
        count = f"[{self.far(self.given[self.step.counts], self.unit, 4)}]"
        self.do(f"@{first} atom.acq_rel.gpu.global.inc.u32 {done}, {count}, {last}")
        self.do(f"@{first} st.shared.b32 [{lanes.squares}], {done}")
        self.do("bar.sync 0")
        done = self.get("ld.shared.b32", f"[{lanes.squares}]")
        others = self.get("setp.ne.u32", done, last, kind="pred")
        self.do(f"@{others} bra joined")
        self._each_number("groups", self._write_joined)
        self.mark("joined")

    def _share(self) -> None:
        """Write a warp's numbers to shared memory."""
        lanes = self.lanes
        totals = [self.over_lanes(total, ACROSS) for total in self.total]
        leads = self.get("setp.eq.u32", lanes.row, 0, kind="pred")
        at = self.add(self.add(lanes.sums, lanes.warp, 4 * QUERIES), lanes.quarter, 8)
        for beyond, both in ((0, self.most), (4 * QUERIES * WARPS, totals)):
            self.do(f"@{leads} st.shared.v2.f32 [{at}+{beyond}], {{{', '.join(both)}}}")
        at = self.add(self.add(lanes.copies, lanes.quarter, 8 * self.padded), lanes.row, 4)
        for m, (a, b, c, d) in enumerate(self.sums):
            for i, pair in enumerate(((a, b), (c, d))):
                for j, value in enumerate(pair):
                    beyond = 4 * (self.padded * j + 16 * m + 8 * i)
                    self.do(f"st.shared.f32 [{at}+{beyond}], {value}")

    def _each_number(self, label: str, what: Callable[[str, str, str], None]) -> None:
        """Do something about each number of a head: which it is, its query and its place."""
        threads = LANES * WARPS
        for i in range(0, self.size, threads):
            number = self.add(self.lanes.thread, 1, i)
            if i + threads > self.size:
                none = self.get("setp.ge.u32", number, self.size, kind="pred")
                self.do(f"@{none} bra {label}{i}")
            query = self.quotient(number, self.step.v_dim)
            what(number, query, self.remainder(number, self.step.v_dim))
            self.mark(f"{label}{i}")

    def _of_warps(self, query: str, place: str) -> tuple[str, str, str]:
        """The largest score of all warps, their sum of weights and a sum of values."""
        lanes = self.lanes
        own = self.add(lanes.sums, query, 4)
        at = self.add(self.add(lanes.first, query, 4 * self.padded), place, 4)
        row = 4 * QUERIES
        each = (
            (f"{own}+{row * w}", f"{own}+{row * (WARPS + w)}", f"{at}+{lanes.each * w}")
            for w in range(WARPS)
        )
        loads = [[self.get("ld.shared.f32", f"[{a}]", kind="f32") for a in three] for three in each]
        return self._joined(loads)

    def _joined(self, parts: list[list[str]]) -> tuple[str, str, str]:
        """One of several: their largest scores, sums of weights and of values."""
        most = parts[0][0]
        for own, _, _ in parts[1:]:
            most = self.get("max.f32", most, own, kind="f32")
        total = value = self.zero
        for own, weights, values in parts:
            fade = self.power(own, most)
            total = self.get("fma.rn.f32", weights, fade, total, kind="f32")
            value = self.get("fma.rn.f32", values, fade, value, kind="f32")
        return most, total, value

    def _write_part(self, number: str, query: str, place: str) -> None:
        most, total, value = self._of_warps(query, place)
        self.do(f"st.global.f32 [{self.far(self.own_part, number, 4)}], {value}")
        leads = self.get("setp.eq.u32", place, 0, kind="pred")
        at = self.far(self.own_part, query, 8)
        self.do(f"@{leads} st.global.v2.f32 [{at}+{4 * self.size}], {{{most}, {total}}}")

    def _write_alone(self, number: str, query: str, place: str) -> None:
        self._write(number, *self._of_warps(query, place)[1:])

    def _write_joined(self, number: str, query: str, place: str) -> None:
        del place
        values, others = self.far(self.first_part, number, 4), self.far(self.first_part, query, 8)
        sums = [self.get("mov.f32", value, kind="f32") for value in (LOWEST, self.zero, self.zero)]
        left = self.get("mov.b32", self.among)
        label = f"groups{len(self.lines)}"
        self.mark(label)
        loads = [sums]
        for i in range(min(self.parts, TOGETHER)):
            beyond = self.part_bytes * i
            on = self.get("setp.ge.u32", left, i + 1, kind="pred")
            most = self.get("mov.f32", LOWEST, kind="f32")
            total, value = (self.get("mov.f32", self.zero, kind="f32") for _ in range(2))
            at = f"[{others}+{beyond + 4 * self.size}]"
            self.do(f"@{on} {LOAD}.v2.f32 {{{most}, {total}}}, {at}")
            self.do(f"@{on} {LOAD}.f32 {value}, [{values}+{beyond}]")
            loads.append([most, total, value])
        for own, joined in zip(sums, self._joined(loads), strict=True):
            self.do(f"mov.f32 {own}, {joined}")
        if self.parts > TOGETHER:
            for at in (values, others):
                self.do(f"add.u64 {at}, {at}, {TOGETHER * self.part_bytes}")
            self.do(f"max.u32 {left}, {left}, {TOGETHER}")
            self.do(f"sub.u32 {left}, {left}, {TOGETHER}")
            more = self.get("setp.ne.u32", left, 0, kind="pred")
            self.do(f"@{more} bra {label}")
        self._write(number, *sums[1:])

    def _write(self, number: str, total: str, value: str) -> None:
        """The result, zero where a row sees nothing."""
        none = self.get("setp.eq.f32", total, self.zero, kind="pred")
        total = self.get("selp.f32", float_bits(1.0), total, none, kind="f32")
        value = self.get("div.full.f32", value, total, kind="f32")
        half = self.get("cvt.rn.bf16.f32", value, kind="b16")
        to = self.far(self.given[self.step.found], self.add(number, self.unit, self.size), 2)
        self.do(f"st.global.b16 [{to}], {half}")

    def power(self, a: str, b: str) -> str:
        """Two to the power of a - b."""
        less = self.get("sub.f32", a, b, kind="f32")
        return self.get("ex2.approx.f32", less, kind="f32")
