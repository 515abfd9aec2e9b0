"""The programs of the staged engine: what one device runs between two exchanges or page groups.

All are jitted at the level of the module with hashable static arguments, so that layers, models
and devices of one shape share what is compiled.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxllm.cache.attention import (
    Carry,
    Ring,
    attend_pages,
    attend_tail,
    join_page,
    ring_block,
)
from jaxllm.cache.flash import (
    Parts,
    attend_flash,
    attend_pages_flash,
    flashes,
    no_parts,
    with_parts,
)
from jaxllm.cache.stream import Arrived
from jaxllm.engine.local import (
    State,
    Step,
    Top,
    begin_attention,
    begin_recurrent,
    choice,
    end_attention,
    head_logits,
    remember,
    run_recurrent,
    start_attention,
    unpack_step,
)
from jaxllm.models.block import BlockDef, Midway
from jaxllm.models.config import LayerConfig
from jaxllm.models.layers import Array, Heads
from jaxllm.runtime import CUDA_GRAPHS


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer's static part on one device. Compared by identity: `layer_of` gives the same object
    for the same arguments, and programs look it up in every step."""

    block: BlockDef
    cfg: LayerConfig
    kv_heads: int  # of the device's slice
    states: int
    kernels: bool  # whether the device has those of attention

    def flashes(self, tokens: int, dtype: Any, positions: int) -> bool:
        """Whether a kernel folds pages, or a tail, of so many positions into queries of so many
        tokens of a row."""
        return self.kernels and flashes(self.cfg, tokens, dtype, positions)


layer_of = cache(Layer)


class Queries(NamedTuple):
    """What a device holds between a layer's stages: queries [N, K, G, T, H] and what they have seen
    of pages; where a kernel folds these no carry, which only begins afterwards."""

    q: Array
    seen: Carry | Parts


class StageIn(NamedTuple):
    """Arguments of a stage; what its pieces do not read is None."""

    here: tuple[Array, ...] = ()  # leaves of the layer that ends
    there: tuple[Array, ...] = ()  # leaves of the layer that begins
    x: Array | None = None  # residual [N, T, D]
    parts: tuple[Array, ...] | None = None  # partials, summed in this order
    heads: Heads | None = None  # of the layer that begins, where its norms waited for a sum
    held: tuple[Array, ...] | None = None  # of a mixer that waited for one
    queries: Queries | None = None
    pages: tuple[Arrived, ...] = ()  # its last groups, if it folds them
    tail: Ring | None = None  # of the layer that ends
    mixed: Array | None = None  # partial of its recurrent mixer
    begun_mlp: Any = None  # of the layer that ends, where its MLP waited for a sum
    chosen: Array | None = None  # what the last indexer has, for a layer that follows it


class StageOut(NamedTuple):
    """Results of a stage; what its pieces do not make is None."""

    x: Array | None = None  # residual, where it changed
    partial: Array | None = None
    heads: Heads | None = None
    held: tuple[Array, ...] | None = None  # of a mixer that waits for a sum
    queries: Queries | None = None
    ring: Ring | None = None  # of the layer that begins
    mixed: Array | None = None  # partial of its recurrent mixer, for the stage in which it ends
    state: State | None = None  # of the layer that begins
    begun_mlp: Any = None  # of a layer whose MLP waits for a sum
    earlier: State | None = None  # the same after fewer tokens
    chosen: Array | None = None  # what the layer that ends has, where others follow it
    folded: Array | None = None  # by whose arrival the stream knows that groups were folded


class Work(NamedTuple):
    """What a stage does: its pieces in order, the layer that ends and the layer that begins."""

    pieces: tuple[str, ...]
    here: Layer | None
    there: Layer | None


