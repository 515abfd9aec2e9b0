"""A peer in another Python: started, asked for repetitions, ended."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from jaxllm.bench import peer_program
from jaxllm.bench.measure import Side
from jaxllm.bench.tests import Test
from jaxllm.errors import OptionError


@contextmanager
def peer_side(
    python: str, model: Path, prompt: Sequence[int], predict: int, threads: int
) -> Iterator[tuple[str, Side]]:
    """What the peer says of its versions, and its side.

    Raises:
        OptionError: when `python` cannot run, or fails.
    """
    asked = {"model": str(model), "threads": threads, "prompt": prompt, "predict": predict}
    # The source is passed as text: run as a file, its folder would come first on the path.
    source = Path(peer_program.__file__).read_text("utf-8")
    command = [python, "-c", source, json.dumps(asked)]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:

        def answer() -> dict[str, Any]:
            assert process.stdout is not None
            line = process.stdout.readline()
            if line:
                return json.loads(line)
            log.seek(0)
            last = ([each.strip() for each in log if each.strip()] or ["it said nothing"])[-1]
            raise OptionError(f"--peer-python {python!r} failed: {last}")

        def measure(tests: Sequence[Test]) -> list[float]:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # answer() tells why it ended
                process.stdin.write("go\n")
                process.stdin.flush()
            rates = answer()
            return [rates["decode" if test.predict else "prompt"] for test in tests]

        pipe = subprocess.PIPE
        try:
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True)
        except OSError as error:
            reason = error.strerror or error
            raise OptionError(f"--peer-python {python!r} cannot run: {reason}") from error
        try:
            yield answer()["versions"], measure
        finally:
            process.kill()
            process.communicate()
