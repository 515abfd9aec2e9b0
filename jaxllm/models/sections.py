"""Which rows of tensors the groups of a recurrent layer have: a layout that a parameter carries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Section(NamedTuple):
    """Rows that every group has `heads` heads of, `height` rows each, in a parameter's tensor of
    that index. Head h of group g begins at row first + g * group_step + h * head_step."""

    first: int
    height: int
    heads: int
    group_step: int
    head_step: int
    tensor: int = 0

    def rows(self, group: int) -> Iterator[slice]:
        """The rows of a group, in as few runs as there are."""
        start = self.first + group * self.group_step
        if self.head_step == self.height:
            yield slice(start, start + self.heads * self.height)
            return
        for head in range(self.heads):
            at = start + head * self.head_step
            yield slice(at, at + self.height)

    def end(self, groups: int) -> int:
        """One past the last row of so many groups."""
        last = (groups - 1) * self.group_step + (self.heads - 1) * self.head_step
        return self.first + last + self.height


def together(first: int, height: int, heads: int = 1, tensor: int = 0) -> Section:
    """Heads of one group next to each other, group after group."""
    return Section(first, height, heads, heads * height, height, tensor)


def tiled(first: int, height: int, heads: int, groups: int, tensor: int = 0) -> Section:
    """The first head of every group, then the second of every group, and so on."""
    return Section(first, height, heads, height, groups * height, tensor)


def heights(sections: Sequence[Section], tensors: int, groups: int) -> list[int]:
    """Rows of each of so many tensors that sections of all groups cover."""
    return [max(s.end(groups) for s in sections if s.tensor == i) for i in range(tensors)]


def in_order(sections: Sequence[Section]) -> bool:
    """Whether groups have the rows of one tensor one after another."""
    [one, *more] = sections
    return not more and one == together(0, one.height, one.heads)
