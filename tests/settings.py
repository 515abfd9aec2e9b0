"""Settings of JAX for tests: this module is imported before any other that imports jax."""

from __future__ import annotations

import os

os.environ.setdefault("NPROC", "16")  # threads for collectives of 8 devices; a smaller pool hangs
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import jax

# XLA's older emitters, and one LLVM module a program: half the time of a small program.
_FLAGS = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"


def compile_in_haste() -> None:
    """Leave most optimisations out of all programs of this process; before its first program. One
    mode a process: JAX would take a program compiled in one for the other."""
    jax.config.update("jax_disable_most_optimizations", True)
    if jax.__version_info__ < (0, 11):  # XLA ends a process that names a flag it lacks
        os.environ.setdefault("XLA_FLAGS", _FLAGS)
