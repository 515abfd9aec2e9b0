"""The other side of `jaxllm bench --peer transformers`; runs in another Python, with torch alone.

argv[1] is a JSON object: model (path of a GGUF), threads, prompt (token ids) and predict. A JSON
line on stdout says that the model is loaded; then each line on stdin asks for one repetition,
answered by one JSON line of rates in tokens a second.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def step(model: Any, ids: list[int], cache: Any) -> int:
    """The greedy next token after `ids`; only the last position's logits are made."""
    import torch

    tokens = torch.tensor([ids])
    out = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return int(out.logits[0, -1].argmax())


def repetition(model: Any, prompt: list[int], predict: int) -> dict[str, float]:
    """Rates of a prompt up to its first token, and of `predict` tokens after a one-token prompt."""
    import torch
    from transformers import DynamicCache

    with torch.inference_mode():
        start = time.perf_counter()
        step(model, prompt, DynamicCache())
        prompt_seconds = time.perf_counter() - start
        cache = DynamicCache()
        token = step(model, prompt[:1], cache)
        start = time.perf_counter()
        for _ in range(predict):
            token = step(model, [token], cache)
        decode_seconds = time.perf_counter() - start
    return {"prompt": len(prompt) / prompt_seconds, "decode": predict / decode_seconds}


def main() -> None:
    """Load, then answer requests until stdin ends."""
    import torch
    import transformers

    asked = json.loads(sys.argv[1])
    torch.set_num_threads(asked["threads"])
    folder, name = os.path.split(os.path.abspath(asked["model"]))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    print(json.dumps({"versions": versions, "threads": torch.get_num_threads()}), flush=True)
    for _ in sys.stdin:
        print(json.dumps(repetition(model, asked["prompt"], asked["predict"])), flush=True)


if __name__ == "__main__":
    main()
