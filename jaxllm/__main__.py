"""`python -m jaxllm` is the `jaxllm` command."""

from jaxllm.cli.entry import run

run()
