"""What the parts of a product's text have in common: how work is shared and where memory is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from jaxllm.gguf.blocks import BlockType
from jaxllm.models.ptx.writer import Writer

LANES = 32  # of a warp
WARPS = 16  # of a group: all that a multiprocessor runs
ROWS, BLOCKS = 16, 8  # of the matrix, and in a span
LOAD = "ld.relaxed.gpu.global"  # of what other groups may have written


@dataclass(frozen=True)
class Turned:
    """Queries and keys of a product that are turned to their positions, each pair by an angle: for
    every head `per_head` queries, a key and a value of so many rows, and the operands float32
    [N, rows / 2] that have cosines and sines. Pairs are neighbours, or half the rows apart."""

    per_head: int
    rows: int
    halves: bool
    cos: str
    sin: str


@dataclass(frozen=True)
class Step:
    """A product with a matrix [out, size], by the names of operands: what it reads, the matrix's
    parts, and what it writes.

    What it reads is normalised by a root mean square where there is a norm's weight. What it writes
    is the product, with something of its shape added, or, gated, silu of its first half times the
    other, or with heads turned.
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
    turned: Turned | None = None

    @property
    def columns(self) -> int:
        """Of a span."""
        return BLOCKS * self.kind.block

    @property
    def spans(self) -> int:
        return self.size // self.columns

    @property
    def tiles(self) -> int:
        return self.out // ROWS

    @property
    def half(self) -> int:
        """By how many rows two are apart that are turned together, if that is more than one."""
        return self.turned.rows // 2 if self.turned and self.turned.halves else 0

    def warps(self, groups: int) -> int:
        """How many share a tile. Two teams multiply while one adds up; but a row of many spans is
        read in longer pieces by more, which have less to do before they begin."""
        wanted = 4 if self.spans <= 4 else 8 if self.spans <= 32 else 16
        return wanted if self.regular(groups * WARPS // wanted) else 8

    def regular(self, stride: int) -> bool:
        """Whether all tiles of a team, so many between two, are the same part of a head."""
        return not self.half or self.tiles <= stride or stride * ROWS // 2 % self.half == 0


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


class Lanes(NamedTuple):
    """Which part of the work a thread has, in registers, and where shared memory begins: copies of
    its warp on their way, x, sums of tiles and sums of squares. And copies of the first warp, and
    how many bytes each has."""

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
    first: str
    each: int


class Part(Writer):
    """What a chain's steps have in common: bytes of a warp's copy, how many are on their way at
    least and at most, bytes of x, of sums and of sums of squares, and how far apart addresses
    are."""

    buffer: int
    least_ahead: int = 1
    most_ahead: int
    x_bytes: int
    sums_bytes: int
    squares_bytes: int
    reach: int
    regular: bool = True  # whether a group's shares are all alike
    idle: str = ""  # whether a group has no part of the step
    ahead: int  # copies that are on their way
    slot: str  # where in the ring of copies the next is
    lanes: Lanes

    def begin(self, lanes: Lanes, ahead: int, waits: bool, idle: str) -> None:
        """What does not depend on the step before it, if that has to be waited for; `idle` says
        which groups had no part of it, where there are such."""
        raise NotImplementedError

    def run(self) -> None:
        """All the rest."""
        raise NotImplementedError

    def advance_slot(self) -> None:
        """Go on to the next of the places that copies take in turn."""
        self.do(f"add.u32 {self.slot}, {self.slot}, {self.buffer}")
        end = self.get("setp.eq.u32", self.slot, self.ahead * self.buffer, kind="pred")
        self.do(f"selp.b32 {self.slot}, 0, {self.slot}, {end}")

    def multiply(
        self, sums: list[str], a: list[str], b: list[str], kind: str, found: list[str] | None = None
    ) -> list[str]:
        """sums [16, 8] and what a [16, 16] times b [16, 8] adds, as lanes have them."""
        found = [self.new("f32") for _ in range(4)] if found is None else found
        operands = (f"{{{', '.join(each)}}}" for each in (found, a, b, sums))
        name = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
        self.do(f"{name} {', '.join(operands)}")
        return found

    def read_four(self, on: str, place: str) -> list[str]:
        """Four words of device memory that other groups may have written; zeros where not `on`."""
        four = [self.get("mov.b32", 0) for _ in range(4)]
        self.do(f"@{on} {LOAD}.v4.b32 {{{', '.join(four)}}}, [{place}]")
        return four

    def halves_at(self, row_bytes: int) -> list[str]:
        """Where a lane's 16 bytes of its row in a warp's copies begin, of both 64 bytes of 128 that
        have changed places in odd rows."""
        lanes = self.lanes
        odd = self.get("and.b32", lanes.row, 1)
        swapped = self.get("xor.b32", odd, 1)
        begin = self.add(self.add(lanes.copies, lanes.row, row_bytes), lanes.quarter, 16)
        return [self.add(begin, odd, 64), self.add(begin, swapped, 64)]

    def over_lanes(self, value: str, distances: tuple[int, ...], how: str = "add.f32") -> str:
        """The sum, or something else, of lanes at these distances."""
        for distance in distances:
            other = self.get("shfl.sync.bfly.b32", value, distance, 31, -1, kind="f32")
            value = self.get(how, value, other, kind="f32")
        return value


class Share(Part):
    """The share of a thread in a step for n rows of x, of so many groups of threads."""

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
        self.tiles = step.tiles
        self.stride = groups * WARPS // self.team  # tiles between two of a team
        # What is multiplied or turned together is in one tile: how far its lower eight rows are
        # below its upper eight, and tiles of a team that have as many rows between them.
        self.apart = step.out // 2 if step.gated else step.half or ROWS // 2
        self.tile_rows = ROWS // 2 if step.gated else ROWS
        self.regular = step.regular(self.stride)
        self.scales = [
            self._scale(name, operand)
            for name, operand in zip(kind.parts, step.parts, strict=True)
            if name != "words"
        ]
        # How much larger codes of the second half of a block are, as they are multiplied, and what
        # those of each half have in excess: see `Matrix.pairs`.
        self.larger = 16 if kind.bits == 4 else 1
        zero = 1 << kind.bits - 1 if kind.signed else 0
        self.excess = 1024 + zero, 1024 + self.larger * zero
        # Bytes that a warp has of a span: codes and scales. And of x in all turns, with zeros and
        # the sums of blocks behind each row of a turn's part.
        self.buffer = ROWS * (self.bytes + sum(scale.copied for scale in self.scales))
        self.x_row = 2 * self.columns + 2 * self.codes + (8 * BLOCKS if self.scales else 0)
        self.x_turn = self.team * n * self.x_row
        self.x_bytes = step.spans * n * self.x_row
        self.sums_bytes, self.squares_bytes = 2 * 4 * WARPS * n * ROWS, 4 * WARPS * n
        self.most_ahead = 2 if self.scales else 3  # more of codes take longer, by measurement
        self.reach = step.out * self.row_bytes
        self.label = f"{step.found}{len(self.lines)}"

    def _scale(self, name: str, operand: str) -> Scale:
        part = self.kind.parts[name]
        item, packs = part.dtype.itemsize, part.packs
        row, turn = self.step.size // packs * item, self.team * self.columns // packs * item
        return Scale(name, operand, packs, item, row, turn, max(4, turn // self.team))

    def place(self, lanes: Lanes) -> None:
        """Which tiles and spans a warp has."""
        self.lanes = lanes
        self.zero = self.get("mov.f32", "0f00000000", kind="f32")
        self.team_of = self.quotient(lanes.warp, self.team)
        self.member = self.remainder(lanes.warp, self.team)
        self.tile = self.add(lanes.group, self.team_of, self.stride * self.team // WARPS)
        if self.rest:
            self.has = self.get("setp.lt.u32", self.member, self.rest, kind="pred")

    def first_row(self) -> str:
        """The first row of the matrix in the team's tile."""
        row = self.get("mul.lo.u32", self.tile, self.tile_rows)
        if not self.step.half:
            return row
        turn = self.remainder(self.tile, 2 * self.step.half // ROWS)
        return self.get("sub.u32", row, self.get("mul.lo.u32", turn, ROWS // 2))

    def meet(self) -> None:
        """Wait for the team."""
        number = self.add(self.team_of, 1)
        self.do(f"bar.sync {number}, {self.team * LANES}")
