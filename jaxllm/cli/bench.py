"""`jaxllm bench`: prompt and decode rates, beside what the machine's memory allows and a peer.

Two tests, as llama-bench has them: a prompt of P tokens up to its first token, and N greedy tokens
after a one-token prompt. Each side runs both once unmeasured, then the sides take turns, so that a
machine that slows down slows both. Weights, prompt and thread count are the same on both sides.
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
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxllm.cli import bench_peer
from jaxllm.cli.bench_machine import machine_rates
from jaxllm.cli.options import add_command, add_model, add_split, split_arguments
from jaxllm.errors import OptionError

if TYPE_CHECKING:
    from jaxllm.llm import LLM

_EXAMPLES = """\
  jaxllm bench -m smollm2-135m -p 512 -n 64
  jaxllm bench --random-shape small --devices 3 -sm tensor -as 2,1,0 -nkvo
  jaxllm bench --peer transformers --peer-python other-env/bin/python --json
"""
# name: layers, width, query heads, KV heads, head dim, MLP columns, vocabulary
SHAPES = {"small": (8, 512, 8, 4, 64, 1536, 8192)}


class Rates(NamedTuple):
    """Tokens a second of one repetition."""

    prompt: float
    decode: float


Side = Callable[[], Rates]  # runs one repetition


def add(subparsers: Any) -> None:
    """Declare the subcommand."""
    summary = "Measure prompt and decode rates"
    parser = add_command(subparsers, "bench", run, summary, _EXAMPLES)
    add_model(parser)
    parser.add_argument("--random-shape", choices=tuple(SHAPES), help="random weights, not a model")
    parser.add_argument("-p", "--n-prompt", type=int, default=512, metavar="N", help="default 512")
    parser.add_argument("-n", "--n-predict", type=int, default=64, metavar="N", help="default 64")
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
    if args.peer and args.random_shape:
        raise OptionError("--peer needs a model that both can load; drop --random-shape")
    import numpy as np

    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    llm = _load(args)
    if args.peer and any(d.platform != "cpu" for d in llm.plan.mesh.devices):
        raise OptionError("--peer is measured on the CPU; set JAX_PLATFORMS=cpu")
    prompt = np.random.default_rng(0).integers(0, llm.config.vocab, args.n_prompt).tolist()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with _peer(args, prompt, cores or 1) as (versions, peer):
        sides: dict[str, Side] = {"jaxllm": lambda: _measure(llm, prompt, args.n_predict)}
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
        "machine": machine_rates(),
    }
    found["decode_limit"] = _decode_limit(llm, found)
    if args.peer:
        own, other = found["rates"]["jaxllm"], found["rates"][args.peer]
        found["ratio"] = {test: own[test]["median"] / other[test]["median"] for test in own}
    print(json.dumps(found) if args.json else to_text(found))
    return 0


def _load(args: argparse.Namespace) -> LLM:
    from jaxllm import LLM, LayerConfig, ModelConfig, Rope

    arguments: dict[str, Any] = split_arguments(args) | {"prefix_cache": False}
    arguments.setdefault("ctx", max(2048, args.n_prompt, args.n_predict + 1))
    if not args.random_shape:
        return LLM.from_gguf(args.model, devices=args.devices, **arguments)
    count, embed, heads, kv_heads, dim, mlp, vocab = SHAPES[args.random_shape]
    layer = LayerConfig(
        kv_heads=kv_heads,
        q_per_kv=heads // kv_heads,
        k_dim=dim,
        v_dim=dim,
        mlp=mlp,
        rope=Rope(theta=10000.0, dim=dim, pairs="halves"),
        scale=dim**-0.5,
        eps=1e-5,
    )
    cfg = ModelConfig(
        architecture="random",
        embed=embed,
        vocab=vocab,
        layers=(layer,) * count,
        eps=1e-5,
        tied=True,
        ctx_train=0,
        name=f"random {args.random_shape}",
    )
    return LLM.from_config(cfg, devices=args.devices, **arguments)


def _measure(llm: LLM, prompt: list[int], predict: int) -> Rates:
    from jaxllm import SamplingParams

    start = time.perf_counter()
    llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
    seconds = time.perf_counter() - start
    greedy = SamplingParams(max_tokens=predict + 1, temperature=0, ignore_eos=True)
    (done,) = llm.generate([prompt[:1]], greedy)
    if len(done.token_ids) <= predict:
        raise OptionError(f"the context (-c) ends before {predict} tokens; raise it")
    return Rates(len(prompt) / seconds, done.generation_rate)


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
            return Rates(**answer())

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


def _decode_limit(llm: LLM, found: dict[str, Any]) -> dict[str, float] | None:
    """Decode against reading every weight once a token; None for several real devices, whose
    memories are read side by side."""
    plan = llm.plan
    if len(plan.mesh) > 1 and any(d.platform != "cpu" for d in plan.mesh.devices):
        return None
    size = sum(plan.weight_bytes(i) for i in range(len(plan.mesh)))
    if not llm.config.tied:  # of the input table only one row is read
        size -= llm.config.vocab * llm.config.embed * plan.options.itemsize
    limit = found["machine"]["read_gb_s"] * 1e9 / size
    share = found["rates"]["jaxllm"]["decode"]["median"] / limit
    return {"weight_bytes": size, "tokens_per_second": limit, "share": share}


def _summary(samples: list[Rates]) -> dict[str, Any]:
    return {
        test: {"median": median(each), "min": min(each), "max": max(each), "samples": each}
        for test, each in zip(Rates._fields, map(list, zip(*samples, strict=True)), strict=True)
    }


def to_text(found: dict[str, Any]) -> str:
    """The measurement for a person."""
    where = f"{found['engine']} on {', '.join(found['devices'])}, {found['cores']} cores"
    lines = [f"{found['model']}, {found['dtype']}, {where}"]
    if found["peer"]:
        lines.append(f"peer: {found['peer']}, float32")
    lines.append(f"{'tokens/s':<24}{'median':>10}{'min':>10}{'max':>10}")
    names = {"prompt": f"prompt {found['n_prompt']}", "decode": f"decode {found['n_predict']}"}
    for side, tests in found["rates"].items():
        for test, row in tests.items():
            figures = "".join(f"{row[name]:>10.1f}" for name in ("median", "min", "max"))
            lines.append(f"{f'{side} {names[test]}':<24}{figures}")
    for test, ratio in found.get("ratio", {}).items():
        lines.append(f"{'ratio ' + names[test]:<24}{ratio:>10.2f}")
    if found["load_before"] > found["cores"] / 4:
        lines.append(f"the machine was not idle: load {found['load_before']:.1f} before")
    (read, flops), limit = found["machine"].values(), found["decode_limit"]
    lines.append(f"memory read {read:.1f} GB/s, float32 matmul {flops:.0f} GFLOP/s")
    if limit is not None:
        lines.append(
            f"a token reads {limit['weight_bytes'] / 1e9:.3f} GB of weights:"
            f" at most {limit['tokens_per_second']:.1f} tokens/s, decode is"
            f" {100 * limit['share']:.0f} % of that"
        )
    return "\n".join(lines)
