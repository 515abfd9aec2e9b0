"""The results of tests/architectures_table.py, and the document and the line of README.md made of
them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import archs
from jaxllm.models.registry import FAMILIES

# A model's name, its architecture and the value of each column: an NMSE, "equal", or the sentence
# of a fault; or why the file is refused.
Result = dict[str, Any]

RESULTS = archs.DATA / "architectures.jsonl"
ROOT = Path(__file__).resolve().parents[1]
DOCUMENT, README = ROOT / "docs" / "architectures.md", ROOT / "README.md"

SPLITS = ("2,1", "2,1,0", "3,1,0,2,1")
PLACES = ("host", "resident")
Q8_LIMIT = 5e-3  # of a q8_0 cache
# Of the mixtures most tokens see one in the cache that went to other experts, in mistral3-moe all
# from the fifth on. Where every expert is used, so that none can change, the error is 3e-4 to 6e-4.
# llama.cpp's own over all tokens is 1.8e-2, 3.7e-2 and 0.8e-2. Indexers choose other keys too: of
# deepseek32-heads 8 of them are 9e-2 off where every expert is used, and all 128 are 1e-4 off, as
# llama.cpp's own of deepseek32 are 0.14 off and of glm-dsa 6.7e-2. gemma3n amplifies what it rounds
# 4000 times as much as its like, float32 or q8_0, up to errors as large as its logits: llama.cpp's
# are 0.25 off, of the prompt alone, and ours 0.18 of that and 0.32 of decoded tokens.
OTHER_EXPERTS = "gemma4-moe", "mimo2-moe", "mistral3-moe"
OTHER_KEYS = "deepseek32-heads", "glm-dsa-shared"
Q8_LIMITS = dict.fromkeys((*OTHER_EXPERTS, *OTHER_KEYS), 1e-2) | {"gemma3n-dense": 0.4}
COLUMNS = {
    "one": "one device",
    **{shares: f"`-ts {shares}`" for shares in SPLITS},
    "host": "host cache",
    "resident": "part resident",
    "q8_0": "q8_0 cache",
    "weights": "Q8_0 weights",
}
# What llama.cpp refuses to split by tensor (llm_arch_supports_sm_tensor), by GGUF's names.
NOT_IN_LLAMA_CPP = frozenset(
    "bailingmoe3 bitnet deepseek2 deepseek32 deepseek4 falcon-h1 gemma3n glm-dsa granitehybrid grok"
    " jamba kimi-k3 kimi-linear lfm2 lfm2moe mamba mamba2 minicpm3 minimax-01 minimax-m2 minimax-m3"
    " mistral4 mpt nemotron_h nemotron_h_moe olmo2 olmoe plamo2 qwen3tts t5".split()
)

FLIP = 2e-2  # the NMSE of a token above which it must have been sent to other experts
HEADING = "## Results\n"  # what follows it in the document is made here


def read() -> dict[str, Result]:
    """The results of all models that were measured, the newest of each, by name."""
    lines = [json.loads(line) for line in RESULTS.read_text("utf-8").splitlines()]
    newest = {line["model"]: line for line in lines if line["architecture"] in FAMILIES}
    return dict(sorted(newest.items()))


def add(result: Result) -> None:
    """Keep one more."""
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(result) + "\n")


def write() -> None:
    """Leave one line a model of the results, and make the document and README's row anew."""
    results = read()
    RESULTS.write_text("".join(json.dumps(r) + "\n" for r in results.values()), "utf-8")
    for path, made in ((DOCUMENT, document), (README, readme)):
        path.write_text(made(path.read_text("utf-8"), results), "utf-8")


def is_fault(result: Result, column: str) -> bool:
    """Whether a value is not what the column asks for."""
    value = result.get(column)
    if column in PLACES:
        return value != "equal"
    name = result["model"]
    limit = Q8_LIMITS.get(name, Q8_LIMIT) if column == "q8_0" else archs.limit(name)
    return not isinstance(value, float) or not value <= limit


def faults(results: Mapping[str, Result]) -> list[str]:
    """A sentence for every value that is wrong."""
    return [
        f"{name}, {title}: {result.get(column)}"
        for name, result in results.items()
        if "refused" not in result
        for column, title in COLUMNS.items()
        if is_fault(result, column)
    ]


def counts(results: Mapping[str, Result]) -> str:
    """How many architectures there are, and how many are right in which columns, in a sentence."""
    found = _by_architecture(results)

    def right(*columns: str) -> int:
        return sum(
            bool(runs) and not any(is_fault(run, column) for run in runs for column in columns)
            for runs in found.values()
        )

    return (
        f"{len(found)} architectures; agree with llama.cpp's logits: {right('one')} on one device,"
        f" {right(*SPLITS)} split unevenly over two, three and five, {right('q8_0')} with a q8_0"
        f" cache; have the same bytes wherever the cache is: {right(*PLACES)}; can keep weights as"
        f" Q8_0: {right('weights')}."
    )


def document(text: str, results: Mapping[str, Result]) -> str:
    """docs/architectures.md with its results made anew."""
    head, heading, _ = text.partition(HEADING)
    assert heading, f"the document has no heading {HEADING!r}"
    rows = [("architecture", "models", *COLUMNS.values()), ("---",) * (2 + len(COLUMNS))]
    for name, runs in _by_architecture(results).items():
        mark = " †" if name in NOT_IN_LLAMA_CPP else ""
        rows.append(
            (f"`{name}`{mark}", str(len(runs)), *(_cell(column, runs) for column in COLUMNS))
        )
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    refused = [result for result in results.values() if "refused" in result]
    notes = "".join(f"\n`{r['model']}` is refused: {r['refused']}\n" for r in refused)
    wrong = "".join(f"- {fault}\n" for fault in faults(results))
    wrong = f"\nWrong:\n\n{wrong}" if wrong else ""
    return f"{head}{heading}\n{counts(results)}\n\n{table}{notes}{wrong}"


def readme(text: str, results: Mapping[str, Result]) -> str:
    """README.md with its row of architectures made anew."""
    row = f"| architectures | {counts(results)} [Each of them](docs/architectures.md) |"
    made, changed = re.subn(r"^\| architectures \|.*$", lambda _: row, text, flags=re.MULTILINE)
    assert changed == 1, "README.md has no row of architectures"
    return made


def _by_architecture(results: Mapping[str, Result]) -> dict[str, list[Result]]:
    found: dict[str, list[Result]] = {name: [] for name in sorted(FAMILIES)}
    for result in results.values():
        if "refused" not in result:
            found[result["architecture"]].append(result)
    return found


def _cell(column: str, runs: Sequence[Result]) -> str:
    if not runs:
        return "–"
    wrong = [run.get(column) for run in runs if is_fault(run, column)]
    if wrong:
        return f"**{wrong[0]:.0e}**" if isinstance(wrong[0], float) else "**wrong**"
    if column in PLACES:
        return "equal"
    text = f"{max(run[column] for run in runs):.0e}"
    flips = sum(run.get("flips", 0) for run in runs)
    if column == "q8_0" and flips:
        text += f", {flips} tokens"
    if column == "weights" and any(run["notes"] for run in runs):
        text += ", part"
    return text
