"""Write a GGUF file of random weights in the shape of a well-known model.

    python -m jaxllm.bench.random_file llama-8b Q4_K random-8b.gguf

It has no vocabulary, so prompts are token ids. Blocks repeat: such a file tells how long loading
and steps take, and nothing else.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter

from jaxllm.bench.shapes import SHAPES, Shape
from jaxllm.gguf.blocks import BLOCK_TYPES
from jaxllm.gguf.random_blocks import DEVIATION, random_blocks

DRAWN = 1 << 22  # bytes that are drawn for a type; tensors repeat them


def _tensors(shape: Shape) -> dict[str, tuple[int, int]]:
    """Rows and columns of every matrix."""
    embed, kv = shape.embed, shape.kv_heads * shape.head_dim
    heads = shape.heads * shape.head_dim
    found = {"token_embd": (shape.vocab, embed)}
    if not shape.tied:
        found["output"] = (shape.vocab, embed)
    layer = {
        "attn_q": (heads, embed),
        "attn_k": (kv, embed),
        "attn_v": (kv, embed),
        "attn_output": (embed, heads),
        "ffn_gate": (shape.mlp, embed),
        "ffn_up": (shape.mlp, embed),
        "ffn_down": (embed, shape.mlp),
    }
    return found | {f"blk.{i}.{n}": s for i in range(shape.layers) for n, s in layer.items()}


def write(name: str, kind: GGMLQuantizationType, path: Path) -> None:
    """Write the file of the shape `name` with matrices of this type."""
    shape = SHAPES[name]
    writer = GGUFWriter(path, "llama")
    writer.add_name(f"random {name} {kind.name}")
    writer.add_block_count(shape.layers)
    writer.add_context_length(131072)
    writer.add_embedding_length(shape.embed)
    writer.add_feed_forward_length(shape.mlp)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500000.0)
    writer.add_vocab_size(shape.vocab)
    block, size = GGML_QUANT_SIZES[kind]
    norms = ["output_norm"] + [
        f"blk.{i}.{n}_norm" for i in range(shape.layers) for n in ("attn", "ffn")
    ]
    ones = np.ones(shape.embed, np.float32)
    for norm in norms:
        writer.add_tensor_info(f"{norm}.weight", ones.shape, ones.dtype, ones.nbytes)
    tensors = {
        f"{n}.weight": (rows, columns // block * size)
        for n, (rows, columns) in _tensors(shape).items()
    }
    for tensor, stored in tensors.items():
        writer.add_tensor_info(
            tensor, stored, np.dtype(np.uint8), stored[0] * stored[1], raw_dtype=kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _ in norms:
        writer.write_tensor_data(ones)
    drawn = random_blocks(kind, DRAWN // size, np.random.default_rng(0), DEVIATION)
    for stored in tensors.values():
        writer.write_tensor_data(np.resize(drawn, stored))
    writer.close()


def main() -> None:
    """Read the arguments and write."""
    parser = argparse.ArgumentParser(prog="python -m jaxllm.bench.random_file", description=__doc__)
    parser.add_argument("shape", choices=tuple(SHAPES))
    parser.add_argument("type", choices=tuple(kind.name for kind in BLOCK_TYPES))
    parser.add_argument("path", type=Path)
    args = parser.parse_args()
    write(args.shape, GGMLQuantizationType[args.type], args.path)


if __name__ == "__main__":
    main()
