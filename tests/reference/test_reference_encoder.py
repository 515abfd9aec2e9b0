"""A random model with an encoder before its decoder against llama.cpp's float32 logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import parity
from jaxllm import LLM, ModelError, OptionError, PromptError, SamplingParams
from jaxllm.bench.measure import measure
from jaxllm.bench.tests import Test
from jaxllm.gguf.reader import open_gguf
from jaxllm.perplexity import perplexity
from jaxllm.planning import fit_gguf
from sharding import Mesh
from support import compilations, nmse

PLANS: dict[str, dict[str, Any]] = {
    "fused": {},
    "staged": dict(engine="staged", page=16, group_pages=2),
    "cut": parity.UNEVEN | {"ubatch": 64},
    "layers": dict(devices=2, split_mode="layer", kv="host", page=16, group_pages=2),
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


def _load(**arguments: Any) -> LLM:
    return parity.load(parity.write("t5-dense"), ctx=128, **({"ubatch": 64} | arguments))


@pytest.fixture(scope="module")
def of(shared: Path) -> parity.Reference:
    return parity.reference("t5-dense")


@pytest.fixture(scope="module")
def prompts(of: parity.Reference) -> list[list[int]]:
    parts = np.split(of["tokens"], np.cumsum(of["seq3_lens"])[:-1])
    return [part.tolist() for part in parts]


@pytest.mark.parametrize("plan", PLANS)
def test_prompts_of_other_lengths(plan: str, of: parity.Reference, prompts: list[list[int]]):
    """Encoder and decoder read the same; then a batch decodes what each prompt gives alone."""
    llm = _load(**PLANS[plan], parallel=2)
    separate = np.concatenate(llm.logits(prompts, decoder_input_ids=prompts))
    assert nmse(separate, of["seq3_logits_separate"]) <= 1e-9
    for prompt, done in zip(prompts, llm.generate(prompts, GREEDY), strict=True):
        assert done.prompt_tokens == len(prompt) and done.cached_tokens == 0
        begun = [llm.config.start, *done.token_ids]
        logits = llm.logits(prompt, decoder_input_ids=begun)
        np.testing.assert_array_equal(logits.argmax(-1)[:-1], done.token_ids)
        np.testing.assert_array_equal(llm.logits(prompt), llm.logits(prompt, begun[:1]))


@pytest.mark.parametrize("plan", ["fused", "cut"])
def test_nothing_compiles_after_warm_up(plan: str, prompts: list[list[int]]):
    llm = _load(**PLANS[plan], parallel=2)
    llm.warmup()
    with compilations() as found:
        llm.generate(prompts, GREEDY)
        llm.logits(prompts[0], prompts[1])
    assert not found


@pytest.mark.parametrize("plan", ["fused", "cut"])
def test_cache_takes_the_planned_bytes(plan: str, of: parity.Reference):
    """An encoder's layers keep one step on the device and nothing elsewhere."""
    llm = _load(**PLANS[plan])
    engine: Any = llm.engine
    rings = [engine.cache.rings] if plan == "fused" else [own.values() for own in engine.rings]
    held = [sum(a.nbytes for ring in own for a in ring) for own in rings]
    assert held == [llm.plan.cache_bytes(device)["device"] for device in range(len(rings))]


def test_what_it_cannot_do(shared: Path, tmp_path: Path):
    llm = _load(ubatch=32)
    with pytest.raises(PromptError, match="33 tokens and t5 reads all in one step of at most 32"):
        llm.generate(list(range(33)))
    with pytest.raises(PromptError, match="decoder_input_ids is empty"):
        llm.logits([1, 2], decoder_input_ids=[])
    with pytest.raises(PromptError, match="2 lists of decoder_input_ids for 1 prompts"):
        llm.logits([[1, 2]], [[0], [0]])
    with pytest.raises(PromptError, match="token id 256"):
        llm.logits([1, 2], [256])
    path = tmp_path / "session"
    for refused in (llm.step_fn, lambda: llm.save_session(path), lambda: llm.load_session(path)):
        with pytest.raises(OptionError, match="of a decoder alone, and t5 has an encoder"):
            refused()
    with pytest.raises(ModelError, match="t5 has an encoder, and a text has no parts"):
        perplexity(llm, list(range(64)), 32)
    with pytest.raises(ModelError, match="t5 has an encoder, and tests are"):
        measure(llm, [Test(1, 0, 0)], 1)
    with pytest.raises(OptionError, match="does not count the encoder of t5"):
        fit_gguf(open_gguf(parity.write("t5-dense")), Mesh.virtual(2))
    other = parity.load_model("llama-dense")
    with pytest.raises(OptionError, match="llama has no encoder; drop decoder_input_ids"):
        other.logits([1, 2], [0])
