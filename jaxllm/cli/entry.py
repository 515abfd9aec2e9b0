"""The `jaxllm` program: what a process of its own needs around `main`.

Ctrl-C ends it without a traceback at any time: also while Python still imports, and after the last
line. Warnings are one line each, as errors are. Imports nothing but the standard library until
that is so.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from types import FrameType
from typing import Any, NoReturn, TextIO

SIGNALLED, INTERRUPTED = 128, 130  # codes above the first stand for signals, as in a shell


def run() -> NoReturn:
    """Run the command line of this process and end the process."""
    heeds = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not if in background
    if heeds:
        signal.signal(signal.SIGINT, _end)
    if sys.stderr is None:  # closed: what is meant for it must not reach stdout
        sys.stderr = open(os.devnull, "w")
    if sys.stdin is None:
        sys.stdin = open(os.devnull)
    warnings.showwarning = _show_warning
    sys.unraisablehook = _show_unraisable
    from jaxllm.cli.main import main

    if heeds:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    code = main()
    if heeds:
        signal.signal(signal.SIGINT, _end)
    if code > SIGNALLED:  # programs may still run; to take Python down under them crashes
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    os._exit(INTERRUPTED)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    print(f"jaxllm: warning: {' '.join(str(message).split())}", file=file or sys.stderr)


def _show_unraisable(lost: Any) -> None:
    """An interrupt that a callback lost is noted (`jaxllm.interrupts`) and comes again."""
    if not issubclass(lost.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(lost)
