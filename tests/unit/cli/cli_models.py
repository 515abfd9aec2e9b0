"""A small GGUF of random weights with a real tokenizer, whole or with one thing wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from jaxllm.text.bpe import byte_of_char

EMBED, LAYERS, HEADS, KV_HEADS, MLP = 64, 2, 4, 2, 96
TEMPLATE = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
Tensors = dict[str, np.ndarray]
Change = Callable[[Tensors], Any]

METADATA: Mapping[str, tuple[str, Any]] = {
    "block_count": ("uint32", LAYERS),
    "context_length": ("uint32", 65536),
    "embedding_length": ("uint32", EMBED),
    "feed_forward_length": ("uint32", MLP),
    "attention.head_count": ("uint32", HEADS),
    "attention.head_count_kv": ("uint32", KV_HEADS),
    "attention.layer_norm_rms_epsilon": ("float32", 1e-5),
}


def tokens() -> list[str]:
    """One token a byte, one merge, and an end token."""
    return [*byte_of_char(), "th", "<|end|>"]


def weights(vocab: int) -> Tensors:
    """The tensors of a llama of these sizes, by GGUF name."""
    random = np.random.default_rng(0)
    head = EMBED // HEADS

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape, np.float32) * np.float32(0.3)

    found = {"token_embd.weight": normal(vocab, EMBED), "output_norm.weight": normal(EMBED)}
    for i in range(LAYERS):
        parts = {
            "attn_norm": normal(EMBED),
            "attn_q": normal(HEADS * head, EMBED),
            "attn_k": normal(KV_HEADS * head, EMBED),
            "attn_v": normal(KV_HEADS * head, EMBED),
            "attn_output": normal(EMBED, HEADS * head),
            "ffn_norm": normal(EMBED),
            "ffn_gate": normal(MLP, EMBED),
            "ffn_up": normal(MLP, EMBED),
            "ffn_down": normal(EMBED, MLP),
        }
        found |= {f"blk.{i}.{name}.weight": value for name, value in parts.items()}
    return found


def write_model(
    path: Path,
    *,
    architecture: str = "llama",
    without: str = "",
    change: Change | None = None,
    raw: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    template: str | None = TEMPLATE,
) -> Path:
    """Write the model; `without` leaves out a metadata key, `change` edits the tensors, `raw`
    stores zeros of a type in place of a tensor."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("small")
    for key, (kind, value) in METADATA.items():
        if key != without:
            getattr(writer, f"add_{kind}")(f"{architecture}.{key}", value)
    words = tokens()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types([1] * (len(words) - 1) + [3])
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(len(words) - 1)
    writer.add_bos_token_id(len(words) - 1)
    if template is not None:
        writer.add_chat_template(template)
    tensors = weights(len(words))
    if change is not None:
        change(tensors)
    for name, value in tensors.items():
        kind = (raw or {}).get(name)
        if kind is None:
            writer.add_tensor(name, value)
        else:
            block, size = gguf.GGML_QUANT_SIZES[kind]
            zeros = np.zeros((value.shape[0], value.shape[1] // block * size), np.uint8)
            writer.add_tensor(name, zeros, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
