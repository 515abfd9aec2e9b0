"""A memory that fades and takes in what tokens write, and answers what they ask.

A head has a memory M [key, value]. A token with key k, value v, query q and decay exp(g) does

    M = exp(g) M;    d = v;    M = M + k d;    o = q M

where k d is the outer product. With a rate b it corrects the memory instead of adding to it (the
gated delta rule, Yang et al. 2024): d = b (v - k M), of the faded memory. With a bonus a key it is
asked before it fades and takes in, and what the token would write counts so many times (RWKV, Peng
et al. 2024): o = q (M + bonus k v). The decay is one number for all of M, one a key, or one a key
and value.

One token at a time that is `memory_step`. Many at once are `memory_chunks`, unless each key and
value fades by its own: a chunk costs matrix products, its corrections solve one triangular system,
and the memory moves on once a chunk. Otherwise they are `memory_scan`, which has all memories of a
few tokens side by side. A step and these give the same up to rounding. A token with g = 0 and
v = 0, or b = 0, changes nothing.

Heads of one group share keys and queries: r heads of each of "..." groups.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxllm.models.layers import Array
from jaxllm.models.recurrent import CHUNK, SHORT_CHUNK

product = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def memory_step(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    memory: Array,
    b: Array | None = None,
    bonus: Array | None = None,
) -> tuple[Array, Array]:
    """One token: q and k [..., S], v [..., r, V], g [..., r, S or 1, V or 1], b [..., r] and bonus
    [..., r, S] with memory [..., r, S, V] -> outputs [..., r, V] and the memory after it."""
    before, memory = memory, memory * jnp.exp(g)
    d = v if b is None else b[..., None] * (v - product("...k,...rkv->...rv", k, memory))
    written = k[..., None, :, None] * d[..., None, :]
    memory = memory + written
    asked = memory if bonus is None else before + bonus[..., None] * written
    return product("...k,...rkv->...rv", q, asked), memory


def memory_chunks(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    memory: Array,
    b: Array | None = None,
    bonus: Array | None = None,
    chunk: int | None = None,
) -> tuple[Array, Array]:
    """T tokens: q and k [..., T, S], v [..., r, T, V], g [..., r, T, S or 1], b [..., r, T] and
    bonus [..., r, S] with memory [..., r, S, V] -> outputs [..., r, T, V] and the memory after
    them."""
    tokens = q.shape[-2]
    chunk = min(chunk or (CHUNK if g.shape[-1] == 1 else SHORT_CHUNK), tokens)
    q, k, v, g = (_cut(a, chunk, -2) for a in (q, k, v, g))
    since = jnp.exp(jnp.cumsum(g, axis=-2))  # from the chunk's beginning
    decay = _between(g)
    own, read = v, None
    if b is not None:
        own, read = _corrections(k, v, _cut(b, chunk, -1), since, decay)
    if bonus is None:
        seen, asked = _faded_products(q, k, decay), since * q[..., None, :, :]
    else:
        seen = _faded_products(q, k, _earlier(decay, -3) + _at_own_token(bonus, chunk))
        asked = _earlier(since, -2, 1.0) * q[..., None, :, :]
    written = decay[..., -1, :, :] * k[..., None, :, :]

    def one(memory: Array, parts: tuple[Array | None, ...]) -> tuple[Array, Array]:
        own, read, seen, asked, written, kept = parts
        assert own is not None and kept is not None
        d = own if read is None else own - product("...tk,...kv->...tv", read, memory)
        o = product("...tk,...kv->...tv", asked, memory) + product("...ts,...sv->...tv", seen, d)
        memory = kept[..., None] * memory + product("...tk,...tv->...kv", written, d)
        return memory, o

    memory, o = lax.scan(one, memory, (own, read, seen, asked, written, since[..., -1, :]))
    return _joined(o, tokens), memory


def memory_scan(
    q: Array, k: Array, v: Array, step: Array, rate: Array, memory: Array, chunk: int = SHORT_CHUNK
) -> tuple[Array, Array]:
    """T tokens where g [S, V] of a token is its step [V] times a rate [S, V]: q and k [..., T, S],
    v and step [..., r, T, V], rate and memory [..., r, S, V] -> outputs [..., r, T, V] and the
    memory after them."""
    tokens = q.shape[-2]
    parts = tuple(_cut(a, min(chunk, tokens), -2) for a in (q, k, v, step))

    def both(one: tuple[Array, Array], then: tuple[Array, Array]) -> tuple[Array, Array]:
        """What is kept and written by some tokens and then by others."""
        return one[0] * then[0], one[1] * then[0] + then[1]

    def one(memory: Array, parts: tuple[Array, ...]) -> tuple[Array, Array]:
        q, k, v, step = parts
        kept = jnp.exp(step[..., None, :] * rate[..., None, :, :])  # [..., r, t, S, V]
        written = k[..., None, :, :, None] * v[..., None, :]
        kept, written = lax.associative_scan(both, (kept, written), axis=kept.ndim - 3)
        memories = kept * memory[..., None, :, :] + written
        return memories[..., -1, :, :], product("...tk,...rtkv->...rtv", q, memories)

    memory, o = lax.scan(one, memory, parts)
    return _joined(o, tokens), memory


def _cut(a: Array, chunk: int, axis: int) -> Array:
    """[..., T, ...] -> [chunks, ..., chunk, ...], zeros at the end."""
    axis += a.ndim
    more = -a.shape[axis] % chunk
    a = jnp.pad(a, [(0, more if i == axis else 0) for i in range(a.ndim)])
    a = a.reshape(*a.shape[:axis], -1, chunk, *a.shape[axis + 1 :])
    return jnp.moveaxis(a, axis, 0)


def _joined(o: Array, tokens: int) -> Array:
    """[chunks, ..., chunk, V] -> [..., T, V] without the tokens that filled the last chunk."""
    o = jnp.moveaxis(o, 0, -3)
    return o.reshape(*o.shape[:-3], -1, o.shape[-1])[..., :tokens, :]


def _between(g: Array) -> Array:
    """Decay [..., t, s, K] from after token s to token t of log decays g [..., T, K]; zero for
    s > t.

    Each is summed for itself: differences of long sums would lose the last places.
    """
    size = g.shape[-2]
    upto, after = (jnp.tril(jnp.ones((size, size), bool), k)[..., None] for k in (0, -1))
    sums = jnp.cumsum(jnp.where(after, g[..., None, :], 0.0), axis=-3)
    return jnp.where(upto, jnp.exp(sums), 0.0)


def _earlier(a: Array, axis: int, first: float = 0.0) -> Array:
    """What stood one token before along an axis, and `first` at the first token."""
    axis += a.ndim
    pads = [(1, 0) if i == axis else (0, 0) for i in range(a.ndim)]
    shifted = jnp.pad(a, pads, constant_values=first)
    return lax.slice_in_dim(shifted, 0, a.shape[axis], axis=axis)


def _at_own_token(bonus: Array, size: int) -> Array:
    """A bonus [..., r, S] at t = s of [..., r, t, s, S], zeros elsewhere."""
    return jnp.eye(size)[..., None] * bonus[..., None, None, :]


def _faded_products(q: Array, k: Array, decay: Array) -> Array:
    """q_t . k_s [..., r, t, s] of q and k [..., T, S], each key faded by decay [..., r, t, s, K]
    from s to t."""
    if decay.shape[-1] == 1:
        return decay[..., 0] * product("...tk,...sk->...ts", q, k)[..., None, :, :]
    return jnp.sum(q[..., None, :, None, :] * decay * k[..., None, None, :, :], axis=-1)


def _corrections(k: Array, v: Array, b: Array, since: Array, decay: Array) -> tuple[Array, Array]:
    """What tokens write, own - read M, of the memory M at the chunk's beginning: each corrects what
    those before it in the chunk have written."""
    size = k.shape[-2]
    strict = jnp.tril(jnp.ones((size, size), bool), -1)
    alike = jnp.where(strict, _faded_products(k, k, decay), 0.0)
    keys = b[..., None] * since * k[..., None, :, :]
    solved = jax.scipy.linalg.solve_triangular(
        b[..., None] * alike + jnp.eye(size),
        jnp.concatenate([b[..., None] * v, keys], axis=-1),
        lower=True,
        unit_diagonal=True,
    )
    own, read = jnp.split(solved, (v.shape[-1],), axis=-1)
    return own, read
