"""The architectures that load, by the name that a GGUF file gives itself."""

from __future__ import annotations

from difflib import get_close_matches

from jaxllm.errors import ModelError
from jaxllm.models import gemma2, gemma3, llama, qwen2, qwen3
from jaxllm.models.family import Family

FAMILIES: dict[str, Family] = {
    "llama": llama.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen3.FAMILY,
    "gemma2": gemma2.FAMILY,
    "gemma3": gemma3.FAMILY,
}


def family(architecture: str) -> Family:
    """The family of `architecture`; `ModelError` with the nearest names if there is none."""
    found = FAMILIES.get(architecture)
    if found is None:
        near = get_close_matches(architecture, FAMILIES, n=2, cutoff=0.4)
        hint = f"; nearest: {', '.join(near)}" if near else ""
        raise ModelError(
            f"architecture {architecture!r} is not supported (supported: "
            f"{', '.join(sorted(FAMILIES))}{hint})"
        )
    return found
