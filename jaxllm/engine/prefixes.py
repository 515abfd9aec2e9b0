"""What the rows of an engine hold between requests, and with which row a request begins.

A request takes over the longest prefix that its prompt shares with what a row holds and computes
only the rest. This changes no bit of its result, for what is taken over is what it would have
computed itself:

- only positions of prompts count, which were prefilled. Decoding runs other programs, whose last
  bits may differ; a prompt that repeats a completion prefills it, once;
- lengths are multiples of `step`, the larger of page and ubatch: the same chunks follow, and what
  is taken over are full pages and chunks.

Only the engine knows what layers with a sliding window still have (`Engine.holds`). A prefix
restores all layers or none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count


@dataclass(frozen=True)
class Held:
    """A sequence that a row holds: its tokens, how many of them the cache has, and how many of
    these were prefilled."""

    tokens: Sequence[int]
    cached: int
    prefilled: int
    ended: bool = False


@dataclass(frozen=True)
class Start:
    """A request begins in `row`, with the first `length` positions of the row `source`."""

    row: int
    source: int
    length: int


class Rows:
    """The sequences of an engine's rows; `keep` False forgets each when it ends."""

    def __init__(self, slots: int, step: int, keep: bool = True):
        self.slots, self.step, self.keep = slots, step, keep
        self._held: dict[int, Held] = {}
        self._used: dict[int, int] = {}  # when each row was last put to use
        self._clock = count()

    def hold(self, row: int, held: Held) -> None:
        """A row now holds a sequence."""
        self._held[row], self._used[row] = held, next(self._clock)

    def forget(self, row: int) -> None:
        """A row holds nothing that is certain."""
        self._held.pop(row, None)
        self._used.pop(row, None)

    def holding(self) -> list[int]:
        """The rows that hold something."""
        return sorted(self._held)

    def latest(self) -> tuple[int, Held] | None:
        """The sequence that ended last, and its row."""
        ended = [row for row, held in self._held.items() if held.ended]
        row = max(ended, key=self._used.__getitem__, default=None)
        return None if row is None else (row, self._held[row])

    def spare(self, free: Sequence[int]) -> int:
        """Of free rows an empty one, or the one whose sequence ended longest ago."""
        return min(free, key=lambda row: (self._used.get(row, -1), row))

    def choose(
        self, prompt: Sequence[int], free: Sequence[int], holds: Callable[[int, int], bool]
    ) -> Start:
        """Where a prompt begins, one of the `free` rows; at least its last token is left to
        compute. holds(row, length): whether the engine can go on there after `length` positions.

        A free row with the longest prefix is taken itself; of a busy one the prefix is shared.
        """
        lengths = {row: self._common(row, prompt) for row in self._held}
        lengths = {row: n for row, n in lengths.items() if n and holds(row, n)}
        if not lengths:
            row = self.spare(free)
            return Start(row, row, 0)
        source = max(lengths, key=lambda row: (lengths[row], row in free, self._used[row]))
        row = source if source in free else self.spare(free)
        return Start(row, source, lengths[source])

    def _common(self, row: int, prompt: Sequence[int]) -> int:
        """Positions in whole steps that a prompt may take over from a row."""
        held = self._held[row]
        limit = min(held.prefilled, len(prompt) - 1)
        at = 0
        while at + self.step <= limit:
            part = slice(at, at + self.step)
            if list(held.tokens[part]) != list(prompt[part]):
                break
            at += self.step
        return at
