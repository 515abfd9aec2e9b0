"""`jaxllm generate`: text from a prompt, streamed to stdout as it comes; figures to stderr."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm.cli.options import add_command, add_model, add_sampling, sampling_params
from jaxllm.cli.split import add_split, split_arguments
from jaxllm.errors import OptionError, PromptError, SessionError
from jaxllm.json_text import to_json
from jaxllm.paths import check_place
from sharding import format_bytes

if TYPE_CHECKING:
    from jaxllm.results import Completion

_EXAMPLES = """\
  jaxllm generate "The capital of France is" -n 32
  jaxllm generate --chat "Name three rivers." --temp 0
  jaxllm generate -m model.gguf -f prompt.txt -c 4096 --stop END
  jaxllm generate -m model.gguf -f long.txt -c 8192 --session long.session
  echo "Once upon a time" | jaxllm generate - --json
  jaxllm generate -m model.gguf --devices 3 -sm tensor -ts 1,1,1 -as 2,1,0 -nkvo "Hello"
"""


def add(subparsers: Any) -> None:
    """Declare the subcommand."""
    summary = "Continue a prompt, or answer it with --chat"
    parser = add_command(subparsers, "generate", run, summary, _EXAMPLES)
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the prompt; - reads stdin")
    parser.add_argument("-f", "--file", metavar="FILE", help="read the prompt from a file")
    parser.add_argument("--chat", action="store_true", help="apply the model's chat template")
    session = "go on from the sequence in FILE as far as the prompt begins alike; save to it after"
    parser.add_argument("--session", metavar="FILE", help=session)
    afresh = "keep nothing of finished sequences for prompts to come"
    parser.add_argument("--no-prefix-cache", action="store_true", help=afresh)
    add_model(parser)
    add_sampling(parser)
    add_split(parser)


def run(args: argparse.Namespace) -> int:
    """Stream the completion, or print it with its figures as JSON."""
    session = None if args.session is None else Path(args.session)
    if session is not None and args.no_prefix_cache:
        raise OptionError("--session does not go with --no-prefix-cache; drop one of them")
    prompt: str | list[int] = read_prompt(args.prompt, args.file)

    from jaxllm import LLM

    params = sampling_params(args)
    if session is not None:
        check_place(session, "the session", SessionError)
    arguments = split_arguments(args) | {"prefix_cache": not args.no_prefix_cache}
    llm = LLM.from_gguf(args.model, devices=args.devices, **arguments)
    if session is not None and session.exists():
        llm.load_session(session)
    if args.chat:
        prompt = llm.chat_prompt([{"role": "user", "content": prompt}])
    if args.json:
        (done,) = llm.generate([prompt], params)
        print(to_json({"model": llm.plan.model.name, "engine": llm.plan.engine, **asdict(done)}))
    else:
        for piece in llm.stream(prompt, params):
            print(piece.text, end="", flush=True)
            if piece.completion is not None:
                print(flush=True)
                streams = llm.plan.options.kv == "host"
                print(figures(piece.completion, streams), file=sys.stderr)
    if session is not None:
        llm.save_session(session)
    return 0


def read_prompt(prompt: str | None, file: str | None, name: str = "prompt") -> str:
    """The prompt's text; from a file or stdin without its last line end, as llama.cpp does. Errors
    call it by its name."""
    if prompt is not None and file is not None:
        raise PromptError("a prompt and a prompt file (-f) were given; give one of them")
    if prompt is None and file is None:
        raise PromptError("no prompt was given; write it in quotes, or name a file with -f")
    if prompt is not None and prompt != "-":
        text = prompt
    else:
        where = "stdin" if file in (None, "-") else repr(file)
        try:
            data = sys.stdin.buffer.read() if where == "stdin" else Path(str(file)).read_bytes()
            text = data.decode("utf-8").removesuffix("\n")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise PromptError(f"cannot read the {name} from {where}: {reason}") from error
    if not text:
        raise PromptError(f"the {name} is empty; give some text")
    return text


def figures(done: Completion, streams: bool) -> str:
    """Counts and rates of a completion in one line, and link bytes where its cache streams."""
    cached = f" ({done.cached_tokens} of them kept from before)" if done.cached_tokens else ""
    parts = [
        f"prompt {done.prompt_tokens} tokens{cached}, {done.prompt_rate:.1f}/s",
        f"generated {len(done.token_ids)} tokens, {done.generation_rate:.1f}/s",
        *([f"{done.accepted_tokens} of them drafted"] if done.accepted_tokens else []),
        f"ended by {done.finish_reason}",
    ]
    if streams:
        links = (f"{label} {format_bytes(n)}" for label, n in done.link_bytes.items())
        parts.append(f"sent from host: {', '.join(links)}")
    return f"[{'; '.join(parts)}]"
