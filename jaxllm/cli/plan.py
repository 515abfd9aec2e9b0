"""`jaxllm plan`: which device would hold what, without loading a weight."""

from __future__ import annotations

import argparse
from typing import Any

from jaxllm.cli.options import add_command, add_machine, add_one_model, mesh_of, model_of
from jaxllm.cli.split import add_split, split_arguments
from jaxllm.json_text import to_json
from sharding.memory import check_host

_EXAMPLES = """\
  jaxllm plan smollm2-135m --devices 3 -sm tensor -as 2,1,0 -nkvo
  jaxllm plan model.gguf -c 32768 -ctk f16 -ctv f16 --json
  jaxllm plan model.gguf --devices-file machine.toml -sm tensor -ts 2,1
"""


def add(subparsers: Any) -> None:
    """Declare the subcommand."""
    summary = "Show heads, columns, rows, cache and weight bytes a device, the engine, and why"
    parser = add_command(subparsers, "plan", run, summary, _EXAMPLES)
    add_one_model(parser)
    add_split(parser)
    add_machine(parser)


def run(args: argparse.Namespace) -> int:
    """Print the plan; a plan that does not fit is printed and then an error."""
    from jaxllm import hub
    from jaxllm.gguf import open_gguf
    from jaxllm.planning import plan_gguf

    file = open_gguf(hub.resolve(model_of(args)))
    plan = plan_gguf(file, mesh_of(args), progress=True, **split_arguments(args)).plan
    print(to_json(plan.to_dict()) if args.json else plan, flush=True)
    plan.check_fit()
    check_host(plan)
    return 0
