"""A memory that fades and takes in what tokens write, and answers what they ask.

A head has a memory M [key, value]. A token with key k, value v, query q and decay exp(g) does

    M = exp(g) M;    d = v;    M = M + k d;    o = q M

where k d is the outer product. With a rate b it corrects the memory instead of adding to it (the
gated delta rule, Yang et al. 2024): d = b (v - k M), of the faded memory.

One token at a time that is `memory_step`. `memory_chunks` takes in many at once: a chunk costs
matrix products, its corrections solve one triangular system, and the memory moves on once a chunk.
Both give the same up to rounding. A token with g = 0 and v = 0, or b = 0, changes nothing.

Heads of one group share keys and queries: r heads of each of "..." groups.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxllm.models.layers import Array
from jaxllm.models.recurrent import CHUNK

product = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def memory_step(
    q: Array, k: Array, v: Array, g: Array, memory: Array, b: Array | None = None
) -> tuple[Array, Array]:
    """One token: q and k [..., S], v [..., r, V], g and b [..., r] with memory [..., r, S, V] ->
    outputs [..., r, V] and the memory after it."""
    memory = memory * jnp.exp(g)[..., None, None]
    d = v if b is None else b[..., None] * (v - product("...k,...rkv->...rv", k, memory))
    memory = memory + k[..., None, :, None] * d[..., None, :]
    return product("...k,...rkv->...rv", q, memory), memory


def memory_chunks(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    memory: Array,
    b: Array | None = None,
    chunk: int = CHUNK,
) -> tuple[Array, Array]:
    """T tokens: q and k [..., T, S], v [..., r, T, V], g and b [..., r, T] with memory
    [..., r, S, V] -> outputs [..., r, T, V] and the memory after them."""
    tokens = q.shape[-2]
    chunk = min(chunk, tokens)
    q, k, v, g = (_cut(a, chunk, axis) for a, axis in ((q, -2), (k, -2), (v, -2), (g, -1)))
    since = jnp.exp(jnp.cumsum(g, axis=-1))  # from the chunk's beginning
    decay = _between(g)
    own, read = v, None
    if b is not None:
        own, read = _corrections(k, v, _cut(b, chunk, -1), since, decay)
    seen = decay * product("...tk,...sk->...ts", q, k)[..., None, :, :]
    asked = since[..., None] * q[..., None, :, :]
    written = decay[..., -1, :, None] * k[..., None, :, :]

    def one(memory: Array, parts: tuple[Array | None, ...]) -> tuple[Array, Array]:
        own, read, seen, asked, written, kept = parts
        assert own is not None and kept is not None
        d = own if read is None else own - product("...tk,...kv->...tv", read, memory)
        o = product("...tk,...kv->...tv", asked, memory) + product("...ts,...sv->...tv", seen, d)
        memory = kept[..., None, None] * memory + product("...tk,...tv->...kv", written, d)
        return memory, o

    memory, o = lax.scan(one, memory, (own, read, seen, asked, written, since[..., -1]))
    o = jnp.moveaxis(o, 0, -3)
    return o.reshape(*o.shape[:-3], -1, o.shape[-1])[..., :tokens, :], memory


def _cut(a: Array, chunk: int, axis: int) -> Array:
    """[..., T, ...] -> [chunks, ..., chunk, ...], zeros at the end."""
    axis += a.ndim
    more = -a.shape[axis] % chunk
    a = jnp.pad(a, [(0, more if i == axis else 0) for i in range(a.ndim)])
    a = a.reshape(*a.shape[:axis], -1, chunk, *a.shape[axis + 1 :])
    return jnp.moveaxis(a, axis, 0)


def _between(g: Array) -> Array:
    """Decay [..., t, s] from after token s to token t of log decays g [..., T]; zero for s > t.

    Each is summed for itself: differences of long sums would lose the last places.
    """
    size = g.shape[-1]
    after = jnp.tril(jnp.ones((size, size), bool), -1)
    sums = jnp.cumsum(jnp.where(after, g[..., None], 0.0), axis=-2)
    return jnp.where(jnp.tril(jnp.ones((size, size), bool)), jnp.exp(sums), 0.0)


def _corrections(k: Array, v: Array, b: Array, since: Array, decay: Array) -> tuple[Array, Array]:
    """What tokens write, own - read M, of the memory M at the chunk's beginning: each corrects what
    those before it in the chunk have written."""
    size = k.shape[-2]
    strict = jnp.tril(jnp.ones((size, size), bool), -1)
    alike = jnp.where(strict, product("...tk,...sk->...ts", k, k)[..., None, :, :], 0.0)
    keys = (b * since)[..., None] * k[..., None, :, :]
    solved = jax.scipy.linalg.solve_triangular(
        b[..., None] * decay * alike + jnp.eye(size),
        jnp.concatenate([b[..., None] * v, keys], axis=-1),
        lower=True,
        unit_diagonal=True,
    )
    own, read = jnp.split(solved, (v.shape[-1],), axis=-1)
    return own, read
