"""`jaxllm bench`: prompt and decode rates, beside what the machine allows, the cost model predicts
and a peer reaches.

Tests and options are llama-bench's where it has them. Options of the split take several values;
each combination loads the model anew. See `jaxllm.bench` for how it measures.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from typing import TYPE_CHECKING, Any

from jaxllm.bench.shapes import SHAPES
from jaxllm.cli.options import add_command, add_model
from jaxllm.cli.sweep import add_swept_split, combinations, listed, natural
from jaxllm.errors import JaxllmError, OptionError
from jaxllm.json_text import to_json
from sharding.errors import ShardingError

if TYPE_CHECKING:
    from jaxllm.bench.results import Results, Row
    from jaxllm.bench.tests import Test
    from jaxllm.llm import LLM

_EXAMPLES = """\
  jaxllm bench -m smollm2-135m -p 512 -n 64
  jaxllm bench --random-shape small -ub 128,512 -p 1024 -d 0,4096 -c 8192
  jaxllm bench --random-shape small --devices 3 -sm tensor -as 2/1/0,1/1/1 -nkvo 0,1
  jaxllm bench --random-shape llama-8b -p 4096 -d 16384 -nkvo -ctk bf16,q8_0 -ctv bf16,q8_0
  jaxllm bench --random-shape llama-8b --random-type Q8_0,Q4_K -p 0 -d 512
  jaxllm bench -m model.gguf -np 1,4 -pg 512,128 -o jsonl > a.jsonl
  jaxllm bench --compare a.jsonl b.jsonl
  jaxllm bench --peer transformers --peer-python other-env/bin/python --json
"""
FORMATS = ("text", "md", "json", "jsonl", "csv")


def add(subparsers: Any) -> None:
    """Declare the subcommand."""
    summary = "Measure prompt and decode rates; options with N,... take several values"
    parser = add_command(subparsers, "bench", run, summary, _EXAMPLES)
    what = parser.add_mutually_exclusive_group()
    add_model(what)
    add = parser.add_argument
    what.add_argument("--random-shape", choices=tuple(SHAPES), help="random weights, not a model")
    kinds = "of that shape, matrices that stay quantised: Q8_0, Q4_K, ... (default: none)"
    types: dict[str, Any] = {"type": listed(str, "a type"), "action": "extend"}
    add("--random-type", help=kinds, metavar="TYPE,...", **types)
    count = listed(natural, "a number of tokens")
    sizes: dict[str, Any] = {"type": count, "action": "extend", "metavar": "N,..."}
    add("-p", "--n-prompt", help="prompts of so many tokens; 0: none (default 512)", **sizes)
    add("-n", "--n-predict", help="tokens to decode; 0: none (default 64)", **sizes)
    pairs = "a prompt and what follows it, measured together; may be repeated"
    add("-pg", type=_pair, action="append", metavar="P,N", help=pairs)
    add("-d", "--n-depth", help="all that after so many tokens (default 0)", **sizes)
    add("-r", "--repetitions", type=int, default=5, metavar="N", help="default 5")
    forms = "what to print: aligned text, Markdown, JSON, a row of JSON a line, CSV (default text)"
    add("-o", "--output", choices=FORMATS, help=forms)
    two = "compare results that -o jsonl wrote; nothing is measured"
    what.add_argument("--compare", nargs=2, metavar="FILE", help=two)
    add("--peer", choices=("transformers",), help="measure it too, in float32")
    with_torch = "a Python whose environment has torch, transformers and gguf, for --peer"
    add("--peer-python", metavar="PATH", help=with_torch)
    add_swept_split(parser)


def _pair(text: str) -> tuple[int, int]:
    sizes = text.split(",")
    if len(sizes) != 2 or not all(part.isdecimal() and int(part) for part in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} is not two numbers of tokens, as 512,128")
    return int(sizes[0]), int(sizes[1])


def run(args: argparse.Namespace) -> int:
    """Measure, or compare, and print."""
    if args.json and args.output not in (None, "json"):
        raise OptionError(f"--json does not go with -o {args.output}; give one of them")
    output = "json" if args.json else args.output or "text"
    if args.random_type and not args.random_shape:
        raise OptionError("--random-type goes with --random-shape; a file has types of its own")
    if args.compare:
        return _compare(args.compare, output)
    if args.repetitions < 1:
        raise OptionError(f"--repetitions is {args.repetitions}; it must be at least 1")
    from jaxllm.bench.tests import make_tests

    prompts, predicts = args.n_prompt or [512], args.n_predict or [64]
    tests = make_tests(prompts, predicts, args.pg or [], args.n_depth or [0])
    sweep = _with_types(args.random_type, combinations(args))
    _check_peer(args, tests, sweep)
    results = _measure_all(args, tests, sweep)
    printed = {
        "text": results.__str__,
        "md": results.to_markdown,
        "json": results.to_json,
        "jsonl": results.to_jsonl,
        "csv": results.to_csv,
    }
    print(printed[output]())
    return 0


def _with_types(names: list[str] | None, sweep: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The combinations for each type of random matrices, quantised unless one says otherwise."""
    if names is None:
        return sweep
    from jaxllm.engine.quantising import type_named

    kinds = dict.fromkeys(type_named(name).name for name in names)
    return [{"weights": "quantised", "random_type": kind} | c for kind in kinds for c in sweep]


