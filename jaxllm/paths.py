"""Where files are written: beside their place first, and moved there when they are whole."""

from __future__ import annotations

import os
from pathlib import Path

from jaxllm.errors import JaxllmError


def part_of(path: Path) -> Path:
    """The file beside `path` that this process writes."""
    return path.with_name(f"{path.name}.{os.getpid()}.part")


def check_no_folder(path: Path, what: str, kind: type[JaxllmError]) -> None:
    """An error of a kind where `path` is a folder; `what` is to be there."""
    if os.path.isdir(path):
        raise kind(f"{what} {str(path)!r} is a folder; give the path of a file")


def check_place(path: Path, what: str, kind: type[JaxllmError]) -> None:
    """An error of a kind where no file can be written, told before the work that it is to keep."""
    check_no_folder(path, what, kind)
    try:
        part_of(path).touch()
        part_of(path).unlink()
    except OSError as error:
        reason = error.strerror or error
        raise kind(f"cannot write {what} {str(path)!r}: {reason}") from error
