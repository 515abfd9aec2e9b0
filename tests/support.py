"""What tests of engines share: small models, runs that keep every logit, and comparisons."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jaxllm import LLM, LayerConfig, ModelConfig, Rope
from jaxllm.engine.prefill import encode, prefill
from sharding.links import Link

PAGE = 16
PLACES = ("device", "pinned", "pageable")


def layer_config(kv_heads: int, q_per_kv: int, k_dim: int, **changes: Any) -> LayerConfig:
    """A plain decoder layer. The score scale makes random weights attend to few positions, so that
    a wrong position or head is seen in the logits."""
    fields: dict[str, Any] = dict(
        kv_heads=kv_heads,
        q_per_kv=q_per_kv,
        k_dim=k_dim,
        v_dim=k_dim,
        mlp=384,
        rope=Rope(theta=10000.0, dim=k_dim, pairs="neighbours"),
        scale=20.0,
        eps=1e-5,
    )
    return LayerConfig(**(fields | changes))


def model_config(layers: Sequence[LayerConfig], embed: int = 64, **changes: Any) -> ModelConfig:
    """A model of these layers over a small vocabulary that three devices share unevenly."""
    fields: dict[str, Any] = dict(
        architecture="random",
        embed=embed,
        vocab=130,
        layers=tuple(layers),
        eps=1e-5,
        tied=True,
        ctx_train=0,
    )
    return ModelConfig(**(fields | changes))


def small_model(**changes: Any) -> ModelConfig:
    """Two layers of eight KV groups; an MLP that blocks of 32 do not divide."""
    layer = layer_config(8, 2, 16, mlp=211)
    return model_config([layer, layer], **changes)


def with_layers(cfg: ModelConfig, **changes: Any) -> ModelConfig:
    """`cfg` with fields of all its layers changed."""
    return replace(cfg, layers=tuple(replace(layer, **changes) for layer in cfg.layers))


def make_llm(cfg: ModelConfig, **arguments: Any) -> LLM:
    """An LLM of random weights with small pages and chunks."""
    defaults: dict[str, Any] = dict(
        devices=1, dtype="float32", ctx=128, page=PAGE, ubatch=PAGE, group_pages=4, prefetch=2
    )
    return LLM.from_config(cfg, **(defaults | arguments))


def random_ids(count: int, vocab: int = 130, seed: int = 0) -> list[int]:
    """Token ids of a prompt."""
    return np.random.default_rng(seed).integers(0, vocab, count).tolist()


@dataclass(frozen=True)
class Trace:
    """Every logit of a run: of the prompt [T, V] and of the steps [S, V]; bytes sent to each device
    in each step [S, R] (empty for engines that send none)."""

    prompt: np.ndarray
    steps: np.ndarray
    sent: np.ndarray

    @property
    def logits(self) -> np.ndarray:
        return np.concatenate([self.prompt, self.steps])


def feed(llm: LLM, row: int, prompt: Sequence[int]) -> np.ndarray:
    """Prefill one row; the logits [T, V] after each of its tokens. An encoder reads the same."""
    llm.forget()
    rows, ubatch = [], llm.plan.options.ubatch
    if llm.config.encoder:
        encode(llm.engine, row, prompt, ubatch)
    for hidden, used, size in prefill(llm.engine, row, prompt, ubatch):
        rows.append(llm.engine.logits(hidden, np.arange(size)[None], 0)[:used])
    return np.concatenate(rows)


def step(llm: LLM, tokens: Sequence[int], lengths: Sequence[int]) -> np.ndarray:
    """One decode step of all rows, [B, V]; rows of length 0 stay empty."""
    at = np.asarray(lengths, np.int32)
    hidden = llm.engine.forward(np.asarray(tokens, np.int32)[:, None], 0, at)
    logits = llm.engine.logits(hidden, np.zeros((len(at), 1), np.int32), 0)
    llm.engine.settle(0, np.where(at > 0, at + 1, 0))
    return logits


def run(llm: LLM, prompt: Sequence[int], forced: Sequence[int]) -> Trace:
    """Run a prompt and then `forced` tokens one by one through row 0, and forget them."""
    try:
        whole, steps, sent = feed(llm, 0, prompt), [], []
        slots = llm.plan.options.slots
        for i, token in enumerate(forced):
            before = np.asarray(llm.engine.link_bytes())
            others = [0] * (slots - 1)
            steps.append(step(llm, [token, *others], [len(prompt) + i, *others])[0])
            sent.append(np.asarray(llm.engine.link_bytes()) - before)
        return Trace(whole, np.asarray(steps), np.asarray(sent))
    finally:
        for row in range(llm.plan.options.slots):
            llm.engine.release(row)


def planned_bytes(llm: LLM, prompt: int, steps: int) -> np.ndarray:
    """Bytes that the plan says each device gets in each step after a prompt: [S, R]."""
    plan = llm.plan
    devices = range(len(plan.mesh))
    return np.asarray(
        [[plan.link_bytes(d, prompt + i, prompt) for d in devices] for i in range(steps)], np.int64
    )


def nmse(a: np.ndarray, b: np.ndarray) -> float:
    """Squared error of `a` over the squares of the reference `b`."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.sum((a - b) ** 2) / np.sum(b**2))


