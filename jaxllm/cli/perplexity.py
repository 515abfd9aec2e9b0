"""`jaxllm perplexity`: how well a model predicts a text, and how far two runs of it are apart."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jaxllm.cli.generate import read_prompt
from jaxllm.cli.options import add_command, add_model
from jaxllm.cli.split import add_split, split_arguments
from jaxllm.errors import OptionError, PromptError
from jaxllm.json_text import to_json
from jaxllm.paths import check_place
from jaxllm.perplexity import DEFAULT_CTX, Perplexity, check_chunks, count_chunks, perplexity

_EXAMPLES = """\
  jaxllm perplexity -m smollm2-135m -f text.txt
  jaxllm perplexity -f text.txt --chunks 4 --kl-divergence-base f32.kl
  jaxllm perplexity -f text.txt --chunks 4 --kl-divergence-base f32.kl --kl-divergence -ctk q4_0
"""


def add(subparsers: Any) -> None:
    """Declare the subcommand."""
    summary = "Measure perplexity of a text, and KL divergence from another run"
    parser = add_command(subparsers, "perplexity", run, summary, _EXAMPLES)
    parser.add_argument("-f", "--file", metavar="FILE", required=True, help="the text; - is stdin")
    most = "chunks of -c tokens to run at most (default all)"
    parser.add_argument("--chunks", type=int, metavar="N", help=most)
    base = "write all probabilities to FILE, 4 bytes for each token scored and each of the"
    base += " vocabulary; with --kl-divergence: read them"
    parser.add_argument("--kl-divergence-base", "--kl-base", metavar="FILE", help=base)
    compare = "compare with the run in --kl-divergence-base"
    parser.add_argument("--kl-divergence", action="store_true", help=compare)
    add_model(parser)
    add_split(parser)


def run(args: argparse.Namespace) -> int:
    """Print value and error, and the divergence where it was asked for."""
    if args.kl_divergence and args.kl_divergence_base is None:
        raise OptionError("--kl-divergence needs the base run's file; give --kl-divergence-base")
    ctx = DEFAULT_CTX if args.ctx is None else args.ctx
    check_chunks(ctx, args.chunks)
    text = read_prompt(None, args.file, "text")
    if args.kl_divergence_base is not None and not args.kl_divergence:
        check_place(Path(args.kl_divergence_base), "the base run", OptionError)

    from jaxllm import LLM
    from jaxllm.progress import counting

    arguments = split_arguments(args) | {"ctx": ctx, "prefix_cache": False}
    llm = LLM.from_gguf(args.model, devices=args.devices, **arguments)
    if llm.tokenizer is None:
        raise PromptError("the model has no tokenizer to read the text with; use another model")
    ids = llm.tokenizer.encode(text)
    total = count_chunks(len(ids), ctx, args.chunks)
    base = "base" if args.kl_divergence else "save_base"
    with counting("perplexity", total, show=not args.json) as tell:

        def report(so_far: Perplexity) -> None:
            tell(so_far.figure)

        found = perplexity(
            llm,
            ids,
            ctx,
            chunks=args.chunks,
            report=report,
            **{base: args.kl_divergence_base},
        )
    what = {"model": llm.plan.model.name, "dtype": llm.model.dtype, "engine": llm.plan.engine}
    print(to_json(what | asdict(found)) if args.json else found)
    return 0
