"""Make tests/data from the folder of references beside the repository.

    python tests/make_data.py

For a few models: the spec, and every eighth row of the reference logits as float32, so that
families are checked where the references are not there.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

MODELS = (
    "llama-dense",
    "qwen2-dense",
    "qwen3-dense",
    "gemma2",
    "gemma3-pattern4",
    "muse-glimmer",
    "olmo2-dense",
)
EVERY = 8
REFERENCES = Path(__file__).resolve().parents[2] / "shared" / "archs"
DATA = Path(__file__).resolve().parent / "data"


def main() -> None:
    """Write the data of all `MODELS`."""
    DATA.mkdir(exist_ok=True)
    for name in MODELS:
        shutil.copyfile(REFERENCES / "specs" / f"{name}.json.gz", DATA / f"{name}.json.gz")
        with np.load(REFERENCES / "refs" / f"{name}.npz") as full:
            exact = "_exact_gelu" if "logits_exact_gelu" in full else ""
            np.savez_compressed(
                DATA / f"{name}.npz",
                tokens=full["tokens"],
                rows=np.arange(EVERY - 1, len(full["tokens"]), EVERY, dtype=np.int32),
                logits=full[f"logits{exact}"][EVERY - 1 :: EVERY],
                greedy_ids=full[f"greedy_ids{exact}"],
                greedy_logits=full[f"greedy_logits{exact}"],
            )


if __name__ == "__main__":
    main()
