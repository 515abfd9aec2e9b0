"""The README's Python runs as it stands there, and prints what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", README, re.DOTALL)


def programs() -> list[tuple[str, str]]:
    """Each block as a program and what it prints where that is shown; one that uses names `from
    above` follows the block above."""
    whole: list[tuple[str, str]] = []
    for code, shown in BLOCKS:
        above = whole.pop()[0] if "from above" in code else ""
        whole.append((above + code, shown))
    return whole


@pytest.mark.slow
@pytest.mark.usefixtures("smollm2_path")
@pytest.mark.parametrize("index", range(len(programs())))
def test_a_python_example(index: int, tmp_path: Path):
    code, shown = programs()[index]
    env = {k: v for k, v in os.environ.items() if k not in ("JAX_NUM_CPU_DEVICES", "NPROC")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
    if shown:
        assert done.stdout == shown
