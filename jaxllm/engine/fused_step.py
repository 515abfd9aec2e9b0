"""Programs of the fused engine: a whole step over one device, or over those of a mesh."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding, PartitionSpec

from jaxllm.engine.forward import Cache, Total, alone, forward
from jaxllm.engine.local import NO_TOKEN, State, Step, Top, head_logits, unpack_step
from jaxllm.models.block import BlockDef
from jaxllm.models.layers import Array
from jaxllm.models.weights import Leaves, LocalModel
from jaxllm.runtime import CUDA_GRAPHS, SUMS_IN_ORDER

AXIS = "devices"


def _per_device(
    mesh: JaxMesh | None, local: Callable, sharded: int, whole: int, alike: bool = False
) -> Callable:
    """`local` over every device of the mesh: its first `sharded` arguments and all its results
    have a leading device axis, the `whole` last ones are the same everywhere. `alike`: so is the
    first of its two results."""
    if mesh is None:
        return local
    split, same = PartitionSpec(AXIS), PartitionSpec()

    def body(*args: object) -> object:
        own = jax.tree.map(lambda a: a[0], args[:sharded])
        found = local(*own, *args[sharded:])
        first, found = found if alike else (None, found)
        found = jax.tree.map(lambda a: a[None], found)
        return (first, found) if alike else found

    specs = (split,) * sharded + (same,) * whole
    out = (same, split) if alike else split
    return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)


def same_everywhere(mesh: JaxMesh) -> NamedSharding:
    """Of arrays that every device has as a whole."""
    return NamedSharding(mesh, PartitionSpec())


def _together(x: Array) -> Array:
    """The `Total` of several devices."""
    return jax.lax.psum(x, AXIS)


def _total(mesh: JaxMesh | None) -> Total:
    return alone if mesh is None else _together


_program = partial(
    jax.jit, donate_argnames=("cache",), compiler_options=CUDA_GRAPHS | SUMS_IN_ORDER
)


@partial(_program, static_argnames=("model", "mesh", "span", "keep", "kernels", "encode"))
def whole_step(
    leaves: Leaves,
    cache: Cache,
    packed: Array,
    features: Array | None,
    *,
    model: LocalModel,
    mesh: JaxMesh | None,
    span: int | None,
    keep: bool,
    kernels: bool,
    encode: bool = False,
) -> tuple[Array, Cache, tuple[State, ...]]:
    """A step as `forward` has it, of tokens and places as `pack_step` does."""

    def local(
        leaves: Leaves, cache: Cache, packed: Array, features: Array | None
    ) -> tuple[Array, Cache, tuple[State, ...]]:
        step, total = unpack_step(packed), _total(mesh)
        return forward(model, leaves, cache, step, total, span, features, keep, kernels, encode)

    return _per_device(mesh, local, 2, 2)(leaves, cache, packed, features)


@partial(_program, static_argnames=("model", "mesh", "span", "kernels", "steps"))
def greedy_step(
    leaves: Leaves,
    cache: Cache,
    tokens: Array,
    places: Array,
    *,
    model: LocalModel,
    mesh: JaxMesh | None,
    span: int | None,
    kernels: bool,
    steps: int,
) -> tuple[tuple[Array, Array], Cache]:
    """Steps of one token a row, head included: the likeliest tokens of each [steps, N] and of the
    last [N], and the new cache. places [2, N] are the rows' positions and how much memory each
    has."""

    def local(
        leaves: Leaves, cache: Cache, tokens: Array, places: Array
    ) -> tuple[tuple[Array, Array], Cache]:
        starts, memory = places
        zeros = jnp.zeros_like(starts)
        counts = (starts >= 0).astype(jnp.int32)

        def one(held: tuple[Cache, Array, Array]) -> tuple[Cache, Array, Array]:
            cache, tokens, starts = held
            step = Step(tokens[:, None], zeros[0], starts, zeros, counts, memory, zeros)
            x, cache, _ = forward(model, leaves, cache, step, _total(mesh), span, kernels=kernels)
            at = zeros[:, None]
            best = head_logits(model.ends.bind(leaves.ends), x, at, leaves.vocab, top=1)
            assert isinstance(best, Top)
            values, ids = best.values[:, 0, 0], best.ids[:, 0, 0]
            if mesh is not None:  # the first of equal devices has the lower ids
                both = [jax.lax.all_gather(a, AXIS) for a in (values, ids)]
                best_of = both[0].argmax(axis=0)[None]
                values, ids = (jnp.take_along_axis(a, best_of, axis=0)[0] for a in both)
            return cache, jnp.where(jnp.isfinite(values), ids, NO_TOKEN), starts + counts

        held = cache, tokens, starts
        if steps == 1:
            cache, last, _ = one(held)
            return (last[None], last), cache
        (cache, last, _), ids = jax.lax.scan(lambda h, _: ((h := one(h)), h[1]), held, length=steps)
        return (ids, last), cache

    return _per_device(mesh, local, 2, 2, alike=True)(leaves, cache, tokens, places)


@partial(jax.jit, static_argnames=("ends", "top", "mesh"))
def head(
    leaves: tuple[Array, ...],
    vocab: Array,
    x: Array,
    at: Array,
    *,
    ends: BlockDef,
    top: int,
    mesh: JaxMesh | None,
) -> Array | Top:
    """`head_logits` of each device's rows."""

    def local(leaves: tuple[Array, ...], vocab: Array, x: Array, at: Array) -> Array | Top:
        return head_logits(ends.bind(leaves), x, at, vocab, top)

    return _per_device(mesh, local, 3, 1)(leaves, vocab, x, at)


@partial(jax.jit, static_argnames=("ends", "mesh"))
def features(leaves: tuple[Array, ...], x: Array, *, ends: BlockDef, mesh: JaxMesh | None) -> Array:
    """What a draft goes on from, [N, T, D]."""

    def local(leaves: tuple[Array, ...], x: Array) -> tuple[Array, tuple[()]]:
        return ends.bind(leaves).features(x), ()

    found, _ = _per_device(mesh, local, 2, 0, alike=True)(leaves, x)
    return found
