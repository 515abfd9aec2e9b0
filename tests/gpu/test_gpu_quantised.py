"""Products with quantised weights on a GPU that has a kernel for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as T

from jaxllm import LLM, SamplingParams
from jaxllm.bench.shapes import model_config
from jaxllm.cache.flash import has_kernel
from jaxllm.gguf.blocks import BLOCK_TYPES, take_apart
from jaxllm.gguf.random_blocks import random_blocks
from jaxllm.models.quantised import Quantised
from support import compilations

pytestmark = pytest.mark.skipif(
    not has_kernel(jax.devices()[0]), reason="no GPU that the kernel of products is for"
)
BF16 = 2e-3  # NMSE of logits of bfloat16 against float32
SHAPES = [(48, 1024, 1), (9600, 4096, 1), (64, 14336, 4), (160, 1280, 2), (9008, 2304, 3)]


def _matrix(kind: T, out: int, size: int) -> Quantised:
    count = out * size // GGML_QUANT_SIZES[kind][0]
    drawn = random_blocks(kind, 1 << 14, np.random.default_rng(0), 0.02)
    raw = np.resize(drawn, (count, drawn.shape[1])).reshape(out, -1)
    return Quantised(BLOCK_TYPES[kind], np.dtype(np.float32), take_apart(raw, kind))


@pytest.mark.parametrize("out, size, n", SHAPES)
@pytest.mark.parametrize("kind", BLOCK_TYPES, ids=lambda kind: kind.name)
def test_products_are_exact_but_for_the_order_of_sums(kind: T, out: int, size: int, n: int):
    from jaxllm.models.quantised_kernel import quantised_kernel

    w = jax.tree.map(jnp.asarray, _matrix(kind, out, size))
    x = jax.random.normal(jax.random.PRNGKey(0), (n, size)).astype(jnp.bfloat16)
    found = np.asarray(jax.jit(quantised_kernel)(x, w), np.float64)
    exact = np.asarray(x, np.float64) @ np.asarray(jax.jit(Quantised.values)(w), np.float64).T
    assert np.square(found - exact).sum() / np.square(exact).sum() < 1e-12


@pytest.mark.parametrize("engine", ["fused", "staged"])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K", "Q6_K"])
def test_logits_are_those_of_float32(kind: str, engine: str):
    base = model_config("small")
    layer = replace(base.layers[0], mlp=2048)
    cfg = replace(base, embed=1024, layers=(layer,) * 2)
    settings: dict[str, Any] = {"ctx": 512, "page": 128, "ubatch": 128, "random_type": kind}
    settings |= {"weights": "quantised", "parallel": 2}
    exact = LLM.from_config(cfg, devices=jax.devices("cpu")[:1], dtype="float32", **settings)
    llm = LLM.from_config(cfg, devices=1, engine=engine, **settings)
    assert all(own.kernel for kinds in llm.model.kinds for _, own in kinds)
    llm.warmup()
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    prompts = np.random.default_rng(0).integers(0, 8192, (2, 40)).tolist()
    with compilations() as compiled:
        found = [*llm.generate(prompts, params), *llm.generate(prompts[:1], params)]
    assert not compiled
    for prompt, completion in zip((*prompts, prompts[0]), found, strict=True):
        ids = [*prompt, *completion.token_ids]
        logits = exact.logits(ids)[len(prompt) - 1 : -1]
        taken = logits[np.arange(len(logits)), completion.token_ids]
        assert (logits.max(axis=1) - taken <= 0.1 * logits.std()).all()
    together = exact.logits(prompts[0])
    own = llm.logits(prompts[0])
    assert np.square(own - together).sum() / np.square(together).sum() < BF16
