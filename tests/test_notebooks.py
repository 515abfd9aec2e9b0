"""Every notebook runs from top to bottom in a new kernel, and is kept without outputs."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SAYS = {  # what a notebook prints
    "01_first_steps": ("Paris", "the same tokens: True"),
    "02_host_cache": ("the same tokens: True",),
    "03_unlike_devices": ("largest error of all tables: 7.4%",),
    "04_fit": ("the largest that fits is",),
    "05_mesh_configurations": ("8 groups by (2, 1, 0): (5, 3, 0)", "llama.cpp, layer 0:"),
}


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path: Path):
    for cell in read(path).cells:
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the machinery around the kernel, not of this package
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(
    path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
):
    """The kernel starts as a newcomer's does, without this test run's devices; a cell that fails
    raises. Every figure and every plan that a cell ends with is shown."""
    if path.stem == "01_first_steps":
        assert request.getfixturevalue("smollm2_path").is_file()
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)
    monkeypatch.delenv("NPROC", raising=False)
    notebook = read(path)
    NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(FOLDER)}},
    ).execute()
    shown = {
        kind
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        for kind in output.get("data", {})
    }
    assert {"text/html", "image/png"} <= shown
    texts = "".join(
        output.get("text", "")
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    )
    for words in SAYS[path.stem]:
        assert words in texts
    assert "the same tokens: False" not in texts
