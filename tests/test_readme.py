"""What the README says that its commands and examples print."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxllm.cli.main import main

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


def test_the_plan_of_the_default_model(smollm2_path: Path, capsys: pytest.CaptureFixture[str]):
    (line,) = re.findall(r"^jaxllm (plan model.gguf .*)$", README, re.MULTILINE)
    (shown,) = re.findall(r"```text\n(Smollm2 135M.*?)```", README, re.DOTALL)
    assert main(line.replace("model.gguf", str(smollm2_path)).split()) == 0
    assert capsys.readouterr().out == shown
