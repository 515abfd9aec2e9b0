"""`jaxllm fit`, machine files, rates that are measured once, and `jaxllm perplexity`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM, OptionError, SamplingParams, calibration
from jaxllm.cli.main import make_parser
from jaxllm.llm import open_mesh
from jaxllm.models.decoder import DecoderBlock
from jaxllm.models.recurrent import DeltaNet
from jaxllm.planning import fit_config
from sharding import PlanError
from sharding.machine import read_machine
from support import layer_config, model_config, random_ids

Cli = Callable[..., tuple[int, str, str]]
TWO = """
[[device]]
name = "large"
memory_gib = 0.1
read_gbps = 500
tflops = 50
link_gbps = 20
[[device]]
name = "small"
count = 2
memory_gib = 0.08
free_gib = 0.075
read_gbps = 300
tflops = 20
link_gbps = 3.3
[exchange]
latency_us = 20
gbps = 10
[host]
dispatch_us = 5
memory_gib = 1
"""


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    path = tmp_path / "machine.toml"
    path.write_text(TWO)
    return path


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Rates that are not measured but made up; what was asked for."""
    asked = []

    def measure(mesh: Any, dtype: str, tell: Any) -> dict[str, float]:
        asked.append(dtype)
        each = {f"{n} {i}": 10.0 for n in ("read_gbps", "tflops") for i in range(len(mesh))}
        return each | {"dispatch_us": 5.0, "latency_us": 100.0, "gbps": 5.0}

    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(calibration, "measure_rates", measure)
    monkeypatch.setattr(calibration, "host_free", lambda: 1 << 34)
    return asked


def test_a_fit_for_a_machine_that_is_not_here(cli: Cli, small: str, machine: Path):
    command = ("fit", small, "-c", "1024", "--devices-file", machine)
    code, out, _ = cli(*command, "--explain")
    assert code == 0
    assert "chosen" in out and "tensor over 3" in out and "limited by" in out
    types = ("-ctk", "f16,bf16", "-ctv", "f16", "-p", "900", "-n", "9")
    code, out, _ = cli(*command, *types, "--json")
    found = json.loads(out)
    assert found["workload"] == {"prompt": 900, "predict": 9}
    arguments = [c["arguments"] for c in found["considered"] if c["arguments"]]
    assert {a["cache_type_k"] for a in arguments} == {"f16", "bf16"}
    assert f"options: {found['options']}" in cli(*command, *types)[1]


@pytest.mark.parametrize("mode", ["none", "layer", "tensor"])
def test_the_last_line_has_all_that_makes_the_plan_again(
    cli: Cli, small: str, machine: Path, tmp_path: Path, mode: str
):
    path = tmp_path / "a model.gguf"
    path.symlink_to(small)
    sizes = "-c 1024 -np 2 -b 700 --page 64 --group-pages 4 --tail-pages 2"
    others = "--dtype bfloat16 --weights quantised --link-gbps 20,3.5,3.25 -ctk f16,q8_0"
    given = ("--devices-file", machine, "-sm", mode, *sizes.split(), *others.split())
    found = json.loads(cli("fit", path, *given, "--json")[1])
    options = shlex.split(found["options"])
    for command in ("generate", "bench"):
        assert make_parser().parse_args([command, *options]).model == str(path)
    code, out, _ = cli("plan", "--devices-file", machine, *options, "--json")
    assert code == 0 and json.loads(out) == found["plan"]
    kept = {"path": str(path), "parallel": 2, "batch": 700, "weights": "quantised"}
    assert found["arguments"].items() >= kept.items()


def test_a_fit_of_chunks_that_a_batch_has_room_for(
    cli: Cli, refused: Callable[..., str], small: str, machine: Path
):
    command = ("fit", small, "-c", "1024", "--devices-file", machine)
    for batch, chunks in (("300", {128, 256}), ("100", {64})):
        found = json.loads(cli(*command, "-b", batch, "--json")[1])
        assert {c["arguments"]["ubatch"] for c in found["considered"] if c["arguments"]} <= chunks
        assert f"-b {batch}" in found["options"]
    assert "--batch-size/-b is 40" in refused(*command, "-b", "40", "-ub", "64")


def test_a_fit_beyond_what_the_model_was_trained_for(cli: Cli, small: str, machine: Path):
    with pytest.warns(UserWarning, match="70000 positions is longer than the 65536"):
        assert cli("fit", small, "-c", "70000", "--devices-file", machine)[0] == 0