def _compare(files: Sequence[str], output: str) -> int:
    from jaxllm.bench import Comparison, Results

    found = Comparison.of(*(Results.read(file) for file in files))
    if output == "jsonl":
        print("\n".join(to_json(row) for row in found.rows))
    else:
        printed = {"text": found.__str__, "md": found.to_markdown, "csv": found.to_csv}
        print(printed[output]() if output in printed else to_json(found.to_dict()))
    return 0


def _check_peer(args: argparse.Namespace, tests: list[Test], sweep: list[dict[str, Any]]) -> None:
    if bool(args.peer) != bool(args.peer_python):
        raise OptionError("--peer and --peer-python go together; give both")
    if not args.peer:
        return
    if args.random_shape:
        raise OptionError("--peer needs a model that both can load; drop --random-shape")
    if any(test.depth for test in tests):
        raise OptionError(f"--n-depth is {tests[-1].depth}; a peer is measured at 0 only")
    kinds = {test.prompt > 0 for test in tests}
    alone = len(kinds) == len(tests) and not any(test.prompt and test.predict for test in tests)
    if not alone or len(sweep) > 1 or sweep[0].get("parallel", 1) > 1:
        raise OptionError("--peer goes with one -p, one -n, no -pg, -np 1 and no other list")


def _measure_all(
    args: argparse.Namespace, tests: list[Test], sweep: list[dict[str, Any]]
) -> Results:
    """Rows of every combination; one that cannot be run gets a row that says why, and an error is
    raised where that is so of all."""
    from jaxllm import calibration
    from jaxllm.bench.results import Results

    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    machine: Row = {"cores": cores or 1, "load_before": load}
    measure_limits = cache(calibration.measure_limits)  # once for each dtype and place
    rows: list[Row] = []
    refused: Exception | None = None
    for arguments in sweep:
        try:
            found = _measure_one(args, tests, arguments, machine, measure_limits)
        except (JaxllmError, ShardingError) as error:
            if len(sweep) == 1:
                raise
            refused = error
            found = [arguments | {"side": "jaxllm", "test": "-", "error": str(error)}]
        rows += [{"given": sorted(arguments)} | row | machine for row in found]
    if refused is not None and not any(row.get("median") for row in rows):
        raise refused
    return Results(tuple(rows))


