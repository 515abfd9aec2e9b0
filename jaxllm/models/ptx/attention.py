"""Attention of one token a row over rings of keys and values in PTX: a step of a kernel's chain.

Groups that share a head, `parts` of them at most, cut its keys into tiles of 16, which all their
warps take in turn; as few groups as have a tile for each warp, since adding up groups takes time. A
warp copies a tile while it multiplies the one before. Tensor cores multiply keys by the head's
queries, of which there are eight or fewer, and values, transposed, by what softmax makes of it, as
FlashAttention-2 does (Dao 2023). A group adds up its warps, and the last group of a head to come
adds up the groups. The order of sums depends on positions and the number of groups alone.

The token's own key and value may come from the step before. So they are read when that is done, and
take their place in a tile that was copied without them; one group writes them to the ring.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import e, log2

from jaxllm.models.ptx.rows import LOAD
from jaxllm.models.ptx.share import LANES, WARPS, Lanes, Part
from jaxllm.models.ptx.writer import Writer, float_bits

KEYS = 16  # of a tile
TOGETHER = 8  # groups that are added up at a time
QUERIES = 8  # of a head, at most
LOWEST = float_bits(-1e30)  # finite, so that a maximum less itself is zero
NOTHING = float_bits(float("-inf"))  # the score of a key that is not seen
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


@dataclass(frozen=True)
class _Side:
    """Keys or values: how many a position has, which row and 16 bytes of it a lane copies first, by
    how much these are beyond others, where they are in the ring and are copied to, by how far rows
    are on modulo eight. And the token's own."""

    dim: int
    row: str
    chunk: str
    beyond: str
    ring: str
    to: list[str]
    own: list[str]

    @property
    def down(self) -> int:
        """Rows that are copied at a time."""
        return LANES * 8 // self.dim


