"""`jaxllm fit`: the split, place of the cache and chunk size that make a request fastest."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jaxllm.cli.options import add_again, add_command, add_machine, add_one_model, mesh_of, model_of
from jaxllm.errors import OptionError
from jaxllm.json_text import to_json
from sharding import CACHE_BLOCKS

if TYPE_CHECKING:
    from sharding.fit import Fit

_EXAMPLES = """\
  jaxllm fit model.gguf -c 32768
  jaxllm fit model.gguf -c 131072 -ctk f16,q8_0 -ctv f16,q8_0 --explain
  jaxllm fit model.gguf -c 32768 --devices-file machine.toml -p 30000 -n 500
"""


def add(subparsers: Any) -> None:
    """Declare the subcommand."""
    summary = "Choose the fastest split that fits, by predicted rates"
    parser = add_command(subparsers, "fit", run, summary, _EXAMPLES)
    add = parser.add_argument
    add_one_model(parser)
    ctx = "positions a sequence may have (default 2048, or the model's if that is less)"
    add("-c", "--ctx-size", dest="ctx", type=int, metavar="N", help=ctx)
    add("--devices", type=int, metavar="N", help="devices to use (default all)")
    add_machine(parser)
    add_again(parser)
    modes = ("none", "layer", "tensor")
    add("-sm", "--split-mode", choices=modes, help="consider this one only (default all)")
    for letter, what in (("k", "keys"), ("v", "values")):
        types = f"types allowed for cached {what}, as f16,q8_0 (default as --dtype)"
        add(f"-ct{letter}", f"--cache-type-{letter}", metavar="TYPES", help=types)
    batch = "tokens of prompts between two steps of sequences that run; no chunk is larger"
    add("-b", "--batch-size", dest="batch", type=int, metavar="N", help=batch)
    add("-ub", "--ubatch-size", dest="ubatch", type=int, metavar="N", help="this chunk size only")
    slots = "sequences that run at once (default 1)"
    add("-np", "--parallel", type=int, metavar="N", help=slots)
    rates = "GB/s from host memory to each device, as 24.2,3.3 (default: measured)"
    add("--link-gbps", metavar="RATES", help=rates)
    dtypes = ("float32", "bfloat16", "float16")
    add("--dtype", choices=dtypes, help="of weights and activations (default by the platform)")
    weights = "quantised: as the file has them, where that can be (default dequantised to --dtype)"
    add("--weights", choices=("dequantised", "quantised"), help=weights)
    add("--page", type=int, metavar="N", help="positions of a cache page, a power of two")
    add("--group-pages", type=int, metavar="N", help="pages of the largest copy from host memory")
    together = "full pages that leave the devices together; fewer stay there"
    add("--tail-pages", type=int, metavar="N", help=together)
    prompt = "prompt tokens of the request that counts (default three quarters of -c)"
    add("-p", "--n-prompt", type=int, metavar="N", help=prompt)
    predict = "tokens that it generates (default the rest of -c)"
    add("-n", "--n-predict", type=int, metavar="N", help=predict)
    add("--explain", action="store_true", help="add the plan, and what each part of a step takes")


def run(args: argparse.Namespace) -> int:
    """Print what was considered, the best first, and the options of the best."""
    for option in ("cache_type_k", "cache_type_v"):
        for name in (getattr(args, option) or "").split(",") if getattr(args, option) else ():
            if name not in CACHE_BLOCKS:
                flag = f"--{option.replace('_', '-')}"
                raise OptionError(f"{flag} has {name!r}; types are {', '.join(CACHE_BLOCKS)}")
    from jaxllm.runtime import forget, links_file, rates_file
    from sharding.fit_report import explain

    if args.again:
        forget(links_file(), rates_file())
    found = _fit(args)
    if args.json:
        print(to_json(found.to_dict()))
    else:
        print(found)
        if args.explain:
            print(explain(found))
    return 0


def _fit(args: argparse.Namespace) -> Fit:
    from jaxllm import hub
    from jaxllm.gguf import open_gguf
    from jaxllm.planning import fit_gguf
    from sharding.fit_tables import Workload

    names = ("ctx", "split_mode", "cache_type_k", "cache_type_v", "batch", "ubatch", "parallel")
    names += ("link_gbps", "dtype", "weights", "page", "group_pages", "tail_pages")
    given = {n: getattr(args, n) for n in names if getattr(args, n) is not None}
    if (args.n_prompt is None) != (args.n_predict is None):
        raise OptionError("--n-prompt and --n-predict go together; give both")
    if args.n_prompt is not None:
        if min(args.n_prompt, args.n_predict) < 1:
            raise OptionError("--n-prompt and --n-predict must be at least 1")
        given["workload"] = Workload(args.n_prompt, args.n_predict)
    model = model_of(args)
    found = fit_gguf(open_gguf(hub.resolve(model)), mesh_of(args), progress=True, **given)
    where = {"path": model}
    if args.devices is not None:
        where["devices"] = args.devices
    return replace(found, given={**where, **found.given})