def test_a_fit_of_a_request_that_fills_the_context(cli: Cli, small: str, machine: Path):
    """Of less than a page, so that nothing can be streamed."""
    command = ("fit", small, "--devices-file", machine, "-ub", "2")
    assert cli(*command, "-c", "100", "-p", "50", "-n", "51")[0] == 0


def test_a_plan_for_a_machine_that_is_not_here(cli: Cli, small: str, machine: Path):
    code, out, _ = cli("plan", small, "--devices-file", machine, "-sm", "tensor", "--json")
    assert code == 0
    assert [d["kind"] for d in json.loads(out)["devices"]] == ["large", "small", "small"]


def test_what_is_refused(refused: Callable[..., str], small: str, machine: Path, tmp_path: Path):
    command = ("fit", small, "--devices-file", machine)
    assert "fits with any context" not in refused(*command, "-c", "0")
    assert "--devices does not go with --devices-file" in refused(*command, "--devices", "2")
    assert "q9" in refused(*command, "-ctk", "q9")
    assert "give both" in refused(*command, "-p", "10")
    message = refused(*command, "-c", "100", "-p", "50", "-n", "100")
    assert "50 prompt tokens and 100 generated ones takes 149 positions" in message
    assert "the largest that fits is" in refused(*command, "-c", "100000000")
    assert "cannot be read" in refused("fit", small, "--devices-file", tmp_path / "none.toml")


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "no devices"),
        ("[[device]]\nmemory = 3", r"\[\[device\]\] 0 has 'memory'"),
        ("[[device]]\nread_gbps = -1", "read_gbps -1; it must be a number above 0"),
        ("[[device]]\ntflops = true", "tflops True"),
        ("[[device]]\ncount = 0", "count 0; it must be from 1"),
        ("[[device]]\ncount = 'two'", "count 'two'; it must be from 1"),
        ("[[device]]\nname = 3", r"\[\[device\]\] 0 has name 3; it must be text"),
        ("[[device]]\nplatform = 'gpu'", "platform 'gpu'; it must be one of cuda, rocm, tpu, cpu"),
        ("[[device]]\nmemory_gib = 1\nfree_gib = 2", "free_gib 2.0 of memory_gib 1.0"),
        ("[[device]]\n[exchange]\nlatency = 1", r"\[exchange\] has 'latency'"),
        (
            "[[device]]\n[host]\ndispatch_us = 'x'",
            "dispatch_us 'x'; it must be a number of at least 0",
        ),
        ("[[device]]\nmemory_gib = 12884901888", "memory_gib 12884901888; it is in GiB, give less"),
        ("[[device]]\nread_gbps = 1e300", "read_gbps 1e.300; it is in 1e9 bytes a second"),
        (
            "[[device]]\n[exchange]\ndevices_per_host = 2.5",
            "devices_per_host 2.5; it must be from 1",
        ),
        ("device = 3", "no devices"),
        ("[[device]", "cannot be read"),
    ],
)
def test_machine_files_with_one_thing_wrong(text: str, message: str, tmp_path: Path):
    path = tmp_path / "machine.toml"
    path.write_text(text)
    with pytest.raises(PlanError, match=message):
        read_machine(path)


