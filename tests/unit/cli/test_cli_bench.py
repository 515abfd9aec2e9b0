"""`jaxllm bench`: what it measures and prints, and how it treats a peer."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxllm.cli.bench_machine import Machine

TINY = ("-p", "24", "-n", "4", "-c", "64", "--page", "16", "-ub", "16", "--devices", "1")
MACHINE = Machine(read_gb_s=10.0, matmul_gflop_s=100.0, link_gb_s=1.0)
Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxllm.cli.bench.measure_machine", lambda llm: MACHINE)


def peer(path: Path, body: str) -> str:
    """A program that stands for the peer's Python; it is given the source and the request."""
    path.write_text(f"#!{sys.executable}\nimport json, sys\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_rates_of_a_random_model(cli: Cli):
    code, out, err = cli("bench", "--random-shape", "small", "-r", "3", "--json", *TINY)
    assert code == 0, err
    found = json.loads(out)
    assert (found["n_prompt"], found["n_predict"]) == (24, 4)
    for test in ("prompt", "decode"):
        row = found["rates"]["jaxllm"][test]
        assert len(row["samples"]) == 3
        assert 0 < row["min"] <= row["median"] <= row["max"]
        assert row["median"] in row["samples"]
    limit = found["limits"]["decode"]
    parameters = 8 * (512 * (512 + 2 * 256 + 512 + 3 * 1536) + 2 * 512) + 8192 * 512 + 512
    assert limit["weight_bytes"] == 4 * parameters
    assert limit["cache_bytes"] == 8 * 4 * 2 * 64 * 4 * 2  # two positions of K and V
    most = 10e9 / (limit["weight_bytes"] + limit["cache_bytes"])
    assert limit["tokens_per_second"] == pytest.approx(most)
    decode = found["rates"]["jaxllm"]["decode"]["median"]
    assert limit["share"] == pytest.approx(decode / limit["tokens_per_second"])


def test_nothing_is_reused(cli: Cli, small: str, monkeypatch: pytest.MonkeyPatch):
    """Every repetition computes its whole prompt."""
    from jaxllm import LLM

    cached, generate = [], LLM.generate

    def heard(self: LLM, *args: Any) -> Any:
        done = generate(self, *args)
        cached.extend(c.cached_tokens for c in done)
        return done

    monkeypatch.setattr(LLM, "generate", heard)
    code, _, err = cli("bench", "-m", small, "-r", "2", *TINY)
    assert code == 0, err
    assert len(cached) == 6 and not any(cached)


def test_the_table(cli: Cli, small: str):
    code, out, err = cli("bench", "-m", small, "-r", "1", *TINY)
    assert code == 0, err
    assert "jaxllm prompt 24" in out and "jaxllm decode 4" in out
    assert "memory read 10.0 GB/s, float32 matmul 100 GFLOP/s" in out
    assert "of cache, 0.000 GB of it over the link" in out


def test_decode_at_depths(cli: Cli):
    options = ("--random-shape", "small", "-d", "8,40", "-nkvo", "-r", "1", "--json", *TINY)
    code, out, err = cli("bench", *options)
    assert code == 0, err
    found = json.loads(out)
    assert list(found["rates"]["jaxllm"]) == ["prompt", "decode @ d8", "decode @ d40"]
    shallow, deep = (found["limits"][f"decode @ d{depth}"] for depth in (8, 40))
    assert shallow["link_bytes"] == 0  # no page is full
    assert deep["link_bytes"] == 2 * 16 * 8 * 4 * 2 * 64 * 4
    read = (deep["weight_bytes"] + deep["cache_bytes"]) / 10e9
    assert 1 / deep["tokens_per_second"] == pytest.approx(max(read, deep["link_bytes"] / 1e9))


def test_sides_take_turns_and_the_ratio_is_of_medians(cli: Cli, small: str, tmp_path: Path):
    log = tmp_path / "asked.json"
    body = f"""
request = json.loads(sys.argv[3])
assert sys.argv[1] == "-c" and "transformers" in sys.argv[2]
open({str(log)!r}, "w").write(sys.argv[3])
print(json.dumps({{"versions": "peer 1"}}), flush=True)
for turn, _ in enumerate(sys.stdin):  # the first answer is warm-up and must not count
    print(json.dumps({{"prompt": 1e9 if turn == 0 else turn, "decode": 2.0}}), flush=True)
"""
    python = peer(tmp_path / "peer", body)
    options = ("--peer", "transformers", "--peer-python", python, "-r", "3", "--json")
    code, out, err = cli("bench", "-m", small, *options, *TINY)
    assert code == 0, err
    found = json.loads(out)
    assert found["peer"] == "peer 1"
    assert found["rates"]["transformers"]["prompt"]["samples"] == [1, 2, 3]
    own = found["rates"]["jaxllm"]
    assert found["ratio"]["prompt"] == pytest.approx(own["prompt"]["median"] / 2)
    assert found["ratio"]["decode"] == pytest.approx(own["decode"]["median"] / 2)
    request = json.loads(log.read_text())
    assert request["model"] == small and request["predict"] == 4
    assert request["threads"] == found["cores"] and len(request["prompt"]) == 24


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise ModuleNotFoundError('no torch')", "no torch"),
        ("sys.exit(1)", "said nothing"),
        ("print(json.dumps({'versions': ''}), flush=True); sys.exit('lost')", "lost"),
    ],
)
def test_a_peer_that_fails(
    refused: Callable[..., str], small: str, tmp_path: Path, body: str, said: str
):
    python = peer(tmp_path / "peer", body)
    options = ("--peer", "transformers", "--peer-python", python)
    message = refused("bench", "-m", small, *options, *TINY)
    assert said in message and python in message


def test_options_that_cannot_be(refused: Callable[..., str], small: str, tmp_path: Path):
    assert "--n-prompt is 0" in refused("bench", "-m", small, "-p", "0")
    assert "--n-depth is '1,x'" in refused("bench", "-m", small, "-d", "1,x")
    assert "--repetitions is 0" in refused("bench", "-m", small, "-r", "0")
    assert "give both" in refused("bench", "-m", small, "--peer", "transformers")
    both = ("--peer", "transformers", "--peer-python", "p")
    assert "--random-shape" in refused("bench", "--random-shape", "small", *both)
    assert "p" in refused("bench", "-m", small, "--peer-python", str(tmp_path))
    longer = ("-p", "4", "-n", "80", "-c", "64", "-r", "1", "--devices", "1")
    assert "80" in refused("bench", "-m", small, *longer)
