"""Random models of architectures with mixtures of experts, or with latent attention, against
llama.cpp's float32 logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_reference_archs import ENGINES, LIMIT, _check, _load, _reference, _spec

from jaxllm import ModelError
from support import nmse

# One or a few of each mechanism; the others are in SLOW.
QUICK = ("qwen2moe-moe", "gpt-oss-yarn", "deepseek2-groups", "arctic-moe", "llama4-moe")
SLOW = (
    "afmoe-moe",
    "bailingmoe-moe",
    "bailingmoe2-moe",
    "cohere2moe-moe",
    "dbrx-moe",
    "deepseek-moe",
    "deepseek2",
    "deepseek2-moe",
    "dots1-moe",
    "ernie4_5-moe-moe",
    "exaone-moe-moe",
    "glm4moe-moe",
    "gpt-oss",
    "granite-moe",
    "granitemoe-moe",
    "grok-moe",
    "grovemoe-moe",
    "hunyuan-moe-moe",
    "hy_v3-moe",
    "laguna-moe",
    "mellum-moe",
    "mimo2-moe",
    "minicpm-moe",
    "minicpm3-dense",
    "minimax-m2-moe",
    "mistral3-moe",
    "mistral4-moe",
    "olmoe-moe",
    "phimoe-moe",
    "qwen3moe",
    "qwen3vlmoe-moe",
    "refact-moe",
    "smallthinker-moe",
    "step35-moe",
)
LATENT = ("deepseek2", "minicpm3", "mistral4")  # beginnings of names
# llama.cpp ran in a context above this model's original one, where it has other factors.
CONTEXT = {"phimoe-moe": 256, "minicpm3-dense": 256}


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
@pytest.mark.filterwarnings("ignore:the context")  # some were trained for less
@pytest.mark.filterwarnings("ignore:experts of layers")  # two have some that are not used
def test_mixtures(name: str, shared: Path):
    """On one device, and with heads and columns dealt out in other shares: latent vectors are then
    stored twice."""
    reference, ctx = _reference(shared, name), CONTEXT.get(name, 128)
    for engine in ("fused", "uneven"):
        more: dict[str, Any] = {"ctx": ctx}
        if engine == "uneven" and name.startswith(LATENT):
            more["kv_replicate"] = True
        _check(_load(_spec(name), **(ENGINES[engine] | more)), reference)


@pytest.mark.slow
def test_blocks_of_which_none_is_left_out(shared: Path):
    """llama.cpp chooses blocks of keys with flash attention alone: these logits are of all keys."""
    reference, ctx = _reference(shared, "minimax-m3-moe"), 32
    tokens = reference["tokens"][:ctx].tolist()
    for engine in ("fused", "uneven"):
        llm = _load(_spec("minimax-m3-moe"), **(ENGINES[engine] | {"ctx": ctx}))
        assert nmse(llm.logits(tokens), reference["logits"][:ctx]) <= LIMIT
    with pytest.raises(ModelError, match="of which minimax-m3 attends to all.* -c 32 or less"):
        _load(_spec("minimax-m3-moe"), ctx=33)


@pytest.mark.slow
def test_experts_of_four_bits(shared: Path):
    path = shared / "archs" / "quant" / "gpt-oss-MXFP4.gguf"
    with np.load(path.with_suffix(".npz")) as file:
        end = "_dequant_f32"
        reference = {key.removesuffix(end): file[key] for key in file.files if key.endswith(end)}
        reference["tokens"] = file["tokens"]
    _check(_load(path, **ENGINES["host"]), reference)


def test_layers_that_contradict_their_metadata(shared: Path):
    """llama.cpp runs this file's third layer, which has experts, as a dense one without tensors."""
    with pytest.warns(UserWarning, match="experts of layers 2"):
        _load(_spec("ernie4_5-moe-moe"))
