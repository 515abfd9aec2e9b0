"""`jaxllm bench`: prompt and decode rates, beside what the machine allows and a peer.

Tests as llama-bench has them: a prompt of P tokens up to its first token, and N greedy tokens
after a prompt of one token or as many as `--n-depth` says. Each side runs all once unmeasured, then
the sides take turns, so that a machine that slows down slows both. Weights, prompt and thread
count are the same on both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from jaxllm.cli import bench_peer
from jaxllm.cli.bench_machine import Machine, decode_limit, measure_machine, prompt_limit
from jaxllm.cli.bench_shapes import SHAPES, model_config
from jaxllm.cli.options import add_command, add_model, add_split, split_arguments
from jaxllm.errors import OptionError

if TYPE_CHECKING:
    from jaxllm.llm import LLM

_EXAMPLES = """\
  jaxllm bench -m smollm2-135m -p 512 -n 64
  jaxllm bench --random-shape small --devices 3 -sm tensor -as 2,1,0 -nkvo
  jaxllm bench --random-shape llama-8b -p 4096 -d 512,16384 -nkvo
  jaxllm bench --peer transformers --peer-python other-env/bin/python --json
"""
Rates = dict[str, float]  # tokens a second of one repetition, by test
Side = Callable[[], Rates]  # runs one repetition


def add(subparsers: Any) -> None:
    """Declare the subcommand."""
    summary = "Measure prompt and decode rates"
    parser = add_command(subparsers, "bench", run, summary, _EXAMPLES)
    add_model(parser)
    parser.add_argument("--random-shape", choices=tuple(SHAPES), help="random weights, not a model")
    parser.add_argument("-p", "--n-prompt", type=int, default=512, metavar="N", help="default 512")
    parser.add_argument("-n", "--n-predict", type=int, default=64, metavar="N", help="default 64")
    deep = "decode after prompts of so many tokens, comma-separated; default 0"
    parser.add_argument("-d", "--n-depth", default="0", metavar="N,...", help=deep)
    parser.add_argument("-r", "--repetitions", type=int, default=5, metavar="N", help="default 5")
    parser.add_argument("--peer", choices=("transformers",), help="measure it too, in float32")
    with_torch = "a Python whose environment has torch, transformers and gguf, for --peer"
    parser.add_argument("--peer-python", metavar="PATH", help=with_torch)
    add_split(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, and print a table or JSON."""
    for name in ("n_prompt", "n_predict", "repetitions"):
        if getattr(args, name) < 1:
            option = f"--{name.replace('_', '-')}"
            raise OptionError(f"{option} is {getattr(args, name)}; it must be at least 1")
    if bool(args.peer) != bool(args.peer_python):
        raise OptionError("--peer and --peer-python go together; give both")
    depths = _depths(args.n_depth)
    if args.peer and depths != [0]:
        raise OptionError(f"--n-depth is {args.n_depth}; a peer is measured at 0 only")
    if args.peer and args.random_shape:
        raise OptionError("--peer needs a model that both can load; drop --random-shape")
    import numpy as np

    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    llm = _load(args, depths)
    if args.peer and any(d.platform != "cpu" for d in llm.plan.mesh.devices):
        raise OptionError("--peer is measured on the CPU; set JAX_PLATFORMS=cpu")
    longest = max(args.n_prompt, *depths)
    ids = np.random.default_rng(0).integers(0, llm.config.vocab, longest).tolist()
    prompt = ids[: args.n_prompt]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with _peer(args, prompt, cores or 1) as (versions, peer):
        sides: dict[str, Side] = {"jaxllm": lambda: _measure(llm, ids, args, depths)}
        if peer is not None:
            sides[args.peer] = peer
        samples: dict[str, list[Rates]] = {name: [] for name in sides}
        for turn in range(args.repetitions + 1):
            for name, side in sides.items():
                rates = side()
                if turn:
                    samples[name].append(rates)
    found: dict[str, Any] = {
        "model": llm.plan.model.name,
        "dtype": llm.model.dtype,
        "engine": llm.plan.engine,
        "devices": [d.label for d in llm.plan.mesh.devices],
        "cores": cores,
        "load_before": load,
        "n_prompt": args.n_prompt,
        "n_predict": args.n_predict,
        "peer": versions,
        "rates": {name: _summary(each) for name, each in samples.items()},
    }
    machine = measure_machine(llm)
    found["machine"] = asdict(machine)
    found["limits"] = _limits(llm, machine, args.n_predict, depths, found["rates"]["jaxllm"])
    if args.peer:
        own, other = found["rates"]["jaxllm"], found["rates"][args.peer]
        found["ratio"] = {test: own[test]["median"] / other[test]["median"] for test in own}
    print(json.dumps(found) if args.json else to_text(found))
    return 0


def _depths(text: str) -> list[int]:
    try:
        depths = [int(part) for part in text.split(",")]
    except ValueError:
        depths = [-1]
    if min(depths) < 0:
        raise OptionError(f"--n-depth is {text!r}; give numbers of tokens, say 0,4096")
    return list(dict.fromkeys(depths))


def _load(args: argparse.Namespace, depths: list[int]) -> LLM:
    from jaxllm import LLM

    # A deep prompt is computed once and kept; other prompts are not to be found again.
    arguments: dict[str, Any] = split_arguments(args) | {"prefix_cache": depths != [0]}
    arguments.setdefault("ctx", max(2048, args.n_prompt, max(depths) + args.n_predict + 1))
    if not args.random_shape:
        return LLM.from_gguf(args.model, devices=args.devices, **arguments)
    return LLM.from_config(model_config(args.random_shape), devices=args.devices, **arguments)