class Attention(Part):
    """An `Attend` of a chain for n rows, which so many groups of threads share."""

    def __init__(self, chain: Writer, step: Attend, n: int, groups: int, given: dict[str, str]):
        super().__init__(chain)
        self.step, self.n, self.given = step, n, given
        self.units = n * step.heads
        self.parts = step.parts(n, groups)
        self.at_a_time = groups // self.parts
        self.buffer = 2 * KEYS * max(step.k_dim, step.v_dim)
        self.least_ahead, self.most_ahead, self.x_bytes = 2, 3, 0
        self.reach = step.capacity * 2 * max(step.k_dim, step.v_dim)
        self.size = step.per_head * step.v_dim  # numbers that a head's queries have together
        self.part_bytes = 4 * (self.size + 2 * step.per_head)
        self.padded = step.v_dim + 4  # of a query in shared memory, for its banks

    def begin(self, lanes: Lanes, ahead: int, waits: bool, idle: str) -> None:
        """Where the keys of a group's first head are, and begin to copy them."""
        del waits, idle  # nothing here does
        self.lanes, self.ahead = lanes, ahead
        self.zero = self.get("mov.f32", float_bits(0.0), kind="f32")
        self.slot = self.get("mov.b32", 0)
        self.part = self.remainder(lanes.group, self.parts)
        unit = self.quotient(lanes.group, self.parts)
        at_a_time = min(self.units, self.at_a_time)
        self.idle = self.get("setp.ge.u32", unit, at_a_time, kind="pred")
        self.unit = self.get("min.u32", unit, at_a_time - 1)
        self.start, self.end, self.oldest = (self.get("mov.b32", 0) for _ in range(3))
        self.tile, self.tiles, self.stride, self.among = (self.get("mov.b32", 0) for _ in range(4))
        self.keys = self._side(self.step.k_dim, 4)
        self.values = self._side(self.step.v_dim, 1)
        self.place()

    def run(self) -> None:
        """All heads that a group has a part of."""
        self.do(f"@{self.idle} bra attended")
        self.mark("attend")
        self.read_own()
        self.fold_tiles()
        self.store_own()
        self.add_warps()
        if self.units > self.at_a_time:
            self.do(f"add.u32 {self.unit}, {self.unit}, {self.at_a_time}")
            none = self.get("setp.ge.u32", self.unit, self.units, kind="pred")
            self.do(f"@{none} bra attended")
            self.do("bar.sync 0")
            self.place()
            self.do("bra attend")
        self.mark("attended")

    def place(self) -> None:
        """Which keys a head's row sees and where they are; begin to copy them."""
        step, lanes = self.step, self.lanes
        places = self.given[step.places]
        n = self.quotient(self.unit, step.heads)
        self.do(f"ld.global.b32 {self.start}, [{self.far(places, n, 4)}]")
        row = self.get("ld.global.b32", f"[{places}+{4 * self.n}]")
        self.do(f"max.s32 {self.end}, {self.start}, -1")
        self.do(f"add.u32 {self.end}, {self.end}, 1")
        last = self.quotient(self.add(self.end, 1, KEYS - 1), KEYS)
        if step.window is not None:
            late = self.get("max.u32", self.end, step.window)
            self.do(f"sub.u32 {self.oldest}, {late}, {step.window}")
        first = self.quotient(self.oldest, KEYS)
        count = self.get("sub.u32", last, first)
        wanted = self.quotient(self.add(count, 1, WARPS - 1), WARPS)
        wanted = self.get("max.u32", wanted, 1)
        self.do(f"min.u32 {self.among}, {wanted}, {self.parts}")
        self.do(f"mul.lo.u32 {self.stride}, {self.among}, {WARPS}")
        first = self.get("add.u32", first, self.part)
        self.do(f"mad.lo.u32 {self.tile}, {lanes.warp}, {self.among}, {first}")
        out = self.get("setp.ge.u32", self.part, self.among, kind="pred")
        self.do(f"or.pred {self.idle}, {self.idle}, {out}")
        self.do(f"selp.b32 {self.tiles}, 0, {last}, {self.idle}")
        row = self.add(self.unit, row, step.heads)
        for side, ring in ((self.keys, step.k_ring), (self.values, step.v_ring)):
            begin = self.far(self.given[ring], row, 2 * side.dim * step.capacity)
            self.do(f"add.u64 {side.ring}, {begin}, {side.beyond}")
        for u in range(self.ahead):
            self.bring(u)

    def _side(self, dim: int, swaps: int) -> _Side:
        """Keys are read half a row of 64 bytes at a time, and those of odd rows change places by
        fours; values eight rows at a time, and each has an order of its own."""
        lanes, chunks = self.lanes, dim // 8
        row = self.quotient(lanes.lane, chunks)
        chunk = self.remainder(lanes.lane, chunks)
        order = self.get("and.b32", row, 1) if swaps > 1 else row
        swapped = self.get("xor.b32", chunk, self.get("mul.lo.u32", order, swaps))
        to = []
        for beyond in range(0, QUERIES, LANES // chunks):
            at = swapped if swaps > 1 else self.get("xor.b32", swapped, beyond)
            to.append(self.add(self.add(lanes.copies, row, 2 * dim), at, 16))
        beyond = self.get("cvt.u64.u32", self.get("mul.lo.u32", chunk, 16), kind="b64")
        ring = self.get("mov.b64", 0, kind="b64")
        return _Side(dim, row, chunk, beyond, ring, to, [])

    def bring(self, u: int) -> None:
        """Begin to copy, of all that a warp folds from its tile on, number u: keys and values in
        turn."""
        turns, side = u // 2, (self.keys, self.values)[u % 2]
        tile = self.add(self.tile, self.stride, turns)
        on = self.get("setp.lt.u32", tile, self.tiles, kind="pred")
        place = self.remainder(tile, self.step.capacity // KEYS)
        row_bytes = 2 * side.dim
        begin = self.far(side.ring, self.add(side.row, place, KEYS), row_bytes)
        for i in range(0, KEYS, side.down):
            to = self.add(side.to[i % QUERIES // side.down], self.slot)
            here, source = f"[{to}+{i * row_bytes}]", f"[{begin}+{i * row_bytes}]"
            self.do(f"@{on} cp.async.cg.shared.global.L2::128B {here}, {source}, 16")
        self.do("cp.async.commit_group")
        self.advance_slot()

    def read_own(self) -> None:
        """The head's queries as tensor cores take them, zeros for those that it has not, and the
        token's own key and value."""
        step, lanes = self.step, self.lanes
        wide = (step.per_head + 1) * step.k_dim + step.v_dim
        own = self.far(self.given[step.qkv], self.unit, 2 * wide)
        beyond = self.get("mul.lo.u32", lanes.row, 2 * step.k_dim)
        at = self.far(own, self.add(beyond, lanes.quarter, 16), 1)
        has = self.get("setp.lt.u32", lanes.row, step.per_head, kind="pred")
        self.queries = [self._four(has, f"{at}+{64 * s}") for s in range(step.k_dim // 32)]
        before = step.per_head * step.k_dim
        for side in (self.keys, self.values):
            top = self.get("setp.eq.u32", side.row, 0, kind="pred")
            at = self.get("add.u64", own, side.beyond, kind="b64")
            side.own[:] = self._four(top, f"{at}+{2 * before}")
            before += side.dim

    def store_own(self) -> None:
        """Write the token's key and value to the ring, by the first warp of a head."""
        first = self.get("add.u32", self.part, self.lanes.warp)
        writes = self.get("setp.eq.u32", first, 0, kind="pred")
        real = self.get("setp.ne.u32", self.end, 0, kind="pred")
        writes = self.get("and.pred", writes, real, kind="pred")
        slot = self.remainder(self.start, self.step.capacity)
        for side in (self.keys, self.values):
            top = self.get("setp.eq.u32", side.row, 0, kind="pred")
            top = self.get("and.pred", top, writes, kind="pred")
            to = self.far(side.ring, slot, 2 * side.dim)
            self.do(f"@{top} st.global.v4.b32 [{to}], {{{', '.join(side.own)}}}")

    def _four(self, on: str, place: str) -> list[str]:
        """Four words of device memory that other groups may have written; zeros elsewhere."""
        four = [self.get("mov.b32", 0) for _ in range(4)]
        self.do(f"@{on} {LOAD}.v4.b32 {{{', '.join(four)}}}, [{place}]")
        return four

    def put_own(self, side: _Side) -> None:
        """The token's own into its place, if it is in this tile."""
        own = self.get("sub.u32", self.start, self.get("mul.lo.u32", self.tile, KEYS))
        here = self.get("setp.lt.u32", own, KEYS, kind="pred")
        here = self.get(
            "and.pred", here, self.get("setp.eq.u32", side.row, 0, kind="pred"), kind="pred"
        )
        swap = self.get("and.b32", own, 1 if side is self.keys else QUERIES - 1)
        swap = self.get("mul.lo.u32", swap, 4 if side is self.keys else 1)
        at = self.get("xor.b32", side.chunk, swap)
        at = self.add(self.add(self.add(self.lanes.copies, own, 2 * side.dim), at, 16), self.slot)
        self.do(f"@{here} st.shared.v4.b32 [{at}], {{{', '.join(side.own)}}}")
        self.do("bar.warp.sync -1")

    def fold_tiles(self) -> None:
        """A warp's tiles: of a lane's two queries the largest score, the sum of weights and, of two
        values in each eight, the weighted sums."""
        step = self.step
        parts = self.get("mul.lo.u32", self.unit, self.parts)
        self.first_part = self.far(self.given[step.sums], parts, self.part_bytes)
        self.own_part = self.far(self.first_part, self.part, self.part_bytes)
        self.most = [self.get("mov.f32", LOWEST, kind="f32") for _ in range(2)]
        self.total = [self.get("mov.f32", self.zero, kind="f32") for _ in range(2)]
        self.sums = [
            [self.get("mov.f32", self.zero, kind="f32") for _ in range(4)]
            for _ in range(step.v_dim // 16)
        ]
        keys_at, values_at = self._keys_at(), self._values_at()
        none = self.get("setp.ge.u32", self.tile, self.tiles, kind="pred")
        self.do(f"@{none} bra folded")
        self.mark("fold")
        self._wait()
        self.put_own(self.keys)
        scores = self._scores(keys_at)
        self.do("bar.warp.sync -1")
        self.bring(self.ahead)
        weights = self._weights(scores)
        self._wait()
        self.put_own(self.values)
        self._add_values(values_at, weights)
        self.do("bar.warp.sync -1")
        self.bring(self.ahead + 1)
        self.do(f"add.u32 {self.tile}, {self.tile}, {self.stride}")
        more = self.get("setp.lt.u32", self.tile, self.tiles, kind="pred")
        self.do(f"@{more} bra fold")
        self.mark("folded")

    def _wait(self) -> None:
        """For the copies that come first."""
        self.do(f"cp.async.wait_group {self.ahead - 1}")
        self.do("bar.warp.sync -1")

    def _keys_at(self) -> list[str]:
        """Where a lane's key begins, and half a row of eight lanes on."""
        lanes = self.lanes
        odd = self.get("and.b32", lanes.row, 1)
        swapped = self.get("xor.b32", odd, 1)
        begin = self.add(lanes.copies, lanes.row, 2 * self.step.k_dim)
        begin = self.add(begin, lanes.quarter, 16)
        return [self.add(begin, odd, 64), self.add(begin, swapped, 64)]

    def _values_at(self) -> list[str]:
        """Where the row begins whose address a lane gives, for each of four tiles of values."""
        lane = self.lanes.lane
        eighth = self.get("and.b32", lane, 7)
        key = self.add(eighth, self.get("shr.u32", lane, 4), 8)
        chunk = self.get("and.b32", self.get("shr.u32", lane, 3), 1)
        chunk = self.get("xor.b32", chunk, eighth)
        begin = self.add(self.lanes.copies, key, 2 * self.step.v_dim)
        return [self.add(begin, self.get("xor.b32", chunk, 2 * i), 16) for i in range(4)]

    def _scores(self, at: list[str]) -> list[str]:
        """Of a lane's two keys and two queries, -inf where a key is not seen."""
        step, at = self.step, [self.add(begin, self.slot) for begin in at]
        sums = [[self.zero] * 4, [self.zero] * 4]
        for s, query in enumerate(self.queries):
            begin, offset = at[s % 2], s // 2 * 128
            upper, lower = (self.load(begin, offset + i * 16 * step.k_dim) for i in range(2))
            for k in (0, 2):
                a = [upper[k], lower[k], upper[k + 1], lower[k + 1]]
                sums[k // 2] = self.multiply(sums[k // 2], a, query[k : k + 2], "bf16")
        scale, found = float_bits(step.scale * log2(e)), []
        for i in range(2):
            key = self.add(self.add(self.lanes.row, self.tile, KEYS), 1, 8 * i)
            seen = self.get("setp.lt.u32", key, self.end, kind="pred")
            if step.window is not None:
                late = self.get("setp.ge.u32", key, self.oldest, kind="pred")
                seen = self.get("and.pred", seen, late, kind="pred")
            for j in range(2 * i, 2 * i + 2):
                score = self.get("add.f32", sums[0][j], sums[1][j], kind="f32")
                score = self.get("mul.f32", score, scale, kind="f32")
                found.append(self.get("selp.f32", score, NOTHING, seen, kind="f32"))
        return found

    def _weights(self, scores: list[str]) -> list[str]:
        """What softmax makes of scores, as tensor cores take it; what was added up before fades."""
        weights = [""] * 4
        for j in range(2):
            most = self.get("max.f32", scores[j], scores[j + 2], kind="f32")
            most = self.over_lanes(most, ACROSS, "max.f32")
            most = self.get("max.f32", most, self.most[j], kind="f32")
            fade = self._power(self.most[j], most)
            self.do(f"mov.f32 {self.most[j]}, {most}")
            for i in (j, j + 2):
                weights[i] = self._power(scores[i], most)
            both = self.get("add.f32", weights[j], weights[j + 2], kind="f32")
            self.do(f"fma.rn.f32 {self.total[j]}, {self.total[j]}, {fade}, {both}")
            for tile in self.sums:
                for i in (j, j + 2):
                    self.do(f"mul.f32 {tile[i]}, {tile[i]}, {fade}")
        pairs = (self.get("cvt.rn.bf16x2.f32", weights[i + 1], weights[i]) for i in (0, 2))
        return [self.get("movmatrix.sync.aligned.m8n8.trans.b16", pair) for pair in pairs]

    def _power(self, a: str, b: str) -> str:
        """Two to the power of a - b."""
        less = self.get("sub.f32", a, b, kind="f32")
        return self.get("ex2.approx.f32", less, kind="f32")

    def _add_values(self, at: list[str], weights: list[str]) -> None:
        """Add a tile's weighted values."""
        at = [self.add(begin, self.slot) for begin in at]
        for m, sums in enumerate(self.sums):
            four = [self.new("b32") for _ in range(4)]
            place = f"[{at[m % 4]}+{m // 4 * 128}]"
            name = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"
            self.do(f"{name} {{{', '.join(four)}}}, {place}")
            self.multiply(sums, four, weights, "bf16", sums)

    def add_warps(self) -> None:
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
            fade = self._power(own, most)
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
