"""Shares for four devices: four are taken, anything else is refused by the argument's name."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import archs
from jaxllm.cli.main import main
from jaxllm.testing import random_llm
from scenarios.runs import config
from sharding import ShareError

ARGUMENTS = {
    "tensor_split": ("-ts", "--tensor-split/-ts"),
    "attn_split": ("-as", "--attn-split/-as"),
}
WRONG = [
    *("1,1,1", "1,1,1,1,1", "1,nan", "-1,2", "1x,1", "0,0", "", "1,,1", "1,inf", "inf"),
    *("1,nan,1,1", "-1,2,1,1", "1x,1,1,1", "0,0,0,0", "1,,1,1", "inf,1,1,1", ",,,", "1,1,1,1,"),
]
WRONG_LISTS = [
    *([1, 1, 1], [1] * 5, [1, math.nan, 1, 1], [-1, 2, 1, 1], [0.0] * 4, [], [math.inf, 1, 1, 1]),
]


@pytest.fixture(scope="module")
def model() -> str:
    """A model file."""
    data = Path(archs.__file__).parent / "data"
    return str(archs.write(data / "llama-dense.json.gz"))


@pytest.mark.parametrize("field", ARGUMENTS)
def test_as_many_shares_as_devices(field: str, model: str, capsys: pytest.CaptureFixture[str]):
    flag, _ = ARGUMENTS[field]
    for shares in ("1,1,1,1", "2,1,1,0"):
        llm = random_llm(config(8, 4), devices=4, split_mode="tensor", **{field: shares})
        wanted = tuple(float(share) for share in shares.split(","))
        assert getattr(llm.plan.options, field) == wanted
        argv = ["plan", model, "--devices", "4", "-sm", "tensor", f"{flag}={shares}"]
        assert main(argv) == 0, capsys.readouterr().err


@pytest.mark.parametrize("field", ARGUMENTS)
@pytest.mark.parametrize("shares", WRONG)
def test_wrong_text(shares: str, field: str, model: str, capsys: pytest.CaptureFixture[str]):
    flag, name = ARGUMENTS[field]
    with pytest.raises(ShareError, match=name):
        random_llm(config(8, 4), devices=4, split_mode="tensor", **{field: shares})
    argv = ["--devices", "4", "-sm", "tensor", f"{flag}={shares}"]
    for command in (["plan", model], ["generate", "-m", model, "x"]):
        capsys.readouterr()
        assert main([*command, *argv]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and name in err


@pytest.mark.parametrize("field", ARGUMENTS)
@pytest.mark.parametrize("shares", WRONG_LISTS, ids=str)
def test_wrong_numbers(shares: list[float], field: str):
    with pytest.raises(ShareError, match=ARGUMENTS[field][1]):
        random_llm(config(8, 4), devices=4, split_mode="tensor", **{field: shares})