def _measure_one(
    args: argparse.Namespace,
    tests: list[Test],
    arguments: dict[str, Any],
    machine: Row,
    measure_limits: Any,
) -> list[Row]:
    from jaxllm import hub
    from jaxllm.bench.measure import OWN, measure
    from jaxllm.bench.peer import peer_side
    from jaxllm.bench.results import figures
    from jaxllm.progress import counting

    llm = _load(args, tests, arguments)
    if args.peer and any(d.platform != "cpu" for d in llm.plan.mesh.devices):
        raise OptionError("--peer is measured on the CPU; set JAX_PLATFORMS=cpu")
    with ExitStack() as stack:
        peer, versions = None, None
        if args.peer:
            import numpy as np

            count, predict = (
                max(getattr(test, n) for test in tests) for n in ("prompt", "predict")
            )
            prompt = np.random.default_rng(0).integers(0, llm.config.vocab, max(count, 1)).tolist()
            asked = hub.resolve(args.model), prompt, max(predict, 1), machine["cores"]
            versions, side = stack.enter_context(peer_side(args.peer_python, *asked))
            peer = args.peer, side
        total = len(tests) * (args.repetitions + 1)
        tell = stack.enter_context(counting("bench", total, show=True))
        found = measure(llm, tests, args.repetitions, peer, tell)
    settings = _settings(llm, arguments)
    compared = _compared(llm, measure_limits)
    rows: list[Row] = []
    for (side, test), measured in found.items():
        row = settings | {"side": side, "test": test.name} | test._asdict() | figures(measured)
        if side == OWN:
            row |= compared(test)
            if row.get("limit") and row.get("median"):
                row["share"] = row["median"] / row["limit"]
        else:
            own = figures(found[OWN, test])
            row |= {"peer": versions, "ratio": own["median"] / row["median"]}
        rows.append(row)
    return rows


def _load(args: argparse.Namespace, tests: list[Test], arguments: dict[str, Any]) -> LLM:
    from jaxllm import LLM
    from jaxllm.bench.shapes import model_config

    # Tokens of a depth are computed once and kept; others are not to be found again.
    deep = any(test.depth for test in tests)
    needed = max(2048, *(test.end for test in tests))
    arguments = {"ctx": needed, "prefix_cache": deep, "devices": args.devices} | arguments
    if not args.random_shape:
        return LLM.from_gguf(args.model, **arguments)
    return LLM.from_config(
        model_config(args.random_shape, arguments.get("random_type")), **arguments
    )


def _settings(llm: LLM, arguments: dict[str, Any]) -> Row:
    """What was run, as columns."""
    import jax

    from jaxllm.bench.results import SETTINGS
    from sharding.fit_report import shares

    plan, options = llm.plan, llm.plan.options
    found = {n: getattr(options, n) for n in SETTINGS if hasattr(options, n)}
    found |= {
        "model": plan.model.name,
        "dtype": llm.model.dtype,
        "weights": arguments.get("weights", "dequantised"),
        "random_type": arguments.get("random_type"),
        "impl": "kernel" if llm.model.kernels else "jnp",
        "engine": plan.engine,
        "devices": " ".join(d.label for d in plan.mesh.devices),
        "parallel": options.slots,
        "tensor_split": options.tensor_split and shares(options.tensor_split),
        "attn_split": options.attn_split and shares(options.attn_split),
        "jax": jax.__version__,
    }
    return {name: found[name] for name in SETTINGS}


def _compared(llm: LLM, measure_limits: Any) -> Any:
    """From a test to its limit, prediction and bytes, and the machine's limits."""
    from dataclasses import asdict

    from jaxllm.bench.limits import expected
    from jaxllm.calibration import calibrated_mesh
    from jaxllm.progress import measuring
    from sharding.links import host_place

    plan, dtype = llm.plan, llm.model.dtype
    devices = tuple(plan.mesh.jax_devices or ())
    streams = any(plan.step_bytes(i, plan.options.ctx) for i in range(len(devices)))
    place = host_place(devices, plan.options.kv_pinned) if streams else None
    with measuring(show=True) as tell:
        tell("what the first device can do at most")
        limits = measure_limits(devices, dtype, place)
        mesh = calibrated_mesh(plan.mesh, dtype, tell)
    return lambda test: expected(plan, mesh, limits, test) | asdict(limits)
