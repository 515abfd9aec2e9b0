"""Ctrl-C in a place where Python drops it."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator

import pytest

from jaxllm.interrupts import kept


class Dropping:
    """Interrupts when it is deleted, where exceptions are reported and dropped."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def python_handles_interrupts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "unraisablehook", lambda lost: None)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def test_a_dropped_interrupt_ends_the_block():
    reached = []
    with pytest.raises(KeyboardInterrupt), kept():
        Dropping()
        reached.append("end")
    assert reached == ["end"]
    with kept():  # and is not raised twice
        pass


def test_inside_another_block_the_next_end_raises():
    reached = []
    with pytest.raises(KeyboardInterrupt), kept():
        Dropping()
        with kept():
            reached.append("inner")
        reached.append("outer")
    assert reached == ["inner"]


def test_an_error_that_an_interrupt_became_is_an_interrupt():
    with pytest.raises(KeyboardInterrupt), kept():
        Dropping()
        raise RuntimeError("callback failed")
    with pytest.raises(RuntimeError, match="its own"), kept():
        raise RuntimeError("its own")


def test_elsewhere_it_is_raised_at_once():
    with pytest.raises(KeyboardInterrupt), kept():
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("not reached")


def test_other_handlers_and_threads_are_left_alone():
    seen = []
    signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    with kept():
        signal.raise_signal(signal.SIGINT)
    assert seen == [signal.SIGINT]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=lambda: kept().__enter__())
    thread.start()
    thread.join()
