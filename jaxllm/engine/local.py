"""The forward pass as one device sees it, in the pieces that the engines put together.

Both engines call these functions and no other: the fused engine all of them in one traced loop,
the staged engine each in programs of its own. Sums over devices lie between the pieces.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxllm.cache.attention import (
    Carry,
    Ring,
    finish,
    queries_first,
    start_carry,
    write_ring,
)
from jaxllm.cache.biases import Biases
from jaxllm.cache.blocks import no_blocks
from jaxllm.cache.sparse import Kept, no_followed, no_keys
from jaxllm.cache.types import rotate
from jaxllm.models.block import Block, Ends, Midway
from jaxllm.models.config import LayerConfig
from jaxllm.models.layers import Array, Heads
from jaxllm.models.parts import BlockIndexer, Follower, Indexer


class Step(NamedTuple):
    """What one step is about: rows row .. row + N, T tokens each.

    tokens [N, T]; row []; starts [N] the position of each row's first token; floor [N] where the
    positions that a ring holds begin (zero but for tails); counts [N] how many of each row's tokens
    are real, none of a row that takes no part; memory [N] how many positions each row's cross
    attention reads, and memory_floor [N] where those of a ring begin. All int32.
    """

    tokens: Array
    row: Array
    starts: Array
    floor: Array
    counts: Array
    memory: Array
    memory_floor: Array

    @property
    def positions(self) -> Array:
        """[N, T]."""
        return self.starts[:, None] + jnp.arange(self.tokens.shape[1], dtype=jnp.int32)

    def seen_from(self, cfg: LayerConfig) -> Array:
        """The positions [N, T] up to which queries see: their own, or the last real one of their
        row in a layer that is not causal, or of its memory in cross attention."""
        if cfg.causal:
            return self.positions
        count = self.starts + self.counts
        if cfg.role == "cross":
            count = jnp.where(self.starts < 0, 0, self.memory)
        return jnp.broadcast_to((count - 1)[:, None], self.tokens.shape)

    def floor_of(self, cfg: LayerConfig) -> Array:
        """Where the positions [N] of the ring that a layer reads begin."""
        return self.memory_floor if cfg.role == "cross" else self.floor


def pack_step(
    tokens: np.ndarray,
    row: int,
    starts: np.ndarray,
    floor: np.ndarray,
    memory: np.ndarray,
    memory_floor: np.ndarray,
    used: int | None = None,
) -> np.ndarray:
    """A step as one int32 array [N, T + 6]: one copy a device and step; `used` of the T tokens are
    real, or all."""
    counts = np.where(starts < 0, 0, tokens.shape[1] if used is None else used)
    columns = np.full_like(starts, row), starts, floor, counts, memory, memory_floor
    packed = [tokens, np.stack(columns, axis=1)]
    return np.concatenate(packed, axis=1, dtype=np.int32, casting="unsafe")


def unpack_step(packed: Array) -> Step:
    """The inverse of `pack_step`, inside a trace."""
    row, *columns = jnp.moveaxis(packed[:, -6:], 1, 0)
    return Step(packed[:, :-6], row[0], *columns)


def begin_attention(
    block: Block,
    cfg: LayerConfig,
    heads: Heads,
    squares: Array | None,
    ring: Ring | None,
    step: Step,
    chosen: Array | None,
) -> tuple[Array, Carry, Ring | None]:
    """Queries [N, K, G, T, H] with a fresh carry; keys and values, where the layer has any, written
    to its ring. `chosen` is what the last indexer before has, for a layer that follows it."""
    q, k, v = block.before_attention(heads, squares, step.positions)
    if cfg.cache.rotate_k:
        q = rotate(q).astype(q.dtype)
    kept = None
    if cfg.indexer is not None and v is not None:
        v, asks = jnp.split(v, [cfg.v_stored], axis=-1)
        if isinstance(cfg.indexer, BlockIndexer):
            kept = no_blocks(cfg, asks, q.shape[3])
        elif isinstance(cfg.indexer, Follower):
            assert chosen is not None
            kept = no_followed(cfg, chosen, q.shape[2], q.dtype)
        else:
            kept = no_keys(cfg, asks, q.dtype)
    if ring is not None and k is not None and v is not None:
        ring = _write(cfg, ring, k, v, step)
    q = queries_first(q)
    biases = None
    if block.relative is not None:
        found = block.relative()
        biases = Biases(jnp.broadcast_to(found, (len(q), *found.shape)), step.positions)
    return q, start_attention(block, cfg, q)._replace(kept=kept, biases=biases), ring


def start_attention(block: Block, cfg: LayerConfig, q: Array) -> Carry:
    """The carry of queries [N, K, G, T, H] that have seen nothing, in a layer without an indexer
    and without biases by distance but linear ones."""
    slopes = None if block.slopes is None else block.slopes[...] / cfg.scale
    sinks = None if block.sinks is None else block.sinks[...]
    return start_carry(q, cfg.v_dim, slopes, sinks)


def _write(cfg: LayerConfig, ring: Ring, k: Array, v: Array, step: Step) -> Ring:
    k = rotate(k) if cfg.cache.rotate_k else k
    v = rotate(v) if cfg.cache.rotate_v else v
    return write_ring(cfg, ring, k, v, step.row, step.starts)


def remember(block: Block, cfg: LayerConfig, x: Array, ring: Ring | None, step: Step) -> Ring:
    """The ring of a memory with what an encoder gives [N, T, D] written to it."""
    assert ring is not None
    return _write(cfg, ring, *block.remember(x), step)


def choice(cfg: LayerConfig, carry: Carry) -> Array | None:
    """What the layer has chosen, where a later one follows it."""
    followed = isinstance(cfg.indexer, Indexer) and cfg.indexer.followed
    return carry.kept.chosen if followed and isinstance(carry.kept, Kept) else None


def end_attention(cfg: LayerConfig, carry: Carry, q: Array, dtype: jnp.dtype) -> Array:
    """What attention gives [N, T, K, G, Hv], of queries and their carry of all blocks."""
    if carry.kept is not None:
        carry = Carry(*carry.kept.attend(cfg, q))
    if not cfg.cache.rotate_v:
        return finish(carry, dtype)
    return rotate(finish(carry, jnp.dtype(jnp.float32))).astype(dtype)


State: TypeAlias = tuple[Array, ...]  # [rows, own groups, ...] each


def _wide(rows: Array, a: Array) -> Array:
    """One number a row [N] beside a [N, ...]."""
    return rows.reshape(-1, *(1,) * (a.ndim - 1))


def _rows_of(state: State, step: Step) -> State:
    return tuple(lax.dynamic_slice_in_dim(a, step.row, len(step.starts)) for a in state)


def _begun(rows: State, step: Step) -> State:
    """What a step goes on with: a row at position zero begins with zeros."""
    return tuple(jnp.where(_wide(step.starts == 0, a), 0.0, a) for a in rows)


def begin_recurrent(block: Block, x: Array, state: State, step: Step) -> Midway:
    """A layer's recurrent mixer up to this device's part of what devices sum midway."""
    return block.begin_recur(x, _begun(_rows_of(state, step), step), step.counts)


def run_recurrent(
    block: Block, x: Array, state: State, step: Step, midway: Midway | None, keep: bool = False
) -> tuple[Array, State, State]:
    """This device's partial [N, T, D] of a layer's recurrent mixer, and its state of all rows after
    the step. A row without real tokens keeps its state.

    With `keep` also the states [T - 1, N, own groups, ...] after fewer tokens: after one, two, ...
    What does not depend on how many they are is computed once.
    """
    before = _rows_of(state, step)
    begun = _begun(before, step)
    partial, after = block.recur(x, begun, step.counts, midway)
    real = step.counts > 0
    kept = (jnp.where(_wide(real, a), a, b) for a, b in zip(after, before, strict=True))
    update = lax.dynamic_update_slice_in_dim
    new = tuple(update(a, b, step.row, 0) for a, b in zip(state, kept, strict=True))
    fewer = range(1, x.shape[1]) if keep else ()
    earlier = [block.recur(x, begun, jnp.full_like(step.counts, n), midway)[1] for n in fewer]
    return partial, new, tuple(map(jnp.stack, zip(*earlier, strict=True)))


NO_TOKEN = -1  # in the place of the likeliest one where logits are not numbers


class Top(NamedTuple):
    """The largest logits at each place, their ids, and the log-sum-exp of all of them.

    values and ids [N, J, k], lse [N, J] on the devices; [N J, k] and [N J] once they are merged.
    Where only the largest is asked for, no probability is, and lse is None.
    """

    values: Any
    ids: Any
    lse: Any


def head_logits(ends: Ends, x: Array, at: Array, vocab: Array, top: int) -> Array | Top:
    """Logits of places at [N, J] of x [N, T, D] over this device's rows.

    vocab int32 [2]: the device's first row and how many it has (a slice may be padded past them).
    top 0: all of them [N, J, rows]; otherwise the `top` largest, ids of the whole vocabulary.
    """
    logits = ends.logits(jnp.take_along_axis(x, at[:, :, None], axis=1), vocab)
    if top == 0:
        return logits
    logits = jnp.where(jnp.arange(logits.shape[-1]) < vocab[1], logits, -jnp.inf)
    if top == 1:
        ids = jnp.argmax(logits, axis=-1)[..., None]
        values = jnp.take_along_axis(logits, ids, axis=-1)
        lse = None
    else:
        values, ids = jax.lax.top_k(logits, min(top, logits.shape[-1]))
        lse = jax.nn.logsumexp(logits, axis=-1)
    return Top(values, ids.astype(jnp.int32) + vocab[0], lse)
