"""What a random model computes, in plain float64 numpy: one row, the whole text at once.

Written from the papers, not from the package: no pages, no online softmax, no joined heads beyond
reading the weights. It is the reference of tests that have no other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxllm.models.block import Block
from jaxllm.models.config import LayerConfig, ModelConfig
from jaxllm.models.decoder import DecoderBlock
from jaxllm.models.parts import Rope
from jaxllm.models.ptx.share import Turned
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


def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, cfg: LayerConfig, sink: float = -np.inf
) -> np.ndarray:
    """One head: q [T, H], k [S, H], v [S, Hv] with the queries at the last T positions. The sink is
    one more logit, of a key without a value."""
    position = np.arange(len(k) - len(q), len(k))[:, None]
    scores = q @ k.T * cfg.scale
    if cfg.temperature is not None:
        every, scale, offset = cfg.temperature
        scores *= 1 + scale * np.log(1 + (position + offset) // every)
    if cfg.softcap is not None:
        scores = cfg.softcap * np.tanh(scores / cfg.softcap)
    key = np.arange(len(k))[None]
    hidden = key > position
    if cfg.window is not None:
        hidden |= position - key >= cfg.window
        if cfg.chunked:
            hidden |= key // cfg.window != position // cfg.window
    scores = np.where(hidden, -np.inf, scores)
    scores = np.concatenate([scores, np.full((len(q), 1), sink)], axis=-1)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return p[:, :-1] / p.sum(-1, keepdims=True) @ v


def _act(name: str, x: np.ndarray) -> np.ndarray:
    if name == "silu":
        return x / (1 + np.exp(-x))
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _gated(name: str, x: np.ndarray, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return _act(name, x @ gate.T) * (x @ up.T)


def _mixture(
    w: dict[str, np.ndarray], ffn: str, cfg: LayerConfig, x: np.ndarray, route: np.ndarray
) -> np.ndarray:
    """Token by token, expert by expert."""
    experts, y = cfg.experts, np.zeros_like(x)
    assert experts is not None
    for token, row, at in zip(y, x, route, strict=True):
        logits = at @ w[f"{ffn}router.weight"].T
        p = 1 / (1 + np.exp(-logits))
        if experts.scores == "softmax":
            p = np.exp(logits) / np.exp(logits).sum()
        groups = p.reshape(experts.groups, -1)
        best = np.argsort(np.sort(groups)[:, -2:].sum(-1))[::-1][: experts.groups_used]
        inside = np.repeat(np.isin(np.arange(experts.groups), best), groups.shape[1])
        chosen = np.argsort(np.where(inside, p, -1.0))[::-1][: experts.used]
        total = p[chosen].sum() if experts.normalised else 1.0
        for e in chosen:
            halves = w[f"{ffn}gate_up"][e] @ row
            if experts.biases:
                halves = halves + w[f"{ffn}gate_up_bias"][e]
            out = w[f"{ffn}down"][e] @ (_act(cfg.activation, halves[0]) * halves[1])
            if experts.biases:
                out = out + w[f"{ffn}down_bias"][e]
            token += p[e] / total * experts.scale * out
    return y


def _mlp(
    w: dict[str, np.ndarray], prefix: str, cfg: LayerConfig, x: np.ndarray, first: np.ndarray
) -> np.ndarray:
    """x [T, D] is what the MLP reads, `first` the layer's input."""
    ffn, experts = f"{prefix}ffn.", cfg.experts
    if experts is None:
        return _gated(cfg.activation, x, *w[f"{ffn}up"]) @ w[f"{ffn}down"].T
    early = first
    if experts.reads == "norm":
        early = _norm(first, w[f"{prefix}early_norm.weight"], cfg.eps)
    own = early if experts.reads == "norm" else x
    y = _mixture(w, ffn, cfg, own, x if experts.reads == "mlp" else early)
    if experts.shared:
        beside = _gated(cfg.activation, x, *w[f"{ffn}shared.dense.up"])
        beside = beside @ w[f"{ffn}shared.dense.down"].T
        if experts.shared_gate:
            beside = beside / (1 + np.exp(-x @ w[f"{ffn}shared.gate"]))[:, None]
        y = (y + beside) * experts.blend
    return y