@partial(
    jax.jit,
    static_argnames=("works", "page", "keep"),
    donate_argnames=("rings", "states"),
    compiler_options=CUDA_GRAPHS,
)
def run_stages(
    given: tuple[StageIn, ...],
    rings: tuple[Ring | None, ...],
    states: tuple[State | None, ...],
    packed: Array,
    *,
    works: tuple[Work, ...],
    page: int,
    keep: bool,
) -> tuple[StageOut, ...]:
    """Run stages that follow each other on one device; rings and states are those of the layers
    that begin. The first is given all that it reads, others have residual, queries and tail from
    the one before, and of results only the last has all. With `keep` also states after fewer tokens
    (`run_recurrent`)."""
    step, folded = unpack_step(packed), None
    found: list[StageOut] = []
    for own, ring, state, work in zip(given, rings, states, works, strict=True):
        if found:
            before = found.pop()
            assert before.queries is not None
            found.append(StageOut(ring=before.ring))
            # Stages round as they do alone: nothing is computed across the line between two.
            x, q = jax.lax.optimization_barrier((before.x, before.queries.q))
            queries = before.queries._replace(q=q)  # that have seen nothing
            own = own._replace(x=x, queries=queries, tail=before.ring)
        found.append(_stage(own, ring, state, step, work=work, page=page, keep=keep))
        folded = found[-1].folded if found[-1].folded is not None else folded
    found[-1] = found[-1]._replace(folded=folded)
    return tuple(found)


@partial(jax.jit, static_argnames=("work", "page", "keep"))  # traced once for layers alike
def _stage(
    given: StageIn,
    ring: Ring | None,
    state: State | None,
    step: Step,
    *,
    work: Work,
    page: int,
    keep: bool,
) -> StageOut:
    pieces, here, there = work
    old: Any = None if here is None else here.block.bind(given.here)
    new: Any = None if there is None else there.block.bind(given.there)
    x, total, begun, changed = given.x, None, None, False
    heads, held, read, mixed, begun_mlp = given.heads, given.held, None, None, None
    earlier, chosen, made, folded = None, given.chosen, None, None
    whole = None  # the residual after a layer that ended in one kernel
    if given.parts is not None:
        total = sum(given.parts[1:], given.parts[0])
    for piece in pieces:
        if whole is not None and piece in ("after", "mlp", "join"):
            continue
        if piece == "enter":
            x, total, changed = total, None, True
        elif piece == "project":
            heads = new.project(x)
            total = new.head_squares(heads)
        elif piece == "mix":
            assert state is not None and x is not None
            held, total = begin_recurrent(new, x, state, step)
        elif piece == "in":
            assert there is not None and x is not None
            if there.states:
                assert state is not None and there.cfg.recurrent is not None
                midway = None
                if there.cfg.recurrent.summed:
                    if held is None or total is None:  # no other device has groups of this layer
                        held, total = begin_recurrent(new, x, state, step)
                    midway, held, total = Midway(held, total), None, None
                mixed, state, earlier = run_recurrent(new, x, state, step, midway, keep)
            if not there.kv_heads:
                heads, total = None, None
                continue
            if there.cfg.role == "memory":
                ring = remember(new, there.cfg, x, ring, step)
                continue
            if heads is None or total is None:  # no other device has heads of this layer
                heads = new.project(x)
                total = new.head_squares(heads)
            q, carry, ring = begin_attention(new, there.cfg, heads, total, ring, step, chosen)
            kernel = there.flashes(x.shape[1], x.dtype, page)
            begun = Queries(q, no_parts(there.cfg, q, page) if kernel else carry)
            heads, total = None, None
        elif piece == "out":
            assert here is not None and x is not None
            total = given.mixed
            if not here.kv_heads:
                continue
            assert given.queries is not None and given.tail is not None
            (q, seen), tail = given.queries, given.tail
            places = step.row, step.seen_from(here.cfg), step.floor_of(here.cfg)
            if isinstance(seen, Parts):
                for pages, table in given.pages:
                    seen, folded = _fold_parts(seen, q, pages, table, step, here=here)
                carry = with_parts(start_attention(old, here.cfg, q), seen, q)
            else:
                carry = seen
            if here.flashes(x.shape[1], x.dtype, tail.capacity):
                carry = attend_flash(here.cfg, carry, q, tail, *places)
            else:
                carry = attend_tail(here.cfg, carry, q, tail, *places, page)
            made = choice(here.cfg, carry)
            chosen = chosen if made is None else made
            o = end_attention(here.cfg, carry, q, x.dtype)
            if total is None and "join" in pieces:  # all of the layer is here
                whole = old.rest_of_layer(o, x)
            if whole is not None:
                x, changed = whole, True
                continue
            own = old.after_attention(o, x)
            total = own if total is None else total + own
        elif piece == "after":
            if total is None:  # a layer that is an MLP alone
                read = old.enter_mlp(x)
                continue
            x, read = old.join_attention(x, total)
            total, changed = None, True
        elif piece == "mlp":
            begun_mlp, total = old.begin_mlp(read)
            total = old.end_mlp(begun_mlp, total)
        elif piece == "begin_mlp":
            begun_mlp, total = old.begin_mlp(read)
        elif piece == "end_mlp":
            total, begun_mlp = old.end_mlp(given.begun_mlp, total), None
        elif piece == "join":
            x, total, changed = old.join_mlp(x, total), None, True
    return StageOut(
        x=x if changed else None,
        partial=total,
        heads=heads,
        held=held,
        queries=begun,
        ring=ring,
        mixed=mixed,
        state=state,
        begun_mlp=begun_mlp,
        earlier=earlier,
        chosen=made,
        folded=folded,
    )


