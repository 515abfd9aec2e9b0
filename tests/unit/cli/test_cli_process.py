"""How the program starts and ends: Ctrl-C, readers that go away, output that cannot be written."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pytest

pytestmark = pytest.mark.smoke
HEEDING = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"


def _code() -> str:
    """A jaxllm process in which Ctrl-C means what it means at a terminal."""
    return (
        HEEDING + "import jaxllm.cli.main; print('up', file=sys.stderr)\n"
        "from jaxllm.cli.entry import run; run()"
    )


@contextmanager
def child(*argv: str) -> Iterator[tuple[subprocess.Popen[bytes], BinaryIO, BinaryIO]]:
    """A process of `jaxllm`, its stdout and its stderr, from when its imports are done."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", _code(), *argv]
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, stdin=pipe, bufsize=0) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            assert process.stderr.readline() == b"up\n"
            yield process, process.stdout, process.stderr  # type: ignore[misc]
        finally:
            process.kill()


ENDLESS = ("-n", "1000000", "-c", "60000", "--ignore-eos", "--devices", "1")


def test_ctrl_c_ends_with_a_new_line_and_130(small: str):
    with child("generate", "hello", "-m", small, *ENDLESS) as (process, out, err):
        assert out.read(1)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        assert err.read() == b"\n"


def test_ctrl_c_while_waiting_for_the_prompt():
    with child("generate", "-") as (process, _, err):
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        assert err.read() == b"\n"


@pytest.mark.parametrize("argv", [("models",), ("generate", "hello", *ENDLESS)])
def test_a_reader_that_goes_away(argv: tuple[str, ...], small: str):
    generates = argv[0] == "generate"
    with child(*argv, *(("-m", small) if generates else ())) as (process, out, err):
        if generates:
            assert out.read(1)
        out.close()
        assert process.wait(timeout=60) == 141
        assert err.read() == b""


def test_a_reader_of_a_table_that_goes_away():
    script = Path(__file__).parents[3] / "docs" / "scaling_table.py"
    command, pipe = [sys.executable, "-u", str(script)], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.wait(timeout=60) == -signal.SIGPIPE
        assert process.stderr.read() == b""


def test_ctrl_c_while_importing_is_silent():
    """It comes as the first module that imports others does."""
    code = (
        HEEDING + "class Interrupting:\n"
        "    def find_spec(self, name, *_):\n"
        "        name == 'jaxllm.cli.main' and signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "from jaxllm.cli.entry import run; run()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def jaxllm(*argv: str, **streams: object) -> tuple[int, str]:
    """The exit code and the stderr of a process of its own."""
    command = [sys.executable, "-m", "jaxllm", *argv]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, **streams)  # type: ignore
    return done.returncode, done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("argv", [("models",), ("--help",), ("--version",), ("models", "--help")])
def test_output_that_cannot_be_written_is_one_sentence(argv: tuple[str, ...]):
    with open("/dev/full", "w") as full:
        code, err = jaxllm(*argv, stdout=full)
    assert code == 2
    assert err == "jaxllm: error: cannot write to standard output: No space left on device\n"


def redirected(how: str, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `jaxllm` under a redirection of the shell."""
    command = ["sh", "-c", f'exec "$@" {how}', "sh", sys.executable, "-m", "jaxllm", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_closed_streams():
    code, _, err = redirected(">&-", "models")
    assert code == 2
    assert err.startswith("jaxllm: error: standard output is closed") and err.count("\n") == 1
    code, _, err = redirected("<&-", "generate", "-")
    assert code == 2 and "the prompt is empty" in err
    assert redirected("2>&-", "plan", "none.gguf") == (2, "", "")


def test_warnings_are_one_line(small: str):
    code, err = jaxllm("plan", small, "--devices", "1", "-c", "70000", stdout=subprocess.DEVNULL)
    assert code == 0
    assert err.startswith("jaxllm: warning: the context (-c) of 70000") and err.count("\n") == 1
