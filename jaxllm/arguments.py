"""What a caller of `LLM` may pass, told by kind; anything else is refused in one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.engine.sampling import SamplingParams
from jaxllm.errors import OptionError, PromptError, shown


def is_prompt(value: Any) -> bool:
    """Text, or a sequence of ids, rather than a sequence of prompts."""
    if isinstance(value, str):
        return True
    if not _is_listed(value):
        raise PromptError(
            f"prompts are text, a list of token ids, or a list of those, not {shown(value)}"
        )
    return len(value) > 0 and not isinstance(value[0], str | bytes | list | tuple | np.ndarray)


def token_ids(value: Any) -> list[int]:
    """A sequence or an array of whole numbers as a list."""
    try:
        if not _is_listed(value) or any(isinstance(i, bool) for i in value):
            raise TypeError
        return [index(i) for i in value]
    except TypeError:
        raise PromptError(
            f"a prompt is text or a list of token ids (whole numbers), not {shown(value)}"
        ) from None


def sampling_params(params: SamplingParams | None) -> SamplingParams:
    """The parameters, or the default ones."""
    if params is not None and not isinstance(params, SamplingParams):
        raise OptionError(f"params must be a SamplingParams, not {shown(params)}")
    return params or SamplingParams()


def path_of(value: Any) -> Path:
    """A path from text or a path."""
    if not isinstance(value, str | PathLike):
        raise OptionError(f"a path is text or a pathlib.Path, not {shown(value)}")
    return Path(value)


def check_switch(name: str, value: Any) -> None:
    """OptionError for what is not True or False."""
    if not isinstance(value, bool):
        raise OptionError(f"{name} must be True or False, not {value!r}")


def _is_listed(value: Any) -> bool:
    """A sequence or an array (of numpy or JAX), whose elements may be ids; bytes are not meant."""
    if isinstance(value, bytes | bytearray | memoryview):
        return False
    return isinstance(value, Sequence) or getattr(value, "ndim", 0) > 0
