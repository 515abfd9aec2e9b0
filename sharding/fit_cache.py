"""A host cache as a budget spends it (`sharding.residency`), and what a step then streams.

Its slices, one a layer and device, stay from the largest kind on: whole ones while they fit, then
part of one in whole groups of pages from its beginning. No other stays then.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, reduce
from typing import Any

import numpy as np

from sharding.fit_units import Floats
from sharding.options import PlanOptions
from sharding.rings import resident_pages

STEPS = 2  # kinds of step: a chunk of prompt, and one that decodes


class Pages:
    """A kind of layers' cache: `full` pages of `size` bytes a slot, whose heads follow `unit`.

    `steps` are, of each kind of step, the pages that it reads and how many times it does.
    """

    def __init__(
        self,
        full: int,
        size: float,
        unit: int,
        slots: int,
        options: PlanOptions,
        steps: Sequence[tuple[range, int]],
    ):
        self.unit = unit
        self.group = options.group_pages * size  # bytes in flight together
        self.bytes = slots * full * size
        self.group_bytes = slots * self.group
        self.groups = -(-full // options.group_pages)
        kept = np.minimum(np.arange(self.groups + 1) * options.group_pages, full)
        self.kept = slots * size * kept  # bytes of so many groups, [groups + 1]
        # Bytes that a step of each kind reads, and of them those of so many groups that stay.
        self.live = [times * len(live) * size for live, times in steps]
        stay = [[resident_pages(live, int(n), full) for n in kept] for live, _ in steps]
        self.stay = [
            times * size * np.array(own) for own, (_, times) in zip(stay, steps, strict=True)
        ]


class Cache:
    """The slices of some layers on some device: of each kind `counts`, and the `parts` of a layer's
    heads that they have; arrays that broadcast together, a pair a kind."""

    def __init__(self, kinds: Sequence[Pages], counts: Sequence[Floats], parts: Sequence[Floats]):
        self._kinds = list(zip(kinds, counts, parts, strict=True))
        pages = [count * part * kind.bytes for kind, count, part in self._kinds]
        groups = [(count > 0) * part * kind.group for kind, count, part in self._kinds]
        self.bytes = np.asarray(sum(pages, 0.0))
        self.group = np.asarray(reduce(np.maximum, groups, np.zeros(())))  # in flight together

    def live(self, step: int) -> float:
        """Bytes of all layers that a step of a kind reads."""
        return float(sum(np.max(count) * kind.live[step] for kind, count, _ in self._kinds))

    def streamed(self, kept: Floats) -> tuple[list[Floats], Floats]:
        """Bytes that a step of each kind streams while so many stay, and bytes of the largest group
        of those that are streamed."""
        sent, largest = [np.zeros_like(kept) for _ in range(STEPS)], np.zeros_like(kept)
        for kind, count, part in self._kinds:
            size = np.maximum(part * kind.bytes, 1.0)
            whole = np.minimum(np.floor(kept / size + 1e-9), count)
            some = whole < count
            left = kept - whole * size
            groups = np.floor(left / np.maximum(part * kind.group_bytes, 1.0) + 1e-9)
            groups = np.where(some, np.clip(groups, 0, kind.groups), 0).astype(int)
            for own, live, stay in zip(sent, kind.live, kind.stay, strict=True):
                own += part * ((count - whole) * live - stay[groups])
            largest = np.maximum(largest, some * part * kind.group)
            kept = np.where(some, 0.0, left)
        return sent, largest

    def kept_for(self, step: int, streamed: Floats) -> Floats:
        """The fewest bytes that must stay so that a step of a kind streams no more than so many."""
        kept = np.zeros_like(streamed)
        for kind, count, part, before, live, later, least in self._streaming[step]:
            own = streamed - later
            whole = np.maximum(count - np.floor(own / live + 1e-9) - 1, 0.0)
            rest = np.maximum((count - whole) * live - own, 0.0)
            stay = rest / least * (1 - 1e-9)
            groups = np.minimum(np.searchsorted(kind.stay[step], stay), kind.groups)
            own_kept = before + part * (whole * kind.bytes + kind.kept[groups])
            kept = np.where(own >= -1e-9 * later, np.where(count > 0, own_kept, before), kept)
        return kept

    @cached_property
    def _streaming(self) -> list[list[tuple[Any, ...]]]:
        """Of each kind of step and layers, those that stay last first: the kind, its counts and
        parts, bytes of all that stay before, those of a layer that a step reads, those that it
        reads of all later ones, and the part to divide by."""
        found = []
        for step in range(STEPS):
            before, later, own = self.bytes, 0.0, []
            for kind, count, part in reversed(self._kinds):
                before = before - count * part * kind.bytes
                live = np.maximum(part * kind.live[step], 1e-9)
                own.append((kind, count, part, before, live, later, np.maximum(part, 1e-9)))
                later = later + count * part * kind.live[step]
            found.append(own)
        return found
