"""Two runs side by side: which rates changed, and by more than they scatter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxllm.bench.results import SETTINGS, Results, Row, to_csv
from jaxllm.bench.tables import cell, html, markdown, text
from jaxllm.errors import OptionError


@dataclass(frozen=True)
class Comparison:
    """Rows of two results of the same test, side and settings that either of them sweeps.

    `rows` have those, both medians, the change (0.1 is a tenth more in the second), and whether it
    is less than both deviations together. `changed` has settings that are one in the first and
    another in the second, `alone` the tests that only one of them has.
    """

    names: tuple[str, ...]
    rows: tuple[Row, ...]
    changed: dict[str, tuple[Any, Any]]
    alone: tuple[str, ...]

    @classmethod
    def of(cls, first: Results, second: Results) -> Comparison:
        """
        Raises:
            OptionError: when they have no test in common.
        """
        values = [
            {n: {cell(r.get(n)) for r in each.rows} for n in SETTINGS} for each in (first, second)
        ]
        swept = tuple(n for n in SETTINGS if any(len(each[n]) > 1 for each in values))
        names = (*swept, "side", "test")
        changed = {
            n: (values[0][n].pop(), values[1][n].pop())
            for n in SETTINGS
            if n not in swept and values[0][n] != values[1][n]
        }
        before, after = (
            {tuple(cell(r.get(n)) for n in names): r for r in each.rows if r.get("median")}
            for each in (first, second)
        )
        rows = tuple(_row(names, key, before[key], after[key]) for key in before if key in after)
        if not rows:
            raise OptionError("the two results have no measured test in common; run the same tests")
        alone = tuple(" ".join(key) for key in before.keys() ^ after.keys())
        return cls(names, rows, changed, tuple(sorted(alone)))

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"changed": self.changed, "rows": list(self.rows), "alone": list(self.alone)}

    def to_csv(self) -> str:
        """The rows."""
        return to_csv(self.rows)

    def to_markdown(self) -> str:
        """The rows as a table."""
        return markdown(self._table())

    def _table(self) -> list[list[str]]:
        lines = [[*self.names, "before", "after", "change", ""]]
        for row in self.rows:
            words = "within the deviations" if row["within_deviation"] else ""
            figures = [f"{row['before']:.2f}", f"{row['after']:.2f}", f"{row['change']:+.1%}"]
            lines.append([*(row[n] for n in self.names), *figures, words])
        return lines

    def _changes(self) -> list[str]:
        return [f"{name}: {old} before, {new} after" for name, (old, new) in self.changed.items()]

    def _leftovers(self) -> list[str]:
        return [f"only in one: {each}" for each in self.alone]

    def __str__(self) -> str:
        return "\n".join([*self._changes(), text(self._table()), *self._leftovers()])

    def _repr_html_(self) -> str:
        return html(self._table(), self._changes(), self._leftovers())


def _row(names: tuple[str, ...], key: tuple[str, ...], old: Row, new: Row) -> Row:
    scatter = (old.get("deviation") or 0.0) + (new.get("deviation") or 0.0)
    return dict(zip(names, key, strict=True)) | {
        "before": old["median"],
        "after": new["median"],
        "change": new["median"] / old["median"] - 1,
        "within_deviation": abs(new["median"] - old["median"]) < scatter,
    }
