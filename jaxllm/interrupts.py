"""Ctrl-C that cannot be lost.

Python raises KeyboardInterrupt wherever it happens to be. Inside a callback that may not fail, such
as JAX's hook of the garbage collector, the exception is reported, dropped, and the program goes on.
Within `kept` an interrupt is also noted, and what was dropped is raised when the block ends.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_noted = False


@contextmanager
def kept() -> Iterator[None]:
    """Raise KeyboardInterrupt in the block as ever, and at its end if it was lost in the block or,
    with blocks inside each other, anywhere since the outermost one began.

    Handlers of Ctrl-C other than Python's own stay in place, and so does its absence in threads
    other than the main one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    outermost = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if outermost:
        _note(False)
        signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
        _raise_noted()
    except Exception:  # what it stands for may be the interrupt, lost in a callback
        _raise_noted()
        raise
    finally:
        if outermost:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            _note(False)


def _interrupt(number: int, frame: FrameType | None) -> None:
    _note(True)
    raise KeyboardInterrupt


def _raise_noted() -> None:
    if _noted:
        raise KeyboardInterrupt


def _note(value: bool) -> None:
    global _noted
    _noted = value
