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

from dataclasses import dataclass
from math import e, log2

from jaxllm.models.ptx.attention_sums import ACROSS, KEYS, LOWEST, QUERIES, Joined
from jaxllm.models.ptx.share import LANES, WARPS, Lanes
from jaxllm.models.ptx.writer import float_bits

NOTHING = float_bits(float("-inf"))  # the score of a key that is not seen


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


class Attention(Joined):
    """An `Attend` of a chain for n rows, which so many groups of threads share."""

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
        self.join()
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
        self.queries = [self.read_four(has, f"{at}+{64 * s}") for s in range(step.k_dim // 32)]
        before = step.per_head * step.k_dim
        for side in (self.keys, self.values):
            top = self.get("setp.eq.u32", side.row, 0, kind="pred")
            at = self.get("add.u64", own, side.beyond, kind="b64")
            side.own[:] = self.read_four(top, f"{at}+{2 * before}")
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

    def put_own(self, side: _Side) -> None:
        """The token's own into its place, if it is in this tile."""
        own = self.get("sub.u32", self.start, self.get("mul.lo.u32", self.tile, KEYS))
        top = self.get("setp.eq.u32", side.row, 0, kind="pred")
        here = self.get("setp.lt.u32", own, KEYS, kind="pred")
        here = self.get("and.pred", here, top, kind="pred")
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
        keys_at, values_at = self.halves_at(2 * step.k_dim), self._values_at()
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
            fade = self.power(self.most[j], most)
            self.do(f"mov.f32 {self.most[j]}, {most}")
            for i in (j, j + 2):
                weights[i] = self.power(scores[i], most)
            both = self.get("add.f32", weights[j], weights[j + 2], kind="f32")
            self.do(f"fma.rn.f32 {self.total[j]}, {self.total[j]}, {fade}, {both}")
            for tile in self.sums:
                for i in (j, j + 2):
                    self.do(f"mul.f32 {tile[i]}, {tile[i]}, {fade}")
        pairs = (self.get("cvt.rn.bf16x2.f32", weights[i + 1], weights[i]) for i in (0, 2))
        return [self.get("movmatrix.sync.aligned.m8n8.trans.b16", pair) for pair in pairs]

    def _add_values(self, at: list[str], weights: list[str]) -> None:
        """Add a tile's weighted values."""
        at = [self.add(begin, self.slot) for begin in at]
        for m, sums in enumerate(self.sums):
            four = [self.new("b32") for _ in range(4)]
            place = f"[{at[m % 4]}+{m // 4 * 128}]"
            name = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"
            self.do(f"{name} {{{', '.join(four)}}}, {place}")
            self.multiply(sums, four, weights, "bf16", sums)
