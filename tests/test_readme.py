"""What the README says that commands and examples print."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jaxllm.cli.main import main

README = (Path(__file__).parents[1] / "README.md").read_text("utf-8")


def shown(beginning: str) -> str:
    """The block of text that begins so."""
    (found,) = re.findall(r"```text\n(" + re.escape(beginning) + r".*?)```", README, re.DOTALL)
    return found


def test_the_example_of_two_gpus(capsys: pytest.CaptureFixture[str]):
    (code,) = re.findall(r"```python\n([^`]*def plan\(.*?)```", README, re.DOTALL)
    exec(code, {})
    assert capsys.readouterr().out == shown("device small needs")


def test_the_plan_of_the_default_model(smollm2_path: Path, capsys: pytest.CaptureFixture[str]):
    (line,) = re.findall(r"^jaxllm (plan model.gguf .*)$", README, re.MULTILINE)
    assert main(line.replace("model.gguf", str(smollm2_path)).split()) == 0
    assert capsys.readouterr().out == shown("Smollm2 135M")
