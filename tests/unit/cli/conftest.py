"""The small model, and one command line run in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from cli_models import write_model
from jaxllm.cli.main import main


class Outcome(NamedTuple):
    """What a command line left behind."""

    code: int
    out: str
    err: str


Cli = Callable[..., Outcome]


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of the small model."""
    return str(write_model(tmp_path_factory.mktemp("cli") / "small.gguf"))


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run `jaxllm` with these arguments."""

    def run(*argv: str | Path) -> Outcome:
        capsys.readouterr()
        code = main([str(each) for each in argv])
        return Outcome(code, *capsys.readouterr())

    return run


@pytest.fixture
def refused(cli: Cli) -> Callable[..., str]:
    """Run `jaxllm`, assert that it refuses in one sentence, and return that."""

    def run(*argv: str | Path) -> str:
        code, out, err = cli(*argv)
        assert (code, out) == (2, ""), err
        assert err.startswith("jaxllm: error: ") and err.endswith("\n")
        assert err.count("\n") == 1 and "Traceback" not in err
        return err.removeprefix("jaxllm: error: ").strip()

    return run
