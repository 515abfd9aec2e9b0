"""What the commands print, for a person and for a machine, and how they start and end."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxllm import LLM, SamplingParams, hub
from jaxllm.cli.main import make_parser
from jaxllm.cli.options import SAMPLING, sampling_params
from jaxllm.cli.split import split_arguments
from sharding import PlanOptions

Cli = Callable[..., tuple[int, str, str]]
COMMANDS = (
    "generate",
    "plan",
    "fit",
    "inspect",
    "fetch",
    "models",
    "links",
    "bench",
    "perplexity",
    "completion",
)
TINY = ("-c", "64", "--page", "16", "-ub", "16", "--devices", "1")
GREEDY = ("--temp", "0", "-n", "12", "--ignore-eos")
pytestmark = pytest.mark.smoke


def test_alone_it_prints_help(cli: Cli):
    code, out, _ = cli()
    assert code == 0
    for command in COMMANDS:
        assert command in out


def test_help_says_what_an_option_needs(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        make_parser().parse_args(["plan", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    shares = out[out.index("--attn-split SHARES") :]
    assert "needs -sm tensor" in shares[: shares.index("--no-kv-offload")]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples(command: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        make_parser().parse_args([command, "--help"])
    out = capsys.readouterr().out
    assert stop.value.code == 0
    assert f"jaxllm {command}" in out.split("examples:")[1]
    assert "--json" in out


def test_a_shell_completes_commands_options_and_choices(cli: Cli, tmp_path: Path):
    pytest.importorskip("argcomplete")
    for shell in ("bash", "zsh", "fish"):
        assert "_ARGCOMPLETE" in cli("completion", shell)[1]
        assert json.loads(cli("completion", shell, "--json")[1])["shell"] == shell

    def answer(line: str) -> list[str]:
        asked = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": " ", "COMP_LINE": line}
        asked |= {"COMP_POINT": str(len(line)), "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "a")}
        command = [sys.executable, "-m", "jaxllm"]
        subprocess.run(command, env=os.environ | asked, check=True, capture_output=True)
        return (tmp_path / "a").read_text().split()

    assert answer("jaxllm pe") == ["perplexity"]
    assert {"--tensor-split", "--rounding"} <= set(answer("jaxllm plan --"))
    assert answer("jaxllm plan --rounding ne") == ["nearest"]


def test_help_and_models_start_without_jax():
    code = (
        "import sys; from jaxllm.cli.main import main\n"
        "main(['models']); main([])\n"
        "try: main(['plan', '--help'])\n"
        "except SystemExit: pass\n"
        "print('jax' in sys.modules, 'flax' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr == "False False\n"


def test_inspect_starts_without_jax(small: str):
    code = (
        "import sys; from jaxllm.cli.main import main\n"
        "main(['inspect', sys.argv[1]]); print('jax' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, small], capture_output=True, text=True)
    assert done.stderr == "False\n"
    assert "architecture    llama" in done.stdout


def test_generate_streams_what_python_generates(cli: Cli, small: str):
    llm = LLM.from_gguf(small, devices=1, ctx=64, page=16, ubatch=16)
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    (expected,) = llm.generate("hello", params)
    code, out, err = cli("generate", "-m", small, "hello", *GREEDY, *TINY)
    assert code == 0
    assert out == expected.text + "\n"
    assert "prompt 5 tokens" in err and "generated 12 tokens" in err and "ended by length" in err
    code, out, err = cli("generate", "-m", small, "hello", "--json", *GREEDY, *TINY)
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["text"] == expected.text
    assert tuple(found["token_ids"]) == expected.token_ids
    assert found["finish_reason"] == "length"
    assert found["generation_rate"] > 0 and found["prompt_rate"] > 0


def test_a_session_is_loaded_and_saved(cli: Cli, small: str, tmp_path: Path):
    """Under another plan the second time; the prompt is given whole."""
    file = tmp_path / "a.session"
    common = ("-m", small, "--session", str(file), *GREEDY, *TINY)
    prompt = "a prompt of more than thirty-two bytes"
    code, out, err = cli("generate", prompt, *common)
    assert code == 0 and file.exists() and "kept" not in err
    code, again, err = cli("generate", prompt, "-nkvo", *common)
    assert (code, again) == (0, out)
    assert "prompt 36 tokens (32 of them kept from before)" in err
    found = json.loads(cli("generate", prompt + "!", "--json", *common)[1])
    assert found["cached_tokens"] == 32
    assert list(tmp_path.iterdir()) == [file]


def test_the_prompt_comes_from_a_file_stdin_or_the_line(
    cli: Cli, small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "prompt.txt"
    file.write_bytes("één\n".encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("één\n".encode())))
    common = ("-m", small, "--json", *GREEDY, *TINY)
    texts = [
        json.loads(cli("generate", *prompt, *common)[1])["token_ids"]
        for prompt in (("één",), ("-",), ("-f", str(file)))
    ]
    assert texts[0] == texts[1] == texts[2]


def test_chat_applies_the_template(cli: Cli, small: str):
    common = ("-m", small, "--json", *GREEDY, *TINY)
    chat = json.loads(cli("generate", "hello", "--chat", *common)[1])
    plain = json.loads(cli("generate", "[hello]", *common)[1])
    assert chat["token_ids"] == plain["token_ids"]
    assert chat["prompt_tokens"] == len("[hello]")


def test_a_seed_repeats_and_stop_texts_end(cli: Cli, small: str):
    common = ("generate", "hello", "-m", small, "--json", "--ignore-eos", "-n", "12", *TINY)
    first, again, other = (
        json.loads(cli(*common, "--temp", "3", "--top-k", "0", "-s", seed)[1])["text"]
        for seed in ("1", "1", "2")
    )
    assert first == again != other
    whole = json.loads(cli(*common, "--temp", "0")[1])["text"]
    stop = whole[3:5]
    cut = json.loads(cli(*common, "--temp", "0", "--stop", "\0", "--stop", stop)[1])
    assert cut["text"] == whole[: whole.index(stop)]
    assert cut["finish_reason"] == "stop"
    streamed = cli(*[a for a in common if a != "--json"], "--temp", "0", "--stop", stop)[1]
    assert streamed == cut["text"] + "\n"


def test_a_host_cache_over_three_devices(cli: Cli, small: str):
    split = ("--devices", "3", "-sm", "tensor", "-ts", "1,1,1", "-as", "2,1,0", "-nkvo")
    common = ("generate", "a" * 40, "-m", small, *GREEDY)
    one = json.loads(cli(*common, "--json", *TINY)[1])
    tiny = TINY[: TINY.index("--devices")]
    three = json.loads(cli(*common, "--json", *tiny, *split)[1])
    assert three["engine"] == "staged" and one["engine"] == "fused"
    assert three["token_ids"] == one["token_ids"]
    sent = list(three["link_bytes"].values())
    assert sent[0] > 0 and sent[1] > 0 and sent[2] == 0
    assert "sent from host: " in cli(*common, *tiny, *split)[2]
    assert "sent from host" not in cli(*common, *tiny, *split[:-1])[2]


def test_a_chunk_shorter_than_a_draft_that_nobody_asked_for(cli: Cli, small: str):
    assert cli("plan", small, "-ub", "2", "--devices", "1")[0] == 0


def test_plan_loads_no_weights(cli: Cli, small: str, monkeypatch: pytest.MonkeyPatch):
    def never(*_: object) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr("jaxllm.gguf.reader.read_rows", never)
    monkeypatch.setattr("jaxllm.gguf.dequant.read_rows", never)
    split = ("--devices", "3", "-sm", "tensor", "-as", "1,1,0", "-nkvo", "-ctk", "f16")
    code, out, _ = cli("plan", small, *split)
    assert code == 0
    assert "cpu:2" in out and "engine: staged" in out
    found = json.loads(cli("plan", small, "--json", *split)[1])
    assert found["options"]["cache_type_k"] == "f16"
    assert [layer["groups"] for layer in found["layers"]] == [[[0, 1], [1, 2], [0, 0]]] * 2
    assert len(found["devices"]) == 3


def test_a_context_beyond_the_trained_one_is_warned_of_once(cli: Cli, small: str):
    with pytest.warns(UserWarning) as said:
        assert cli("plan", small, "--devices", "1", "-c", "65537")[0] == 0
    (warning,) = said
    assert "65537 positions is longer than the 65536" in str(warning.message)
    assert cli("plan", small, "--devices", "1", "-c", "65536")[0] == 0


def test_measuring_links_is_said(
    cli: Cli, small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path))
    monkeypatch.setattr("jaxllm.progress.measure_link", lambda device, how: 5.0)
    plan = ("plan", small, "--devices", "2", "-nkvo", "-kvgl", "1")
    assert cli(*plan, "--link-gbps", "5,5")[2] == ""
    first, second = cli(*plan)[2].splitlines()
    assert first.startswith("measuring the link of cpu:0 by copies of ") and "cpu:1" in second
    assert "--link-gbps" in first
    assert cli(*plan)[2] == ""


@pytest.mark.parametrize("command", ["links", "fit"])
def test_measuring_is_shown_to_who_looks(
    command: str, cli: Cli, small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """On a terminal alone, once, and never where the answer goes."""
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path))
    monkeypatch.setattr("jaxllm.progress.measure_link", lambda device, how: 5.0)
    monkeypatch.setattr("jaxllm.calibration._products", lambda device, dtype: (5.0, 5.0))
    asked = ("fit", small, "-c", "256") if command == "fit" else ("links", "--copy-mib", "1")
    asked = (*asked, "--devices", "1", "--json")
    _, expected, silent = cli(*asked)
    for file in tmp_path.glob("*.json"):
        file.unlink()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    _, out, shown = cli(*asked)
    assert "measuring the link of cpu:0, " in shown and silent == ""
    assert ("searching: " in shown) is (command == "fit")
    assert "measuring" not in cli(*asked)[2]
    assert json.loads(out).keys() == json.loads(expected).keys()


def test_inspect_tells_everything(cli: Cli, small: str):
    found = json.loads(cli("inspect", small, "--json")[1])
    assert found["architecture"] == "llama" and found["name"] == "small"
    assert found["bytes"] == Path(small).stat().st_size
    sizes = found["sizes"]
    assert (sizes["layers"], sizes["query_heads"], sizes["kv_heads"]) == (2, 4, 2)
    assert (sizes["key_dim"], sizes["width"], sizes["mlp_columns"]) == (16, 64, 96)
    assert found["tokenizer"]["kind"] == "gpt2" and found["tokenizer"]["tokens"] == 258
    assert found["tokenizer"]["chat_template"] is True
    assert found["tensor_types"] == {
        "F32": {
            "tensors": 20,
            "elements": found["parameters"],
            "bytes": 4 * found["parameters"],
        }
    }
    text = cli("inspect", small)[1]
    for word in ("llama", "gpt2", "258 tokens", "with a chat template", "F32", "kv heads"):
        assert word in text


def test_models_and_fetch(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path))
    found = json.loads(cli("models", "--json")[1])
    assert [row["name"] for row in found["models"]] == list(hub.MODELS)
    assert [row["name"] for row in found["models"] if row["default"]] == ["smollm2-135m"]
    assert not any(row["fetched"] for row in found["models"])
    asked = []

    def fetch(name: str, verify: bool = False, progress: bool = True) -> Path:
        asked.append((name, verify))
        path = hub.cache_folder() / f"{name}.gguf"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"12345")
        return path

    monkeypatch.setattr(hub, "fetch", fetch)
    code, out, _ = cli("fetch", "gemma3-270m", "--verify")
    assert (code, out) == (0, f"{tmp_path}/models/gemma3-270m.gguf\n")
    assert json.loads(cli("fetch", "gemma3-270m", "--json")[1])["bytes"] == 5
    assert asked == [("gemma3-270m", True), ("gemma3-270m", False)]
    lines = cli("models")[1].splitlines()
    assert "[default]" in lines[0] and "[fetched]" in lines[1]


def test_options_reach_the_plan_under_their_names():
    line = (
        "generate x -sm tensor -ts 3,1 -as 2,1 -nkvo -ctk q8_0 -ctv bf16 --no-kv-rotate -c 99"
        " -np 3 -b 256 -ub 64 --dtype float16 --engine staged --rounding llama.cpp --dither"
        " --kv-replicate --page 32 --group-pages 5 --tail-pages 7 --prefetch 6 --devices 2 -kvgl 4"
        " --kv-device-bytes 1.5G"
        " --link-gbps 24.2,3.3 --no-kv-pinned -kvgld 1 --spec-type draft-mtp --spec-draft-n-max 2"
        " --recurrent-state host"
    )
    args = make_parser().parse_args(line.split())
    assert args.devices == 2
    assert split_arguments(args) == {
        "split_mode": "tensor",
        "tensor_split": "3,1",
        "attn_split": "2,1",
        "kv": "host",
        "cache_type_k": "q8_0",
        "cache_type_v": "bf16",
        "kv_gpu_layers": 4,
        "kv_gpu_layers_draft": 1,
        "kv_device_bytes": "1.5G",
        "kv_pinned": False,
        "recurrent_state": "host",
        "link_gbps": "24.2,3.3",
        "kv_rotate": False,
        "ctx": 99,
        "parallel": 3,
        "batch": 256,
        "ubatch": 64,
        "dtype": "float16",
        "engine": "staged",
        "rounding": "llama.cpp",
        "dither": True,
        "kv_replicate": True,
        "page": 32,
        "group_pages": 5,
        "tail_pages": 7,
        "prefetch": 6,
        "spec_type": "draft-mtp",
        "spec_draft_n_max": 2,
    }
    renamed = {"parallel": "slots", "dtype": "itemsize"}
    others = {"link_gbps", "spec_type"}
    fields = {renamed.get(name, name) for name in split_arguments(args)} - others
    assert fields == {field.name for field in dataclasses.fields(PlanOptions)}
    assert split_arguments(make_parser().parse_args(["generate", "x"])) == {}


def test_options_reach_sampling_with_its_defaults():
    fields = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    for option in SAMPLING:
        assert fields[option.field] == option.default, option
    assert {o.field for o in SAMPLING} | {"stop", "ignore_eos"} == set(fields)
    line = (
        "generate x --json -n 5 -s 7 --temp 0.5 --top-k 3 --top-p 0.4 --min-p 0.1 "
        "--repeat-penalty 1.1 --repeat-last-n -1 --presence-penalty 0.2 --frequency-penalty 0.3 "
        "--logprobs 2 --stop a --stop b --ignore-eos"
    )
    assert sampling_params(make_parser().parse_args(line.split())) == SamplingParams(
        5, 0.5, 3, 0.4, 0.1, 1.1, -1, 0.2, 0.3, 7, ("a", "b"), True, 2
    )
    assert (
        sampling_params(make_parser().parse_args(["generate", "x", "-s", "-1"])) == SamplingParams()
    )