def _attend_latent(
    w: dict[str, np.ndarray], prefix: str, cfg: LayerConfig, x: np.ndarray
) -> np.ndarray:
    """Keys and values of each head are made of the latent vector, and attended to."""
    latent, qkv = cfg.latent, f"{prefix}qkv."
    assert latent is not None and cfg.rope is not None
    narrow = _norm(x @ w[f"{qkv}q_down"].T, w[f"{qkv}q_norm.weight"], cfg.eps)
    c, r = np.split(x @ w[f"{qkv}latent"].T, [cfg.v_dim], axis=-1)
    c, r = _norm(c, w[f"{qkv}norm.weight"], cfg.eps), _rotate(r, cfg.rope, None)
    heads = []
    for group, rows in enumerate(w[f"{qkv}q"]):
        for head, q in enumerate(np.split(narrow @ rows.T, cfg.q_per_kv, axis=-1)):
            nope, turned = np.split(q, [latent.nope], axis=-1)
            q = np.concatenate([nope, _rotate(turned, cfg.rope, None)], axis=-1)
            k = np.concatenate([c @ w[f"{qkv}keys"][group, head], r], axis=-1)
            heads.append(attention(q, k, c @ w[f"{prefix}out.values"][group, head].T, cfg))
    out = w[f"{prefix}out.out.weight"]
    return np.concatenate(heads, -1) @ out.reshape(len(out), -1).T


def _attend(w: dict[str, np.ndarray], prefix: str, cfg: LayerConfig, x: np.ndarray) -> np.ndarray:
    if cfg.latent is not None:
        return _attend_latent(w, prefix, cfg, x)
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
        sinks = w[f"{prefix}sinks"][group] if cfg.sinks else [-np.inf] * cfg.q_per_kv
        heads += [
            attention(_rotate(q, cfg.rope, factors), k, v, cfg, sink)
            for q, sink in zip(qs, sinks, strict=True)
        ]
    out = w[f"{prefix}out.weight"]
    return np.concatenate(heads, -1) @ out.reshape(len(out), -1).T * cfg.out_factor


def logits(
    cfg: ModelConfig, ids: Sequence[int], block: type[Block] = DecoderBlock, seed: int = 0
) -> np.ndarray:
    """float64 [T, V] of `LLM.from_config(cfg, block=block, seed=seed)`."""
    w = weights(cfg, block, seed)
    x = w["table"][np.asarray(ids)] * cfg.embed_scale
    for i, layer in enumerate(cfg.layers):
        prefix, first = f"blk.{i}.", x
        y = _attend(w, prefix, layer, _norm(x, w[f"{prefix}attn_norm.weight"], layer.eps))
        if layer.norms.attn_post:
            y = _norm(y, w[f"{prefix}post_attn_norm.weight"], layer.eps)
        x = x + y
        y = _norm(x, w[f"{prefix}mlp_norm.weight"], layer.eps)
        y = _mlp(w, prefix, layer, y, first)
        if layer.norms.mlp_post:
            y = _norm(y, w[f"{prefix}post_mlp_norm.weight"], layer.eps)
        x = x + y
    y = _norm(x, w["norm.weight"], cfg.eps) @ (w["table"] if cfg.tied else w["head"]).T
    if cfg.head_bias:
        y = y + w["bias"]
    return y if cfg.logit_softcap is None else cfg.logit_softcap * np.tanh(y / cfg.logit_softcap)


def turned(heads: np.ndarray, angles: np.ndarray, turns: Turned) -> np.ndarray:
    """Queries and keys of heads [N, ...] in float64, each pair turned by angles [N, rows / 2]."""
    shape, axis = ((2, -1), -2) if turns.halves else ((-1, 2), -1)
    each = heads.reshape(len(heads), -1, turns.per_head + 2, turns.rows)
    pairs = each.reshape(*each.shape[:3], *shape)
    pairs = pairs.take(0, axis) + 1j * pairs.take(1, axis)
    pairs[:, :, :-1] *= np.exp(1j * angles)[:, None, None]
    return np.stack([pairs.real, pairs.imag], axis).reshape(heads.shape)


def attend_token(
    qkv: np.ndarray,
    rings: tuple[np.ndarray, np.ndarray],
    places: Sequence[int],
    per_head: int,
    scale: float,
    window: int | None,
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Of queries, key and value of each head [N, K, ...] of a token a row, at the positions that
    `places` begins with, what attention over rings [B, K, C, ...] gives [N, K, G, Hv], and the
    rings with key and value in them, from the row on that `places` ends with."""
    after = [np.array(ring, np.float64) for ring in rings]
    capacity, k_dim = after[0].shape[2:]
    *starts, row = places
    q, *own = np.split(qkv.astype(np.float64), [per_head * k_dim, (per_head + 1) * k_dim], axis=-1)
    q = q.reshape(*q.shape[:2], per_head, k_dim)
    found = np.zeros((*q.shape[:3], after[1].shape[-1]))
    for n, start in enumerate(starts):
        if start < 0:
            continue
        for ring, new in zip(after, own, strict=True):
            ring[row + n, :, start % capacity] = new[n]
        slots = np.arange(0 if window is None else max(0, start - window + 1), start + 1) % capacity
        keys, values = (ring[row + n][:, slots] for ring in after)
        scores = np.einsum("kgh,kph->kgp", q[n], keys) * scale
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights = weights / weights.sum(axis=-1, keepdims=True)
        found[n] = np.einsum("kgp,kph->kgh", weights, values)
    return found, after
