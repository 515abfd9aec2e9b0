"""The forward pass as one device sees it, in the pieces that the engines put together.

Both engines call these functions and no other: the fused engine all of them in one traced loop,
the staged engine each in programs of its own. Sums over devices lie between the pieces.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.cache.attention import (
    Carry,
    Ring,
    finish,
    queries_first,
    start_carry,
    write_ring,
)
from jaxllm.cache.types import rotate
from jaxllm.models.block import Block, Ends
from jaxllm.models.config import LayerConfig
from jaxllm.models.layers import Array, Heads


class Step(NamedTuple):
    """What one step is about: rows row .. row + N, T tokens each.

    tokens [N, T]; row []; starts [N] the position of each row's first token; floor [N] where the
    positions that a ring holds begin (zero but for tails). All int32.
    """

    tokens: Array
    row: Array
    starts: Array
    floor: Array

    @property
    def positions(self) -> Array:
        """[N, T]."""
        return self.starts[:, None] + jnp.arange(self.tokens.shape[1], dtype=jnp.int32)


def pack_step(tokens: np.ndarray, row: int, starts: np.ndarray, floor: np.ndarray) -> np.ndarray:
    """A step as one int32 array [N, T + 3]: one copy a device and step."""
    rows = np.full((len(tokens), 1), row)
    columns = [tokens, rows, starts[:, None], floor[:, None]]
    return np.concatenate(columns, axis=1, dtype=np.int32, casting="unsafe")


def unpack_step(packed: Array) -> Step:
    """The inverse of `pack_step`, inside a trace."""
    return Step(packed[:, :-3], packed[0, -3], packed[:, -2], packed[:, -1])


def begin_attention(
    block: Block,
    cfg: LayerConfig,
    heads: Heads,
    squares: Array | None,
    ring: Ring | None,
    step: Step,
) -> tuple[Array, Carry, Ring | None]:
    """Queries [N, K, G, T, H] with a fresh carry; keys and values, where the layer has any, written
    to its ring."""
    q, k, v = block.before_attention(heads, squares, step.positions)
    if cfg.cache.rotate_k:
        q = rotate(q).astype(q.dtype)
    if ring is not None and k is not None and v is not None:
        k = rotate(k) if cfg.cache.rotate_k else k
        v = rotate(v) if cfg.cache.rotate_v else v
        ring = write_ring(cfg, ring, k, v, step.row, step.starts)
    q = queries_first(q)
    slopes = None if block.slopes is None else block.slopes[...] / cfg.scale
    sinks = None if block.sinks is None else block.sinks[...]
    return q, start_carry(q, cfg.v_dim, slopes, sinks), ring


def end_attention(block: Block, cfg: LayerConfig, carry: Carry, x: Array) -> Array:
    """This device's partial [N, T, D] from the carry of all blocks and the residual x."""
    if not cfg.cache.rotate_v:
        return block.after_attention(finish(carry, x.dtype), x)
    turned = finish(carry, jnp.dtype(jnp.float32))
    return block.after_attention(rotate(turned).astype(x.dtype), x)


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
    logits = ends.logits(jnp.take_along_axis(x, at[:, :, None], axis=1))
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
