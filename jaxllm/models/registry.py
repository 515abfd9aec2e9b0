"""The architectures that load, by the name that a GGUF file gives itself."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from jaxllm.errors import ModelError, shown
from jaxllm.models import (
    deepseek2,
    diffusion,
    early,
    gemma2,
    gemma3,
    gemma3n,
    gemma4,
    grove,
    hybrids,
    kimi,
    kimi_k3,
    llama,
    minicpm3,
    mixtures,
    mixtures_windowed,
    plain,
    positions,
    qwen35,
    rwkv6,
    scaled,
    t5,
    talkie,
    variants,
    windowed,
)
from jaxllm.models.family import Family

FAMILIES: Mapping[str, Family] = {
    "kimi-k3": kimi_k3.FAMILY,
    "minicpm3": minicpm3.FAMILY,
    "llama": llama.FAMILY,
    "gemma2": gemma2.FAMILY,
    "gemma3": gemma3.FAMILY,
    "gemma3n": gemma3n.FAMILY,
    "gemma4": gemma4.FAMILY,
    "grovemoe": grove.FAMILY,
    "rwkv6": rwkv6.FAMILY,
    "t5": t5.FAMILY,
    "talkie": talkie.FAMILY,
    **deepseek2.FAMILIES,
    **diffusion.FAMILIES,
    **early.FAMILIES,
    **hybrids.FAMILIES,
    **kimi.FAMILIES,
    **mixtures.FAMILIES,
    **mixtures_windowed.FAMILIES,
    **plain.FAMILIES,
    **positions.FAMILIES,
    **qwen35.FAMILIES,
    **scaled.FAMILIES,
    **variants.FAMILIES,
    **windowed.FAMILIES,
}

# What some are that is not supported, and what is nearest to them, where names would mislead.
REFUSED: Mapping[str, tuple[str, str]] = {
    "dflash": (
        "a draft in a file of its own, which writes whole blocks",
        "qwen35 with its own draft",
    ),
    "gemma4-assistant": ("a draft in a file of its own", "gemma4 without a draft"),
}


def family(architecture: str) -> Family:
    """The family of `architecture`; `ModelError` with the nearest names if there is none."""
    found = FAMILIES.get(architecture)
    if architecture in REFUSED:
        what, nearest = REFUSED[architecture]
        raise ModelError(
            f"architecture {shown(architecture)} is not supported: it is {what}; use {nearest}"
        )
    if found is None:
        near = get_close_matches(architecture, FAMILIES, n=3, cutoff=0.4)
        hint = (
            f"the nearest that are: {', '.join(near)}"
            if near
            else "docs/architectures.md has those that are"
        )
        raise ModelError(f"architecture {shown(architecture)} is not supported; {hint}")
    return found
