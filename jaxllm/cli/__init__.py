"""The command line: one module a subcommand, `options` for what several share, `main` around them.

Every module of a subcommand has add(subparsers), which declares it, and run(args), which does it
and returns the exit code. What is slow to import (jax first of all) is imported inside run.
"""