def decode_name(depth: int) -> str:
    """The name of a decode test."""
    return f"decode @ d{depth}" if depth else "decode"


def _measure(llm: LLM, ids: list[int], args: argparse.Namespace, depths: list[int]) -> Rates:
    from jaxllm import SamplingParams

    predict = args.n_predict
    one = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    greedy = SamplingParams(max_tokens=predict + 1, temperature=0, ignore_eos=True)
    rates = {}
    for depth in depths:
        (done,) = llm.generate([ids[: max(depth, 1)]], greedy)
        if len(done.token_ids) <= predict:
            raise OptionError(f"the context (-c) ends before {predict} tokens; raise it")
        rates[decode_name(depth)] = done.generation_rate
    # Begun with another token, so that nothing of it is kept from the prompts above.
    prompt = [(ids[0] + 1) % llm.config.vocab, *ids[1 : args.n_prompt]]
    start = time.perf_counter()
    llm.generate([prompt], one)
    return {"prompt": len(prompt) / (time.perf_counter() - start)} | rates


@contextmanager
def _peer(
    args: argparse.Namespace, prompt: list[int], threads: int
) -> Iterator[tuple[str | None, Side | None]]:
    """What the peer says of itself, and its side; None and None where none was asked for."""
    if not args.peer:
        yield None, None
        return
    from jaxllm import hub

    asked = {"model": str(hub.resolve(args.model)), "threads": threads}
    asked |= {"prompt": prompt, "predict": args.n_predict}
    # The source is passed as text: run as a file, its folder would come first on the path.
    source = Path(bench_peer.__file__).read_text("utf-8")
    command = [args.peer_python, "-c", source, json.dumps(asked)]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:

        def answer() -> dict[str, Any]:
            assert process.stdout is not None
            line = process.stdout.readline()
            if line:
                return json.loads(line)
            log.seek(0)
            last = ([each.strip() for each in log if each.strip()] or ["it said nothing"])[-1]
            raise OptionError(f"--peer-python {args.peer_python!r} failed: {last}")

        def measure() -> Rates:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # answer() tells why it ended
                process.stdin.write("go\n")
                process.stdin.flush()
            return answer()

        pipe = subprocess.PIPE
        try:
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True)
        except OSError as error:
            reason = error.strerror or error
            raise OptionError(f"--peer-python {args.peer_python!r} cannot run: {reason}") from error
        try:
            yield answer()["versions"], measure
        finally:
            process.kill()
            process.communicate()


def _limits(
    llm: LLM, machine: Machine, predict: int, depths: list[int], rates: dict[str, Any]
) -> dict[str, dict[str, float]]:
    """What the machine allows, by test, and which share of it was reached."""
    limits = {"prompt": {"tokens_per_second": prompt_limit(llm.plan, machine)}}
    for depth in depths:
        found = decode_limit(llm.plan, machine, depth + predict // 2)
        if found is not None:
            limits[decode_name(depth)] = found
    return {
        test: limit | {"share": rates[test]["median"] / limit["tokens_per_second"]}
        for test, limit in limits.items()
    }


def _summary(samples: list[Rates]) -> dict[str, Any]:
    columns = {test: [each[test] for each in samples] for test in samples[0]}
    return {
        test: {"median": median(each), "min": min(each), "max": max(each), "samples": each}
        for test, each in columns.items()
    }


def to_text(found: dict[str, Any]) -> str:
    """The measurement for a person."""
    where = f"{found['engine']} on {', '.join(found['devices'])}, {found['cores']} cores"
    lines = [f"{found['model']}, {found['dtype']}, {where}"]
    if found["peer"]:
        lines.append(f"peer: {found['peer']}, float32")
    lines.append(f"{'tokens/s':<28}{'median':>10}{'min':>10}{'max':>10}{'limit':>10}{'share':>8}")
    sizes = {"prompt": found["n_prompt"]}
    for side, tests in found["rates"].items():
        for test, row in tests.items():
            name, _, depth = test.partition(" ")
            label = f"{side} {name} {sizes.get(name, found['n_predict'])} {depth}"
            figures = "".join(f"{row[column]:>10.1f}" for column in ("median", "min", "max"))
            limit = found["limits"].get(test)
            if side == "jaxllm" and limit is not None:
                figures += f"{limit['tokens_per_second']:>10.1f}{limit['share']:>8.0%}"
            lines.append(f"{label:<28}{figures}")
    for test, ratio in found.get("ratio", {}).items():
        lines.append(f"{'ratio ' + test:<28}{ratio:>10.2f}")
    if found["load_before"] > found["cores"] / 4:
        lines.append(f"the machine was not idle: load {found['load_before']:.1f} before")
    machine = found["machine"]
    rates = f"memory read {machine['read_gb_s']:.1f} GB/s"
    rates += f", {found['dtype']} matmul {machine['matmul_gflop_s']:.0f} GFLOP/s"
    if machine["link_gb_s"] is not None:
        rates += f", host link {machine['link_gb_s']:.1f} GB/s"
    lines.append(rates)
    deepest = [limit for limit in found["limits"].values() if "weight_bytes" in limit][-1:]
    for limit in deepest:
        lines.append(
            f"a token reads {limit['weight_bytes'] / 1e9:.3f} GB of weights and"
            f" {limit['cache_bytes'] / 1e9:.3f} GB of cache, {limit['link_bytes'] / 1e9:.3f} GB of"
            " it over the link"
        )
    return "\n".join(lines)
