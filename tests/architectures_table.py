"""Measure docs/architectures.md: every architecture that loads, under every kind of plan, against
llama.cpp's logits.

    python tests/architectures_table.py               # what has no results yet
    python tests/architectures_table.py gemma2 llama  # these models again

Results are kept in tests/data/architectures.jsonl as they come, so an interrupted run goes on where
it was, and runs of other models may go on beside each other. The document and README's row are made
of them. Needs the folder of references beside the
repository, and some 15 seconds of one core a model. Exit status 1 if anything is wrong.
"""

from __future__ import annotations

import settings  # isort: skip  (before jax)
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import architecture_results as kept
import parity
from architecture_results import FLIP, SPLITS, Result
from jaxllm import LLM, JaxllmError
from support import nmse


def measure(name: str) -> Result:
    """All columns of a model. A plan that fails has its error as value."""
    result: Result = {"model": name, "architecture": parity.spec(name)["architecture"]}
    of = parity.reference(name)
    try:
        one = parity.load_model(name)
    except JaxllmError as error:
        return result | {"refused": str(error)}
    result["one"] = parity.error(parity.run(one, of), of)

    def attempt(column: str, value: Callable[[], Result]) -> None:
        try:
            result.update(value())
        except Exception as error:  # whatever it is, the table is to show it
            result[column] = f"{type(error).__name__}: {str(error).splitlines()[0]}"

    more = {"kv_replicate": parity.latent(one)}
    for shares in SPLITS:
        attempt(shares, lambda shares=shares: _split(name, of, shares, more))
    attempt("host", lambda: _places(name, of, more))
    attempt("q8_0", lambda: _quantised_cache(name, of, one))
    attempt("weights", lambda: _quantised_weights(name, of))
    return result


def _logits(llm: LLM, of: parity.Reference) -> np.ndarray:
    return np.concatenate(parity.run(llm, of))


def _split(name: str, of: parity.Reference, shares: str, more: dict[str, Any]) -> Result:
    llm = parity.load_model(name, **parity.split(shares, **more))
    return {shares: parity.error(parity.run(llm, of), of)}


def _places(name: str, of: parity.Reference, more: dict[str, Any]) -> Result:
    """What is equal to a cache on the devices."""
    arguments = {"device": {"kv": "device", "engine": "staged"}, "host": {}}
    arguments["resident"] = {"kv_gpu_layers": 1}
    device, *others = (
        _logits(parity.load_model(name, **parity.split("2,1,0", **more, **place)), of)
        for place in arguments.values()
    )
    return {
        column: "equal" if other.tobytes() == device.tobytes() else nmse(other, device)
        for column, other in zip(("host", "resident"), others, strict=True)
    }


def _quantised_cache(name: str, of: parity.Reference, one: LLM) -> Result:
    """The NMSE of all tokens; of a mixture of experts, of all but those that went to others."""
    found = parity.run(parity.load_model(name, cache_type_k="q8_0", cache_type_v="q8_0"), of)
    if all(layer.experts is None for layer in one.config.layers):
        return {"q8_0": parity.error(found, of)}
    prompt, steps = found
    logits = np.concatenate([prompt[parity.rows(of)], steps])
    expected = np.concatenate([of["logits"], *([of["greedy_logits"]] if len(found[1]) else [])])
    errors = np.sum((logits - expected) ** 2, -1) / np.sum(expected**2, -1)
    same = errors <= FLIP
    return {"q8_0": nmse(logits[same], expected[same]), "flips": int(np.sum(~same))}


def _quantised_weights(name: str, of: parity.Reference) -> Result:
    """A file of Q8_0 with its weights as they are and dequantised."""
    path, ctx = parity.write(name, quantised=True), parity.context(name)
    held = parity.load(path, ctx=ctx, weights="quantised")
    notes = [note for note in held.plan.notes if "dequantised" in note]
    expected = _logits(parity.load(path, ctx=ctx), of)
    return {"weights": nmse(_logits(held, of), expected), "notes": notes}


def main(names: Sequence[str]) -> int:
    """Measure, and write the results, the document and README's row."""
    settings.compile_in_haste()
    done = () if names else kept.read()
    for name in names or [name for name in parity.models() if name not in done]:
        result = measure(name)
        print(json.dumps(result), flush=True)
        kept.add(result)
        jax.clear_caches()
    kept.write()
    wrong = kept.faults(kept.read())
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
