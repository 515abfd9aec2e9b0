"""A kernel of several steps one after the other, in PTX: products (`product.py`), and attention
before them (`attention.py`).

One group of threads runs on each multiprocessor and has its share of every step. Between two steps
all groups wait for each other; what is first needed of the next matrix is on its way then.
So the memory's link rests neither there nor between kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxllm.models.ptx.attention import Attention
from jaxllm.models.ptx.attention_sums import Attend
from jaxllm.models.ptx.product import Product
from jaxllm.models.ptx.share import LANES, WARPS, Lanes, Part, Step
from jaxllm.models.ptx.writer import Writer

LINE = 32  # words of device memory between two counters
MEMORY = 226 << 10  # bytes of shared memory that a group has, at most


class Chain(Writer):
    """The kernel of these steps for n rows of x, with so many groups, all of which have to run at a
    time.

    Operands, in the order of `operands`: arrays, and memory of `memory` bytes that a group shares.
    Where there are several steps one of them is `counters`, uint32 [len(steps) * LINE], zeros
    before the kernel and after it.
    """

    def __init__(
        self,
        steps: Sequence[Step | Attend],
        n: int,
        groups: int,
        operands: Sequence[str],
        eps: float = 0.0,
    ):
        super().__init__()
        self.groups = groups
        self.given = {name: f"${i}" for i, name in enumerate((*operands, "memory"))}
        self.parts: list[Part] = [
            Attention(self, step, n, groups, self.given)
            if isinstance(step, Attend)
            else Product(self, step, n, groups, self.given, eps)
            for step in steps
        ]
        x = max(part.x_bytes for part in self.parts)
        sums = max(part.sums_bytes for part in self.parts)
        squares = max(part.squares_bytes for part in self.parts)
        room = (MEMORY - x - sums - squares) // WARPS
        self.ahead = [min(part.most_ahead, room // part.buffer) for part in self.parts]
        self.own = max(a * p.buffer for a, p in zip(self.ahead, self.parts, strict=True))
        parts = WARPS * self.own, x, sums, squares
        self.starts = [sum(parts[:i]) for i in range(len(parts))]
        self.memory = sum(parts)
        reached = max(part.reach for part in self.parts)
        enough = all(a >= p.least_ahead for a, p in zip(self.ahead, self.parts, strict=True))
        enough &= all(part.regular for part in self.parts)
        self.fits = enough and reached < 1 << 31  # numbers of addresses have 32 bits

    def text(self) -> str:
        """The whole kernel."""
        lanes = self._lanes()
        for i, part in enumerate(self.parts):
            if i:
                self._arrive(lanes, i)
            part.begin(lanes, self.ahead[i], i > 0, self.parts[i - 1].idle if i else "")
            if i:
                self._wait(lanes, i)
            part.run()
        if len(self.parts) > 1:
            self._end(lanes)
        return self.block()

    def _lanes(self) -> Lanes:
        group, thread = self.get("mov.u32", "%ctaid.x"), self.get("mov.u32", "%tid.x")
        warp, lane = self.get("shr.u32", thread, 5), self.get("and.b32", thread, LANES - 1)
        row, quarter = self.get("shr.u32", lane, 2), self.get("and.b32", lane, 3)
        memory = self.given["memory"]
        copies, x, sums, squares = (self.add(memory, 1, start) for start in self.starts)
        own = self.add(copies, warp, self.own)
        places = own, x, sums, squares, copies, self.own
        return Lanes(group, thread, warp, lane, row, quarter, *places)

    def _counter(self, i: int) -> str:
        return f"[{self.given['counters']}+{4 * LINE * i}]"

    def _arrive(self, lanes: Lanes, i: int) -> None:
        """Say that the group has written its share. This waits for copies that are on their way, so
        it comes before those of the next step."""
        self.do("bar.sync 0")
        first = self.get("setp.eq.u32", lanes.thread, 0, kind="pred")
        self.do(f"@{first} red.release.gpu.global.add.u32 {self._counter(i)}, 1")

    def _wait(self, lanes: Lanes, i: int) -> None:
        """For all groups, and for what they have written."""
        others = self.get("setp.ge.u32", lanes.warp, 1, kind="pred")
        self.do(f"@{others} bra wait{i}done")
        self.mark(f"wait{i}")
        count = self.get("ld.acquire.gpu.global.u32", self._counter(i))
        less = self.get("setp.lt.u32", count, self.groups, kind="pred")
        self.do(f"@{less} bra wait{i}")
        self.mark(f"wait{i}done")
        self.do("bar.sync 0")

    def _end(self, lanes: Lanes) -> None:
        """The last group to be done with all counters makes them zeros again."""
        first = self.get("setp.eq.u32", lanes.thread, 0, kind="pred")
        done = self.get("mov.b32", 0)
        count = f"{self._counter(0)}, {self.groups - 1}"
        self.do(f"@{first} atom.acq_rel.gpu.global.inc.u32 {done}, {count}")
        last = self.get("setp.eq.u32", done, self.groups - 1, kind="pred")
        last = self.get("and.pred", first, last, kind="pred")
        for i in range(1, len(self.parts)):
            self.do(f"@{last} st.global.b32 {self._counter(i)}, 0")
