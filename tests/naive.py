"""What a random model computes, in plain float64 numpy: one row, the whole text at once.

Written from the papers, not from the package: no pages, no online softmax, no joined heads beyond
reading the weights. It is the reference of tests that have no other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxllm.models.block import Block
from jaxllm.models.config import LayerConfig, ModelConfig, Rope
from jaxllm.models.decoder import DecoderBlock
from jaxllm.models.sources import RandomSource
from jaxllm.models.weights import slots, whole_model


def weights(cfg: ModelConfig, block: type[Block], seed: int = 0) -> dict[str, np.ndarray]:
    """The random weights of `LLM.from_config`, by path."""
    found = {}
    for slot in slots(whole_model(block, cfg, "float32")):
        out = np.zeros(slot.shape, np.float32)
        RandomSource(cfg, seed).fill(slot, tuple(slice(0, n) for n in slot.shape), out)
        found[slot.path] = out.astype(np.float64)
    return found


def _norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * weight


def _rotate(x: np.ndarray, rope: Rope, factors: np.ndarray | None) -> np.ndarray:
    """x [T, H]: dims in pairs turn by position * theta ** (-2 i / dim)."""
    y = x.copy()
    half = rope.dim // 2
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if rope.pairs == "neighbours" else (i, i + half)
        speed = rope.theta ** (-2 * i / rope.dim) / (1.0 if factors is None else factors[i])
        angle = np.arange(len(x)) / rope.scale * speed
        y[:, a] = x[:, a] * np.cos(angle) - x[:, b] * np.sin(angle)
        y[:, b] = x[:, b] * np.cos(angle) + x[:, a] * np.sin(angle)
    return y


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, cfg: LayerConfig) -> np.ndarray:
    """One head: q [T, H], k [S, H], v [S, Hv] with the queries at the last T positions."""
    scores = q @ k.T * cfg.scale
    if cfg.softcap is not None:
        scores = cfg.softcap * np.tanh(scores / cfg.softcap)
    position = np.arange(len(k) - len(q), len(k))[:, None]
    key = np.arange(len(k))[None]
    hidden = key > position
    if cfg.window is not None:
        hidden |= position - key >= cfg.window
    scores = np.where(hidden, -np.inf, scores)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True) @ v


def _act(name: str, x: np.ndarray) -> np.ndarray:
    if name == "silu":
        return x / (1 + np.exp(-x))
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _attend(w: dict[str, np.ndarray], prefix: str, cfg: LayerConfig, x: np.ndarray) -> np.ndarray:
    rows = np.einsum("td,krd->tkr", x, w[f"{prefix}qkv.weight"])
    if cfg.qkv_bias:
        rows = rows + w[f"{prefix}qkv.bias"]
    factors, heads = w.get(f"{prefix}rope.factors"), []
    for group in range(cfg.kv_heads):
        *qs, k, v = np.split(
            rows[:, group],
            [*(cfg.k_dim * (i + 1) for i in range(cfg.q_per_kv)), cfg.k_dim * (cfg.q_per_kv + 1)],
            axis=-1,
        )
        if cfg.qk_norm:
            k = _norm(k, w[f"{prefix}head_norms.k"], cfg.eps)
            qs = [_norm(q, w[f"{prefix}head_norms.q"], cfg.eps) for q in qs]
        k = _rotate(k, cfg.rope, factors)
        heads += [attention(_rotate(q, cfg.rope, factors), k, v, cfg) for q in qs]
    out = w[f"{prefix}out.weight"]
    return np.concatenate(heads, -1) @ out.reshape(len(out), -1).T


def logits(
    cfg: ModelConfig, ids: Sequence[int], block: type[Block] = DecoderBlock, seed: int = 0
) -> np.ndarray:
    """float64 [T, V] of `LLM.from_config(cfg, block=block, seed=seed)`."""
    w = weights(cfg, block, seed)
    x = w["table"][np.asarray(ids)] * cfg.embed_scale
    for i, layer in enumerate(cfg.layers):
        prefix = f"blk.{i}."
        y = _attend(w, prefix, layer, _norm(x, w[f"{prefix}attn_norm.weight"], layer.eps))
        if layer.norms.attn_post:
            y = _norm(y, w[f"{prefix}post_attn_norm.weight"], layer.eps)
        x = x + y
        gate, up = w[f"{prefix}ffn.up"]
        y = _norm(x, w[f"{prefix}mlp_norm.weight"], layer.eps)
        y = _act(layer.activation, y @ gate.T) * (y @ up.T) @ w[f"{prefix}ffn.down"].T
        if layer.norms.mlp_post:
            y = _norm(y, w[f"{prefix}post_mlp_norm.weight"], layer.eps)
        x = x + y
    y = _norm(x, w["norm.weight"], cfg.eps) @ (w["table"] if cfg.tied else w["head"]).T
    if cfg.head_bias:
        y = y + w["bias"]
    return y if cfg.logit_softcap is None else cfg.logit_softcap * np.tanh(y / cfg.logit_softcap)
