"""What the scenarios share: a run on one device, and the same run under a plan."""

from __future__ import annotations

from functools import cache
from typing import Any

from jaxllm import LLM, ModelConfig
from jaxllm.testing import assert_partition, assert_weights_as_planned, random_llm, small_config
from support import Trace, assert_close, assert_same_bytes, random_ids, run

PROMPT, STEPS = 40, 8
SCALE = 2.0  # random weights then attend to few positions, so that a wrong one is seen


def config(heads: int, kv_heads: int, dim: int = 64, **changes: Any) -> ModelConfig:
    """`small_config` with so many query and KV heads."""
    fields = dict(kv_heads=kv_heads, q_per_kv=heads // kv_heads, k_dim=dim, scale=SCALE)
    return small_config(**(fields | changes))


@cache
def alone(cfg: ModelConfig, **options: Any) -> tuple[Trace, tuple[int, ...]]:
    """One device's logits of a random prompt and of the greedy tokens after it."""
    llm = random_llm(cfg, devices=1, **options)
    prompt = random_ids(PROMPT, cfg.vocab)
    tokens = [int(run(llm, prompt, []).prompt[-1].argmax())]
    for _ in range(STEPS - 1):
        tokens.append(int(run(llm, prompt, tokens).steps[-1].argmax()))
    return run(llm, prompt, tokens), tuple(tokens)


def check(
    cfg: ModelConfig, *, limit: float = 1e-10, options: dict[str, Any] | None = None, **cut: Any
) -> LLM:
    """Run under a plan with the cache in each place: equal bytes, one device's results, weights
    where the plan has them. Returns the model whose cache is in host memory."""
    options = options or {}
    expected, tokens = alone(cfg, **options)
    cut = {"split_mode": "tensor"} | cut
    traces = {}
    for kv in ("device", "host"):
        llm = random_llm(cfg, engine="staged", kv=kv, **cut, **options)
        assert_partition(llm.plan)
        assert_weights_as_planned(llm)
        traces[kv] = run(llm, random_ids(PROMPT, cfg.vocab), tokens)
    assert_same_bytes(traces["host"].logits, traces["device"].logits, "host against device")
    assert_close(traces["host"].logits, expected.logits, limit, "against one device")
    return llm


def counts(ranges: Any) -> tuple[int, ...]:
    """Sizes of ranges."""
    return tuple(stop - start for start, stop in ranges)