def test_a_model_is_loaded_as_a_fit_chooses(small: str, rates: list[str]):
    llm = LLM.from_gguf(small, devices=2, ctx=256, fit=True, cache_type_k="f32,f16")
    assert rates == ["float32"]
    assert llm.plan.options.ctx == 256 and llm.plan.used_devices == (0,)
    (done,) = llm.generate("ab", SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
    assert len(done.token_ids) == 3
    with pytest.raises(OptionError, match="tensor_split is what a fit chooses"):
        LLM.from_gguf(small, devices=2, fit=True, tensor_split="1,1")


def test_a_fit_chooses_chunks_that_a_batch_has_room_for(rates: list[str]):
    cfg = model_config([layer_config(8, 2, 16)])
    for given, chosen in ((dict(batch=200), {128}), (dict(batch=40), {32}), ({}, {128, 256})):
        llm = LLM.from_config(cfg, devices=1, ctx=256, fit=True, dtype="float32", **given)
        assert llm.plan.options.ubatch in chosen
    with pytest.raises(PlanError, match="--batch-size/-b is 40; .*-ub 64"):
        LLM.from_config(cfg, devices=1, ctx=256, fit=True, batch=40, ubatch=64)


def test_a_hybrid_is_loaded_as_a_fit_chooses(rates: list[str]):
    net = DeltaNet(groups=4, v_heads=1, dim=8, kernel=4, tiled=True, joined=False)
    layers = [layer_config(0, 1, 16, rope=None, recurrent=net), layer_config(4, 2, 16)]
    sizes = dict(ctx=128, page=16, ubatch=16, group_pages=4)
    cfg = model_config(layers)
    llm = LLM.from_config(cfg, devices=2, fit=True, split_mode="tensor", dtype="float32", **sizes)
    recurrent, attention = llm.plan.layers
    assert llm.plan.used_devices == (0, 1) and recurrent.state_devices == attention.attn_devices
    assert np.isfinite(llm.logits(random_ids(20))).all()


def test_rates_are_measured_once(rates: list[str]):
    first, again = (calibration.calibrated_mesh(open_mesh(2), "float32") for _ in range(2))
    assert rates == ["float32"] and first == again
    assert first.fabric.shared and first.fabric.latency_us == 100.0
    assert all(d.read_gbps == 10 and d.link_gbps and d.free for d in first.devices)
    calibration.calibrated_mesh(open_mesh(1), "float32")
    assert rates == ["float32", "float32"]


@pytest.mark.usefixtures("rates")
def test_virtual_devices_of_one_processor_have_the_same_rates(monkeypatch: pytest.MonkeyPatch):
    """A fit that cuts over some of them knows none that are faster: it is proved to be the best."""
    own = {f"{n} {i}": 10.0 + i * i for n in ("read_gbps", "tflops") for i in range(3)}
    own |= {"dispatch_us": 5.0, "latency_us": 100.0, "gbps": 5.0}
    monkeypatch.setattr(calibration, "measure_rates", lambda *_: own)
    mesh = calibration.calibrated_mesh(open_mesh(3), "float32")
    assert {(d.read_gbps, d.tflops) for d in mesh.devices} == {(11.0, 11.0)}
    cfg = model_config([layer_config(3, 2, 64)] * 2)
    sizes: dict[str, Any] = dict(ctx=256, page=16, ubatch=16, dtype="float32")
    found = fit_config(DecoderBlock, cfg, mesh, split_mode="tensor", **sizes)
    assert found.missed < 2e-3  # the least that is told, but for none


def test_rates_are_measured_again_where_asked(cli: Cli, small: str, rates: list[str]):
    command = ("fit", small, "--devices", "1", "-c", "256")
    for options, times in (((), 1), ((), 1), (("--again",), 2)):
        code, out, _ = cli(*command, *options)
        assert code == 0 and len(rates) == times
        assert f"options: -m {small} --devices 1 -sm none" in out


@pytest.mark.slow
def test_rates_of_this_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(calibration, "SIZE", {"cpu": (256, 512)})
    found = calibration.measure_rates(open_mesh(2), "float32")
    assert set(found) == set(calibration._names(2)) and min(found.values()) > 0


def test_perplexity_of_one_token_has_no_error(cli: Cli, small: str, tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text("some text")
    command = ("perplexity", "-m", small, "-f", text, "-c", "4", "--chunks", "1", "--devices", "1")
    found = json.loads(cli(*command, "--json")[1], parse_constant=pytest.fail)
    assert found["error"] is None and found["scored"] == 1
    out = cli(*command)[1]
    assert out == f"perplexity {found['value']:.4f} over 1 chunk of 4, 1 token scored\n"


def test_perplexity(cli: Cli, refused: Callable[..., str], small: str, tmp_path: Path):
    text, base = tmp_path / "text.txt", tmp_path / "base.kl"
    text.write_text("the theory of the thing, and then some. " * 4)
    command = ("perplexity", "-m", small, "-f", text, "-c", "64", "--chunks", "2", "--devices", "1")
    code, out, _ = cli(*command, "--kl-divergence-base", base)
    assert code == 0 and "over 2 chunks of 64, 62 tokens scored" in out
    code, out, _ = cli(*command, "--kl-divergence-base", base, "--kl-divergence", "--json")
    found = json.loads(out)
    assert found["scored"] == 62 and found["divergence"]["mean"] == 0
    assert "--kl-divergence needs" in refused(*command, "--kl-divergence")
    text.write_text("another text of as many bytes, or of a few more. " * 4)
    message = refused(*command, "--kl-divergence-base", base, "--kl-divergence")
    assert "is of another text than this run;" in message
    assert "is a folder" in refused(*command, "--kl-divergence-base", tmp_path)
    nowhere = tmp_path / "none" / "base.kl"
    message = refused(*command[:2], "none.gguf", *command[3:], "--kl-divergence-base", nowhere)
    assert message == f"cannot write the base run {str(nowhere)!r}: No such file or directory"
    assert "at least 1" in refused(*command[:-4], "--chunks", "0")
