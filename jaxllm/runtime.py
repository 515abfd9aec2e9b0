"""Settings of the JAX runtime that the package makes, each only where the user made none."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from platformdirs import user_cache_dir

# For `compiler_options` of programs that are recorded as CUDA graphs; CPUs ignore it. A loop whose
# length the device computes is part of the graph and goes on without the host, which is otherwise
# asked before each turn; kernels that need nothing of each other run at the same time.
CUDA_GRAPHS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,"
    "DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL",
    "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
}

# For programs over several GPUs: sums over devices stay in the order of the other kernels. On
# streams of their own they overlap with nothing, and each costs two events.
SUMS_IN_ORDER = {"xla_disable_hlo_passes": "async-collective-creator"}


def has_kernels(device: Any) -> bool:
    """Whether a device has the instructions that kernels are made of, and jax the interface."""
    import jax

    modern = jax.__version_info__ >= (0, 11)
    return modern and getattr(device, "compute_capability", None) == "9.0"


def multiprocessors() -> int:
    """Of the smallest GPU here; those of an H200 where there is none."""
    import jax

    try:
        return min(device.core_count for device in jax.local_devices(backend="cuda"))
    except RuntimeError:
        return 132


def cache_root() -> Path:
    """The user's cache folder of the package; the variable JAXLLM_CACHE overrides it."""
    return Path(os.environ.get("JAXLLM_CACHE") or user_cache_dir("jaxllm"))


def links_file() -> Path:
    """Where measured rates of host links are kept."""
    return cache_root() / "links.json"


def rates_file() -> Path:
    """Where measured rates of devices and exchanges are kept."""
    return cache_root() / "rates.json"


def forget(*files: Path) -> None:
    """Remove what was measured, so that it is measured anew."""
    for file in files:
        with suppress(OSError):  # what cannot be removed was not written by this user
            file.unlink(missing_ok=True)


def keep_compiled_programs() -> None:
    """Let JAX keep compiled programs on disk, so that a second process starts in seconds.

    A folder that the user chose (JAX_COMPILATION_CACHE_DIR or jax.config) stays; a folder that
    cannot be written to is left out.
    """
    import jax

    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    folder = cache_root() / "programs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if not os.access(folder, os.W_OK):
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def default_dtype(platform: str) -> str:
    """float32 on CPUs, whose products of narrow types are slow; bfloat16 elsewhere."""
    return "float32" if platform == "cpu" else "bfloat16"