@partial(
    jax.jit, static_argnames=("here",), donate_argnames=("seen",), compiler_options=CUDA_GRAPHS
)
def attend(
    seen: Carry | Parts,
    q: Array,
    pages: tuple[Array, ...],
    table: Array,
    packed: Array,
    *,
    here: Layer,
) -> tuple[Carry | Parts, Array]:
    """Fold a group into what queries have seen of pages; also a small result, by whose arrival the
    stream knows that the step ended."""
    step = unpack_step(packed)
    if isinstance(seen, Parts):
        return _fold_parts(seen, q, pages, table, step, here=here)
    seen = attend_pages(here.cfg, seen, q, pages, table, step.row, step.seen_from(here.cfg))
    result = seen.m if seen.kept is None else seen.kept.small
    return seen, result[:1, :1, :1, :1]


@partial(jax.jit, static_argnames=("here",))
def _fold_parts(
    parts: Parts, q: Array, pages: tuple[Array, ...], table: Array, step: Step, *, here: Layer
) -> tuple[Parts, Array]:
    """`attend` by a kernel."""
    places = step.row, step.seen_from(here.cfg), step.floor_of(here.cfg)
    parts = attend_pages_flash(here.cfg, parts, q, pages, table, *places)
    return parts, parts.m[:1, :1, :1, :1]


@partial(jax.jit, static_argnames=("ends",))
def embed(
    leaves: tuple[Array, ...],
    vocab: Array,
    packed: Array,
    features: Array | None,
    *,
    ends: BlockDef,
) -> Array:
    step = unpack_step(packed)
    return ends.bind(leaves).embed(step.tokens, step.positions, vocab, features)


@partial(jax.jit, static_argnames=("ends",))
def features(leaves: tuple[Array, ...], x: Array, *, ends: BlockDef) -> Array:
    return ends.bind(leaves).features(x)


@partial(jax.jit, static_argnames=("ends", "top"))
def head(
    leaves: tuple[Array, ...], vocab: Array, x: Array, at: Array, *, ends: BlockDef, top: int
) -> Array | Top:
    return head_logits(ends.bind(leaves), x, at, vocab, top)


@partial(jax.jit, static_argnames=("page", "pages"))
def cut(
    rings: tuple[Ring, ...], row: Array, first: Array, *, page: int, pages: int
) -> tuple[tuple[Array, ...], ...]:
    """Pages [M, K, P, ...] of a row of each ring, from position `first` on."""

    def of(ring: Ring) -> tuple[Array, ...]:
        blocks = [ring_block(ring, row, 1, (first + i * page)[None], page) for i in range(pages)]
        k, v = (jnp.concatenate(b) for b in zip(*blocks, strict=True))
        return join_page(k, v)

    return tuple(map(of, rings))
