"""Progress on standard error: bars where a person looks at it, and a line of what takes long."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from jaxllm.models.weights import Progress as Report
from sharding import Plan, format_bytes
from sharding.links import Delivery, measure_link

Tell = Callable[[str], None]


def silent(text: str) -> None:
    """Tell nobody."""


@contextmanager
def loading(plan: Plan, show: bool) -> Iterator[Report | None]:
    """A bar over the bytes of all slices; None where nobody would see it."""
    if not (show and sys.stderr.isatty()):
        yield None
        return
    columns = (TextColumn("loading"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        total = sum(plan.weight_bytes(i) for i in range(len(plan.mesh)))
        task = bar.add_task("loading", total=total)
        yield lambda done: bar.advance(task, done)


def measure_aloud(device: Any, how: Delivery) -> float:
    """`measure_link`, which takes a while, with a line that says so."""
    what = f"copies of {format_bytes(how.group_bytes)} from {how.place} memory"
    print(
        f"measuring the link of {device.platform}:{device.id} by {what}, once; "
        "--link-gbps (link_gbps=) gives rates instead",
        file=sys.stderr,
        flush=True,
    )
    return measure_link(device, how)


@contextmanager
def measuring(show: bool) -> Iterator[Tell]:
    """A line that says what is measured, from the first thing on that is told; none without."""
    if not (show and sys.stderr.isatty()):
        yield silent
        return
    columns = (SpinnerColumn(), TextColumn("measuring {task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks: list[TaskID] = []

        def tell(text: str) -> None:
            if tasks:
                bar.update(tasks[0], description=text)
            else:
                tasks.append(bar.add_task(text, total=None))

        yield tell


def telling(tell: Tell) -> Callable[[Any, Delivery], float]:
    """`measure_link` that tells of each link first."""

    def measure(device: Any, how: Delivery) -> float:
        size = format_bytes(how.group_bytes)
        tell(f"the link of {device.platform}:{device.id}, {size} from {how.place} memory")
        return measure_link(device, how)

    return measure


@contextmanager
def counting(what: str, total: int, show: bool) -> Iterator[Tell]:
    """A bar over `total` things; what is yielded is told of each, with a text to show beside it."""
    if not (show and sys.stderr.isatty()):
        yield silent
        return
    texts = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    columns = (*texts, TextColumn("{task.fields[text]}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total, text="")
        yield lambda text: bar.update(task, advance=1, text=text)


@contextmanager
def searching(show: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A bar over the steps of what a search is at, as it is told: what, how many steps are done, of
    how many."""
    if not (show and sys.stderr.isatty()):
        yield lambda what, done, steps: None
        return
    columns = (TextColumn("searching: {task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda what, done, steps: bar.update(
            task, description=what, completed=done, total=steps
        )
