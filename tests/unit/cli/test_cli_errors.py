"""Bad input of every kind: one sentence and exit code 2 from the command line, a typed exception
from Python. Each says which value is at fault."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest

from cli_models import MLP, Tensors, write_model
from jaxllm import (
    LLM,
    GGUFError,
    HubError,
    JaxllmError,
    ModelError,
    OptionError,
    PromptError,
    SamplingParams,
    hub,
)
from sharding import DeviceInfo, DoesNotFit, Mesh, PlanError, ShardingError, ShareError

Refused = Callable[..., str]
TINY = ("-c", "64", "--page", "16", "-ub", "16")


def both(refused: Refused, path: Path, kind: type[JaxllmError]) -> str:
    """The same sentence from `generate` and from Python, and from `plan`, which loads nothing."""
    message = refused("generate", "-m", path, "hello")
    with pytest.raises(kind) as found:
        LLM.from_gguf(path)
    assert str(found.value) == message
    assert refused("plan", path) == message
    return message


def test_a_file_that_is_not_there(refused: Refused, tmp_path: Path):
    path = tmp_path / "none.gguf"
    assert str(path) in both(refused, path, GGUFError)
    assert str(path) in refused("inspect", path)


@pytest.mark.parametrize("command", ["inspect", "plan", "fit"])
def test_one_model_is_named(refused: Refused, small: str, command: str):
    assert "no MODEL" in refused(command)
    assert f"two models, {small} and other.gguf" in refused(command, small, "-m", "other.gguf")


@pytest.mark.parametrize("data", [b"", b"GG", b"PK\x03\x04 a zip archive", b"# text\n"])
def test_a_file_that_is_no_gguf(refused: Refused, tmp_path: Path, data: bytes):
    path = tmp_path / "other.gguf"
    path.write_bytes(data)
    assert str(path) in both(refused, path, GGUFError)
    assert str(path) in refused("inspect", path)


def test_fetching_a_file_that_is_here(refused: Refused, small: str):
    assert f"{small!r} is a file, so there is nothing to fetch" in refused("fetch", small)


def test_a_folder_in_place_of_a_file(refused: Refused, tmp_path: Path):
    assert "directory" in both(refused, tmp_path, GGUFError)


@pytest.mark.parametrize("kept", [0.001, 0.01, 0.05, 0.5, 0.999])
def test_a_truncated_file(refused: Refused, small: str, tmp_path: Path, kept: float):
    whole = Path(small).read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[: int(len(whole) * kept)])
    message = both(refused, path, GGUFError)
    assert "truncated" in message or "ends" in message


def test_an_unknown_architecture_is_named(refused: Refused, tmp_path: Path):
    path = write_model(tmp_path / "m.gguf", architecture="llamba")
    message = both(refused, path, ModelError)
    assert "'llamba'" in message and "llama" in message


def test_an_unknown_tensor_type_is_named(refused: Refused, tmp_path: Path):
    path = write_model(tmp_path / "m.gguf")
    data = path.read_bytes()
    name = b"blk.1.ffn_up.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8
    path.write_bytes(data[:at] + (250).to_bytes(4, "little") + data[at + 4 :])
    message = both(refused, path, GGUFError)
    assert "250" in message and "blk.1.ffn_up.weight" in message


def test_a_tensor_type_that_cannot_be_read_is_named(refused: Refused, tmp_path: Path):
    kind = gguf.GGMLQuantizationType.Q8_1
    path = write_model(tmp_path / "m.gguf", raw={"blk.1.ffn_up.weight": kind})
    message = refused("generate", "-m", path, "hello", *TINY)
    assert "Q8_1" in message and "blk.1.ffn_up.weight" in message
    with pytest.raises(ModelError, match="Q8_1"):
        LLM.from_gguf(path, ctx=64)


def test_a_tensor_of_a_wrong_shape_is_named(refused: Refused, tmp_path: Path):
    def change(tensors: Tensors) -> None:
        tensors["blk.0.ffn_gate.weight"] = np.zeros((MLP, 32), np.float32)

    message = both(refused, write_model(tmp_path / "m.gguf", change=change), ModelError)
    assert "blk.0.ffn_gate.weight is [96, 32], expected [96, 64]" in message


def test_all_missing_tensors_are_counted(refused: Refused, tmp_path: Path):
    def change(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.startswith("blk.1.")]:
            del tensors[name]

    message = both(refused, write_model(tmp_path / "m.gguf", change=change), ModelError)
    assert "blk.1.attn_norm.weight is missing" in message and "5 more" in message


@pytest.mark.parametrize(
    "key", ["block_count", "embedding_length", "attention.head_count", "feed_forward_length"]
)
def test_missing_metadata_is_named(refused: Refused, tmp_path: Path, key: str):
    message = both(refused, write_model(tmp_path / "m.gguf", without=key), ModelError)
    assert f"'llama.{key}'" in message


def test_a_key_that_only_some_models_need_may_be_missing(cli: Callable, tmp_path: Path):
    path = write_model(tmp_path / "m.gguf", without="attention.head_count_kv", change=_wide)
    assert cli("plan", path, "--devices", "1").code == 0


def _wide(tensors: Tensors) -> None:
    for i in range(2):
        for name in ("k", "v"):
            tensors[f"blk.{i}.attn_{name}.weight"] = np.zeros((64, 64), np.float32)


@pytest.mark.parametrize("option", ["-ts", "-as"])
@pytest.mark.parametrize(
    "shares",
    ["1", "1,1,1", "١,1", "1,nan", "1,inf", "-1,2", "1x,1", "0,0", "", "1,,1", "1;1", "one,two"],
)
def test_wrong_shares_name_the_option(refused: Refused, small: str, option: str, shares: str):
    name, field = {
        "-ts": ("--tensor-split/-ts", "tensor_split"),
        "-as": ("--attn-split/-as", "attn_split"),
    }[option]
    for spelled in ((f"{option}={shares}",), (option, shares)):
        split = ("--devices", "2", "-sm", "tensor", *spelled)
        message = refused("generate", "-m", small, "hello", *split)
        assert message.startswith(name) and "one" in message
    with pytest.raises(ShareError, match=name):
        LLM.from_gguf(small, devices=2, split_mode="tensor", **{field: shares})


def test_too_many_devices(refused: Refused, small: str):
    there = len(jax.devices())
    for command in (("generate", "x", "-m", small), ("plan", small)):
        message = refused(*command, "--devices", str(there + 1))
        assert f"{there + 1} CPU devices" in message and f"with {there}" in message
    with pytest.raises(ShardingError):
        LLM.from_gguf(small, devices=there + 1)
    for count in ("0", "-1"):
        assert count in refused("plan", small, "--devices", count)


def test_a_plan_that_does_not_fit_is_shown_and_refused(
    cli: Callable, small: str, monkeypatch: pytest.MonkeyPatch
):
    full = Mesh((DeviceInfo("gpu:0", free=1000),))
    monkeypatch.setattr("jaxllm.llm.open_mesh", lambda devices: full)
    code, out, err = cli("plan", small)
    assert code == 2 and "gpu:0" in out
    assert "gpu:0" in err and "1000 free" in err
    assert issubclass(DoesNotFit, ShardingError)


def test_copies_that_memory_has_no_room_for(refused: Refused):
    message = refused("links", "--devices", "1", "--copy-mib", "1,99999999")
    assert "--copy-mib 99999999 needs" in message and "--prefetch" in message


def test_memory_that_runs_out_is_one_sentence(refused: Refused, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise MemoryError("Unable to allocate")

    monkeypatch.setattr("jaxllm.gguf.open_gguf", fail)
    assert "not enough memory" in refused("plan", "x.gguf")


def test_a_prompt_longer_than_the_context(refused: Refused, small: str):
    message = refused("generate", "-m", small, "x" * 65, "--devices", "1", *TINY)
    assert "65 tokens" in message and "64" in message and "-c" in message
    llm = LLM.from_gguf(small, devices=1, ctx=64, page=16, ubatch=16)
    with pytest.raises(PromptError, match="65 tokens"):
        llm.generate("x" * 65)
    with pytest.raises(PromptError, match="65 tokens"):
        llm.generate(["fits", "x" * 65])
    assert len(llm.generate("x" * 64, SamplingParams(max_tokens=4))[0].token_ids) == 1


def test_an_empty_prompt(
    refused: Refused, small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    empty = tmp_path / "empty.txt"
    empty.write_bytes(b"\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    for prompt in ("", "-"):
        assert "the prompt is empty" in refused("generate", "-m", small, prompt)
    assert "the prompt is empty" in refused("generate", "-m", small, "-f", empty)
    llm = LLM.from_gguf(small, devices=1, ctx=64, page=16, ubatch=16)
    for prompt in ("", [[]], ["fits", ""]):
        with pytest.raises(PromptError, match="the prompt is empty"):
            llm.generate(prompt)
    with pytest.raises(PromptError, match="the prompt is empty"):
        llm.stream("")


def test_prompts_that_cannot_be_read(refused: Refused, tmp_path: Path):
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "utf-8" in refused("generate", "-f", binary)
    assert str(tmp_path / "none") in refused("generate", "-f", tmp_path / "none")
    assert "no prompt" in refused("generate")
    assert "one of them" in refused("generate", "hello", "-f", binary)


def test_an_unwritable_cache_folder(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A file stands where the folder would be made: root may write to any folder."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path / "file" / "cache"))
    for argv in (("fetch", "smollm2-135m"), ("generate", "hello"), ("inspect", "smollm2-135m")):
        message = refused(*argv)
        assert "JAXLLM_CACHE" in message and str(tmp_path / "file") in message
    with pytest.raises(HubError, match="JAXLLM_CACHE"):
        LLM.from_gguf("smollm2-135m")


def test_a_local_model_needs_no_cache_folder(
    cli: Callable, small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").touch()
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path / "file" / "cache"))
    assert cli("generate", "-m", small, "hello", "-n", "1", "--devices", "1", *TINY).code == 0


def test_no_network(cli: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    code, out, err = cli("fetch", "smollm2-135m")
    assert (code, out) == (2, "")
    progress, message = err.splitlines()
    assert progress.startswith("fetching smollm2-135m")
    assert message.startswith("jaxllm: error: ")
    assert "check the network" in message and "-m path" in message
    with pytest.raises(HubError, match="network"):
        hub.fetch("smollm2-135m", progress=False)
    assert [each for each in tmp_path.rglob("*") if each.is_file()] == []


def test_an_unknown_name_lists_the_known(refused: Refused):
    for argv in (("fetch", "smollm3"), ("generate", "-m", "smollm3", "x"), ("plan", "smollm3")):
        message = refused(*argv)
        assert "'smollm3'" in message and "gemma3-270m" in message


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("-ub", "48"), "--ubatch-size/-ub is 48"),
        (("-b", "48", "-ub", "64"), "--batch-size/-b is 48"),
        (("-b", "0"), "--batch-size/-b is 0"),
        (("--page", "7"), "--page is 7"),
        (("-np", "0"), "--parallel/-np is 0"),
        (("-c", "0"), "(-c)"),
        (("--prefetch", "-1"), "--prefetch is -1"),
        (("--group-pages", "3"), "--group-pages is 3"),
        (("--engine", "fused", "-nkvo"), "--no-kv-offload/-nkvo"),
        (("--dither", "--rounding", "llama.cpp"), "--rounding llama.cpp"),
        (("-sm", "none", "-as", "1"), "--attn-split/-as"),
        (("-ub", "1073741824"), "bytes of host memory"),
    ],
)
def test_options_that_cannot_be(refused: Refused, small: str, options: tuple[str, ...], said: str):
    assert said in refused("generate", "-m", small, "x", "--devices", "1", *options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("-n", "0"), "--n-predict/-n must be"),
        (("--temp", "-1"), "--temp must be"),
        (("--temp", "nan"), "--temp must be"),
        (("--top-p", "2"), "--top-p must be"),
        (("--repeat-penalty", "0"), "--repeat-penalty must be"),
        (("--logprobs", "2"), "--json"),
        (("-m", ""), "name is empty"),
        (("--stop", ""), "stop"),
        (("-s", "-2"), "--seed"),
        (("-n", "many"), "--n-predict"),
        (("-sm", "row"), "--split-mode"),
        (("--unknown",), "jaxllm generate --help"),
    ],
)
def test_sampling_is_checked_before_anything_is_loaded(
    refused: Refused, options: tuple[str, ...], said: str
):
    assert said in refused("generate", "-m", "/nonexistent.gguf", "x", *options)


def test_chat_without_a_template(refused: Refused, tmp_path: Path):
    path = write_model(tmp_path / "m.gguf", template=None)
    message = refused("generate", "-m", path, "x", "--chat", "--devices", "1", *TINY)
    assert "chat template" in message


def test_exceptions_have_a_base():
    for kind in (GGUFError, HubError, ModelError, OptionError, PromptError):
        assert issubclass(kind, JaxllmError)
    for kind in (ShareError, PlanError, DoesNotFit):
        assert issubclass(kind, ShardingError)


def test_sessions_that_do_not_go(refused: Refused, small: str, tmp_path: Path):
    file = tmp_path / "a.session"
    both = ("--session", str(file), "--no-prefix-cache")
    assert "drop one" in refused("generate", "-m", small, "hello", *both, *TINY)
    nowhere = ("-m", "/nonexistent.gguf", "--session", tmp_path / "none" / "a.session")
    message = refused("generate", "hello", *nowhere)
    assert message == f"cannot write the session {str(nowhere[-1])!r}: No such file or directory"
    for folder in (tmp_path, "."):
        message = refused("generate", "hello", *nowhere[:-1], folder)
        assert message.startswith(f"the session {str(folder)!r} is a folder")
    file.write_bytes(b"something else")
    message = refused("generate", "-m", small, "hello", "--session", str(file), *TINY)
    assert str(file) in message and "no session" in message
    assert file.read_bytes() == b"something else"
