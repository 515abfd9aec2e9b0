"""Sharded LLM inference in JAX over devices that are not alike, the KV cache in host memory.

from jaxllm import LLM, SamplingParams

llm = LLM.from_gguf("smollm2-135m", devices=3, split_mode="tensor", attn_split=(2, 1, 0),
                    kv="host")
print(llm.plan)
print(llm.generate("The capital of France is", SamplingParams(max_tokens=32)).text)
"""

from jaxllm.engine.sampling import Logprob, SamplingParams
from jaxllm.errors import (
    GGUFError,
    HubError,
    JaxllmError,
    ModelError,
    OptionError,
    PromptError,
    TokenizerError,
)
from jaxllm.llm import LLM, Completion, Piece
from jaxllm.models.config import LayerConfig, ModelConfig, Rope

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
    "TokenizerError",
]
