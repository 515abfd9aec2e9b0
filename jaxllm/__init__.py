"""Sharded LLM inference in JAX over devices that are not alike, the KV cache in host memory.

from jaxllm import LLM, SamplingParams

llm = LLM.from_gguf("smollm2-135m", devices=3, split_mode="tensor", attn_split=(2, 1, 0),
                    kv="host")
print(llm.plan)
print(llm.generate("The capital of France is", SamplingParams(max_tokens=32))[0].text)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jaxllm.errors import (
    GGUFError,
    HubError,
    JaxllmError,
    ModelError,
    OptionError,
    PromptError,
    SessionError,
    TokenizerError,
)

if TYPE_CHECKING:
    from jaxllm.engine.sampling import Logprob, SamplingParams
    from jaxllm.llm import LLM
    from jaxllm.models.config import LayerConfig, ModelConfig
    from jaxllm.models.parts import Rope
    from jaxllm.results import Completion, Piece

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "Completion",
    "GGUFError",
    "HubError",
    "JaxllmError",
    "LayerConfig",
    "Logprob",
    "ModelConfig",
    "ModelError",
    "OptionError",
    "Piece",
    "PromptError",
    "Rope",
    "SamplingParams",
    "SessionError",
    "TokenizerError",
]

# What needs jax is imported when it is first asked for: the command line starts without it.
_LAZY = {
    "LLM": "jaxllm.llm",
    "Completion": "jaxllm.results",
    "LayerConfig": "jaxllm.models.config",
    "Logprob": "jaxllm.engine.sampling",
    "ModelConfig": "jaxllm.models.config",
    "Piece": "jaxllm.results",
    "Rope": "jaxllm.models.parts",
    "SamplingParams": "jaxllm.engine.sampling",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
