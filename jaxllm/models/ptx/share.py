"""What the parts of a product's text have in common: how work is shared and where memory is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from jaxllm.gguf.blocks import BlockType
from jaxllm.models.ptx.writer import Writer

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


class Share(Writer):
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
        self.tiles = step.out // ROWS
        self.stride = groups * WARPS // self.team  # tiles between two of a team
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
        self.x_row = 2 * self.columns + 2 * self.codes + 8 * BLOCKS
        self.x_turn = n * self.x_row
        self.x_bytes = self.team * self.turns * self.x_turn
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
        self.team_of = self.get("div.u32", lanes.warp, self.team)
        self.member = self.get("rem.u32", lanes.warp, self.team)
        self.tile = self.add(lanes.group, self.team_of, self.stride * self.team // WARPS)
        if self.rest:
            self.has = self.get("setp.lt.u32", self.member, self.rest, kind="pred")

    def meet(self) -> None:
        """Wait for the team."""
        number = self.add(self.team_of, 1)
        self.do(f"bar.sync {number}, {self.team * LANES}")

    def over_lanes(self, value: str, distances: tuple[int, ...], how: str = "add.f32") -> str:
        """The sum, or something else, of lanes at these distances."""
        for distance in distances:
            other = self.get("shfl.sync.bfly.b32", value, distance, 31, -1, kind="f32")
            value = self.get(how, value, other, kind="f32")
        return value
