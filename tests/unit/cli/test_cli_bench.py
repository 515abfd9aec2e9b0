"""`jaxllm bench`: what it measures and prints, and how it treats a peer."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxllm import LLM, calibration
from jaxllm.bench import Results
from jaxllm.calibration import Limits
from sharding.links import with_links

TINY = ("-c", "64", "--page", "16", "-ub", "16", "--devices", "1")
SIZES = ("-p", "24", "-n", "4")
LIMITS = Limits(read_gb_s=10.0, matmul_gflop_s=100.0, link_gb_s=1.0)
Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def known_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def rates(mesh: Any, dtype: str, tell: Any) -> dict[str, float]:
        each = {f"{n} {i}": 10.0 for n in ("read_gbps", "tflops") for i in range(len(mesh))}
        return each | {"dispatch_us": 0.0, "latency_us": 0.0, "gbps": 10.0}

    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(calibration, "measure_rates", rates)
    monkeypatch.setattr(
        calibration, "measured", lambda mesh, *how: with_links(mesh, [1.0] * len(mesh))
    )
    monkeypatch.setattr(calibration, "measure_limits", lambda *asked: LIMITS)


def rows_of(outcome: tuple[int, str, str]) -> dict[str, dict[str, Any]]:
    """Rows of --json by test; those of a peer as peer:test."""
    code, out, err = outcome
    assert code == 0, err
    rows = json.loads(out)["rows"]
    return {("" if r["side"] == "jaxllm" else "peer:") + r["test"]: r for r in rows}


def peer(path: Path, body: str) -> str:
    """A program that stands for the peer's Python; it is given the source and the request."""
    path.write_text(f"#!{sys.executable}\nimport json, sys\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_rates_of_a_random_model(cli: Cli):
    found = rows_of(cli("bench", "--random-shape", "small", "-r", "3", "--json", *SIZES, *TINY))
    assert list(found) == ["pp24", "tg4"]
    for row in found.values():
        assert len(row["samples"]) == 3 and row["median"] in row["samples"]
        assert 0 < row["min"] <= row["mean"] <= row["max"] and row["deviation"] >= 0
        assert row["warmup_seconds"] > 0 <= row["compile_seconds"] and row["compute_bytes"] > 0
    row = found["tg4"]
    parameters = 8 * (512 * (512 + 2 * 256 + 512 + 3 * 1536) + 2 * 512) + 8192 * 512 + 512
    assert row["weight_bytes"] == 4 * parameters
    assert row["cache_bytes"] == 8 * 4 * 2 * 64 * 4 * 2  # two positions of K and V
    most = 10e9 / (row["weight_bytes"] + row["cache_bytes"])
    assert row["limit"] == pytest.approx(most)
    assert row["share"] == pytest.approx(row["median"] / most)
    assert row["predicted"] == pytest.approx(most, rel=0.01)


def test_types_of_random_matrices(cli: Cli, refused: Callable[..., str]):
    """Held quantised unless --weights says otherwise; the name of the model says the type."""
    shape = ("--random-shape", "small", "-r", "1", "-p", "0", "-n", "2", *TINY)
    code, out, err = cli("bench", *shape, "--random-type", "Q8_0,Q4_K", "--json")
    assert code == 0, err
    rows = json.loads(out)["rows"]
    assert [row["random_type"] for row in rows] == ["Q8_0", "Q4_K"]
    assert [row["model"] for row in rows] == ["random small Q8_0", "random small Q4_K"]
    assert {row["weights"] for row in rows} == {"quantised"}
    few, fewer = (row["weight_bytes"] for row in rows)
    assert fewer / few == pytest.approx(4.625 / 8.5, rel=0.01)
    table = str(Results(tuple(rows))).splitlines()
    assert table[1].split()[:3] == ["model", "weights", "random_type"]
    both = ("--random-type", "Q4_0", "--weights", "dequantised")
    (row,) = json.loads(cli("bench", *shape, *both, "--json")[1])["rows"]
    assert row["weights"] == "dequantised" and row["weight_bytes"] > 3 * few
    assert "Q4_K, Q5_K, Q6_K, not 'Q3_K'" in refused("bench", *shape, "--random-type", "Q8_0,Q3_K")
    assert "goes with --random-shape" in refused("bench", "--random-type", "Q4_K")
    assert "need random_type (--random-type)" in refused("bench", *shape, "--weights", "quantised")


def test_a_sweep_with_depths_and_a_prompt_with_what_follows(
    cli: Cli, tmp_path: Path, refused: Callable[..., str]
):
    """Every combination; what cannot be measured says why; only what was swept or given shows."""
    options = ("--random-shape", "small", "-nkvo", "0,1", "-r", "1", "-p", "8", "-n", "4")
    options += ("-pg", "8,4", "-d", "0,32", "-d", "8", "-np", "2", *TINY)
    code, out, err = cli("bench", *options, "-o", "jsonl")
    assert code == 0, err
    (tmp_path / "a.jsonl").write_text(out)
    results = Results.read(tmp_path / "a.jsonl")
    assert {row["kv"] for row in results.rows} == {"device", "host"}
    host = {row["test"]: row for row in results.rows if row["kv"] == "host"}
    names = [f"{test}{at}" for at in ("", " @ d8", " @ d32") for test in ("pp8", "tg4", "pg8+4")]
    assert list(host) == names
    assert "of 8 earlier tokens 0 were kept" in host["pp8 @ d8"]["error"]
    assert host["tg4"]["link_bytes"] == 0  # no page is full
    deep = host["tg4 @ d32"]
    assert deep["link_bytes"] == 2 * 16 * 8 * 4 * 2 * 64 * 4
    read = (deep["weight_bytes"] + 2 * deep["cache_bytes"]) / 10e9
    assert 2 / deep["limit"] == pytest.approx(max(read, 2 * deep["link_bytes"] / 1e9))
    table = str(results).splitlines()
    assert table[1].split()[:7] == ["engine", "kv", "parallel", "ubatch", "ctx", "page", "test"]
    assert "link MB/token" in table[1] and "memory read 10.0 GB/s" in str(results)
    assert results.to_markdown().splitlines()[1].startswith("| --- | --- | ---: |")
    assert "<table>" in results._repr_html_()
    columns = list(csv.DictReader(results.to_csv().splitlines()))
    assert len(columns) == 18 and float(columns[1]["median"]) > 0

    files = ("--compare", tmp_path / "a.jsonl", tmp_path / "a.jsonl")
    compared = json.loads(cli("bench", *files, "--json")[1])
    assert len(compared["rows"]) == 14 and not any(r["change"] for r in compared["rows"])
    assert "+0.0%" in cli("bench", *files)[1] and "| kv |" in cli("bench", *files, "-o", "md")[1]
    rows = [row | {"ubatch": 32, "median": 2 * row["median"]} for row in results.rows[:1]]
    (tmp_path / "b.jsonl").write_text(Results(tuple(rows)).to_jsonl())
    out = cli("bench", "--compare", tmp_path / "a.jsonl", tmp_path / "b.jsonl")[1]
    assert "ubatch: 16 before, 32 after" in out and "+100.0%" in out and "only in one" in out
    (tmp_path / "c.jsonl").write_text("{}")
    assert "no rows of tests" in refused("bench", "--compare", *[tmp_path / "c.jsonl"] * 2)


@pytest.mark.parametrize(
    "text",
    ['"median": "fast"', '"median": NaN', '"median": -1', '"median": 1e999', '"median": [1]']
    + ['"median": 1, "deviation": Infinity', '"median": true', f'"median": 1{"0" * 400}']
    + ['"median": 1, "ubatch": [1]', '"median": 1, "given": 1', f'"x": {"[" * 100000}'],
)
def test_rows_that_no_bench_writes(refused: Callable[..., str], tmp_path: Path, text: str):
    path = tmp_path / "a.jsonl"
    path.write_text('{"side": "jaxllm", "test": "tg4", ' + text + "}")
    assert "cannot be read as results" in refused("bench", "--compare", path, path)


def test_a_combination_that_cannot_be_is_a_row(cli: Cli, refused: Callable[..., str], small: str):
    line = ("bench", "-m", small, "-sm", "tensor", "-p", "0", "-n", "2", "-r", "1", *TINY[:-2])
    found = cli(*line, "--devices", "2", "-as", "1/1,1/1/1", "-o", "json")
    rows = json.loads(found[1])["rows"]
    assert [row["test"] for row in rows] == ["tg2", "-"] and rows[0]["attn_split"] == "1,1"
    assert "3 shares for 2 devices" in rows[1]["error"]
    header = str(Results(tuple(rows))).splitlines()[1]
    assert "attn_split" in header and "engine" not in header and "not measured" in header
    only = refused(*line, "--devices", "2", "-as", "1,1,1", "-as", "1,1,1,1")
    assert "shares for 2 devices" in only


def test_a_sweep_of_batches(cli: Cli, small: str):
    """Chunks that a batch has no room for are a row that says so; -ub goes with a smaller -b."""
    line = ("bench", "-m", small, "-p", "0", "-n", "0", "-pg", "40,4", "-np", "2", "-r", "1")
    rows = json.loads(cli(*line, *TINY, "-b", "16,8,64", "-o", "json")[1])["rows"]
    assert [row["batch"] for row in rows] == [16, 8, 64]
    assert [row["test"] for row in rows] == ["pg40+4", "-", "pg40+4"]
    assert "--batch-size/-b is 8" in rows[1]["error"]
    assert "batch" in str(Results(tuple(rows))).splitlines()[1]
    rows = json.loads(cli(*line, "-c", "64", "--page", "16", "-b", "40", "-o", "json")[1])["rows"]
    assert [(row["batch"], row["ubatch"]) for row in rows] == [(40, 32)]


def test_nothing_is_reused(cli: Cli, small: str, monkeypatch: pytest.MonkeyPatch):
    """Every repetition computes its whole prompt."""
    cached, generate = [], LLM.generate

    def heard(self: LLM, *args: Any) -> Any:
        done = generate(self, *args)
        cached.extend(c.cached_tokens for c in done)
        return done

    monkeypatch.setattr(LLM, "generate", heard)
    code, out, err = cli("bench", "-m", small, "-r", "2", *SIZES, *TINY)
    assert code == 0, err
    assert len(cached) == 6 and not any(cached)
    assert "pp24" in out and "tg4" in out and "warm-up s" in out


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
    found = rows_of(cli("bench", "-m", small, *options, *SIZES, *TINY))
    assert found["peer:pp24"]["samples"] == [1, 2, 3] and found["peer:pp24"]["peer"] == "peer 1"
    for test, median in (("pp24", 2), ("tg4", 2)):
        ratio = found[f"peer:{test}"]["ratio"]
        assert ratio == pytest.approx(found[test]["median"] / median)
    request = json.loads(log.read_text())
    assert request["model"] == small and request["predict"] == 4
    assert request["threads"] == found["pp24"]["cores"] and len(request["prompt"]) == 24


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
    message = refused("bench", "-m", small, *options, *SIZES, *TINY)
    assert said in message and python in message


def test_options_that_cannot_be(refused: Callable[..., str], small: str, tmp_path: Path):
    for other in (("--random-shape", "small"), ("--compare", "a", "b")):
        assert "not allowed with" in refused("bench", "-m", small, *other)
    assert "no test is left" in refused("bench", "-m", small, "-p", "0", "-n", "0")
    assert "'1,x' is not a number of tokens" in refused("bench", "-m", small, "-d", "1,x")
    assert "'1,q9' is not" in refused("bench", "-m", small, "-ctk", "1,q9")
    assert "'2' is not 0 or 1" in refused("bench", "-m", small, "-nkvo", "2")
    assert "'8' is not two numbers" in refused("bench", "-m", small, "-pg", "8")
    assert "--repetitions is 0" in refused("bench", "-m", small, "-r", "0")
    assert "--json does not go with -o md" in refused("bench", "--json", "-o", "md")
    assert "give both" in refused("bench", "-m", small, "--peer", "transformers")
    both = ("--peer", "transformers", "--peer-python", "p")
    assert "--random-shape" in refused("bench", "--random-shape", "small", *both)
    assert "one -p" in refused("bench", "-m", small, "-p", "8,16", *both)
    assert "--n-depth is 8" in refused("bench", "-m", small, "-d", "8", *both)
    assert "give both" in refused("bench", "-m", small, "--peer-python", str(tmp_path))
    longer = ("-p", "4", "-n", "80", "-c", "64", "-r", "1", "--devices", "1")
    assert "ends before tg80 does" in refused("bench", "-m", small, *longer)