def assert_same_bytes(a: np.ndarray, b: np.ndarray, what: str = "") -> None:
    """Equal bit for bit."""
    assert a.shape == b.shape and a.dtype == b.dtype, (what, a.shape, b.shape)
    if a.tobytes() != b.tobytes():
        wrong = np.argwhere((a != b) | (np.isnan(a) != np.isnan(b)))
        raise AssertionError(
            f"{what}: {len(wrong)} of {a.size} values differ, the first at {wrong[:1].tolist()}; "
            f"NMSE {nmse(a, b):.3g}"
        )


def assert_close(a: np.ndarray, b: np.ndarray, limit: float = 1e-10, what: str = "") -> None:
    """NMSE within `limit` of the reference `b`, the largest logit the same wherever `b` is clear
    about it."""
    assert a.shape == b.shape, (what, a.shape, b.shape)
    error = nmse(a, b)
    assert error <= limit, f"{what}: NMSE {error:.3g} is above {limit:g}"
    assert_same_greedy(a, b, what)


def assert_same_greedy(a: np.ndarray, b: np.ndarray, what: str = "", margin: float = 1e-3) -> None:
    """The largest logit of every row has one index, except where two of `b` are closer than
    `margin`."""
    first, second = np.sort(b, axis=-1)[..., :-3:-1].T
    clear = (first - second).T >= margin
    different = (a.argmax(-1) != b.argmax(-1)) & clear
    assert not different.any(), f"{what}: other tokens at {np.argwhere(different)[:4].tolist()}"


EVENT = "/jax/core/compile/backend_compile_duration"
_running: list[list[float]] = []


def _heard(event: str, seconds: float, **_: Any) -> None:
    if event == EVENT:
        for found in _running:
            found.append(seconds)


jax.monitoring.register_event_duration_secs_listener(_heard)


@contextmanager
def compilations() -> Iterator[list[float]]:
    """The seconds of every program that is compiled, or read from disk, inside."""
    found: list[float] = []
    _running.append(found)
    try:
        yield found
    finally:
        _running.remove(found)


class CountingLink(Link):
    """Counts what it has sent and somebody still has, in groups and in bytes."""

    def __init__(self, device: Any):
        super().__init__(device)
        self.sent: list[tuple[weakref.ref, int]] = []
        self.most = self.most_bytes = 0

    def send(self, groups: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
        sent = super().send(groups)
        self.sent = [(one, size) for one, size in self.sent if one() is not None]
        self.sent += [(weakref.ref(own[0]), sum(a.nbytes for a in own)) for own in sent]
        self.most = max(self.most, len(self.sent))
        self.most_bytes = max(self.most_bytes, sum(size for _, size in self.sent))
        return sent
