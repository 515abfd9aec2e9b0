"""One step over all layers as one trace: the fused engine's programs, and `LLM.step_fn`'s."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from jaxllm.cache.attention import Ring, attend_ring, attend_span, empty_ring
from jaxllm.cache.flash import attend_flash, flashes_context
from jaxllm.cache.token import attends_token, packed, token_rings
from jaxllm.engine.local import (
    State,
    Step,
    begin_attention,
    begin_recurrent,
    choice,
    end_attention,
    remember,
    run_recurrent,
)
from jaxllm.engine.states import empty_state
from jaxllm.errors import OptionError
from jaxllm.models.block import Block, BlockDef
from jaxllm.models.config import LayerConfig
from jaxllm.models.layers import Array
from jaxllm.models.parts import Follower
from jaxllm.models.weights import Leaves, LocalModel
from sharding import Plan, ring_positions

Total = Callable[[Array], Array]  # a device's partial -> the sum over devices


def alone(x: Array) -> Array:
    """The `Total` of one device."""
    return x


class Cache(NamedTuple):
    """What the rows hold: rings of the layers with a KV cache, states of those with a state."""

    rings: tuple[Ring, ...]
    states: tuple[State, ...]


def empty_cache(
    plan: Plan, model: LocalModel, sharding: Sharding, lead: tuple[int, ...] = ()
) -> Cache:
    """Zeroed rings and states, with leading dims if given."""
    options, rings = plan.options, []
    for index in model.cfg.cached:
        layer, heads = model.cfg.layers[index], model.kv_heads[index]
        capacity = ring_positions("fused", options, layer.window, layer.role)
        rings.append(empty_ring(layer, (*lead, options.slots, heads, capacity), sharding))
    states = tuple(
        empty_state(model.cfg.layers[i], (*lead, options.slots, model.states[i]), sharding)
        for i in model.cfg.stateful
    )
    return Cache(tuple(rings), states)


class Held(NamedTuple):
    """What a layer has of all rows: its own ring, the ring that it reads instead of one, its state,
    and the choice of an earlier layer or, afterwards, its own; None for what it has not."""

    ring: Ring | None
    other: Ring | None
    state: State | None
    chosen: Array | None


class Kind(NamedTuple):
    """What the trace of a layer depends on, beside the shapes of its arrays."""

    definition: BlockDef
    cfg: LayerConfig
    total: Total
    span: int | None
    keep: bool
    kernels: bool


class Attended(NamedTuple):
    """What attention gives [N, T, K, G, Hv] or, where a kernel has made it, the residual after the
    whole layer; the layer's own ring and its choice."""

    o: Array | None
    x: Array | None
    ring: Ring | None
    chosen: Array | None


def _attend(kind: Kind, block: Block, x: Array, held: Held, step: Step, here: bool) -> Attended:
    """A layer up to the end of attention; or all of it, if it is `here` as a whole."""
    cfg, ring = kind.cfg, held.ring
    read_from = ring if held.other is None else held.other
    assert read_from is not None
    shape, positions = (x.shape[1], x.dtype, read_from.capacity), step.positions
    rings = whole = None
    if kind.kernels and attends_token(cfg, *shape):
        rings = token_rings(cfg, read_from, step.row, positions)
        whole = block.whole_layer(x, positions, rings) if here else None
        if whole is not None:
            return Attended(None, whole.x, Ring(whole.k, whole.v), None)
    heads = block.project(x)
    squares = block.head_squares(heads)
    squares = None if squares is None else kind.total(squares)
    chosen = None
    if rings is not None:
        qkv = packed(block.before_attention(heads, squares, positions))
        whole = block.whole_layer(x, positions, rings, qkv) if here else None
        if whole is not None:
            return Attended(None, whole.x, Ring(whole.k, whole.v), None)
        o, written = rings.attend(qkv)
        o, ring = o[:, None], Ring(*written)
    else:
        q, carry, ring = begin_attention(block, cfg, heads, squares, ring, step, held.chosen)
        read_from = ring if held.other is None else held.other
        assert read_from is not None
        at = step.seen_from(cfg)
        if kind.kernels and flashes_context(cfg, *shape):
            carry = attend_flash(cfg, carry, q, read_from, step.row, at)
        elif kind.span is None:
            carry = attend_ring(cfg, carry, q, read_from, step.row, at)
        else:
            carry = attend_span(cfg, carry, q, read_from, step.row, at, kind.span)
        o, chosen = end_attention(cfg, carry, q, x.dtype), choice(cfg, carry)
    return Attended(o, block.rest_of_layer(o, x) if here else None, ring, chosen)


@partial(jax.jit, static_argnames=("kind",))
def _layer(
    kind: Kind, values: tuple[Array, ...], x: Array, held: Held, step: Step
) -> tuple[Array, Held, State | None]:
    """One layer of a step: x [N, T, D], what it holds, and its states after fewer tokens.

    A program of its own only for the trace's sake: layers that are alike are traced and lowered
    once, and XLA inlines them.
    """
    definition, cfg, total, _, keep, _ = kind
    block, parts = definition.bind(values), []
    ring, _, state, _ = held
    earlier = made = None
    if cfg.role == "memory":
        return x, held._replace(ring=remember(block, cfg, x, ring, step)), None
    if state is not None and cfg.recurrent is not None:
        midway = None
        if cfg.recurrent.summed:
            midway = begin_recurrent(block, x, state, step)
            midway = midway._replace(total=total(midway.total))
        mixed, state, earlier = run_recurrent(block, x, state, step, midway, keep)
        parts.append(mixed)
    if cfg.kv_heads:
        found = _attend(kind, block, x, held, step, here=total is alone and not parts)
        ring, made = found.ring, found.chosen
        if found.x is not None:
            return found.x, Held(ring, None, state, made), earlier
        assert found.o is not None
        parts.append(block.after_attention(found.o, x))
    if parts:
        x, read = block.join_attention(x, total(sum(parts[1:], parts[0])))
    else:
        read = block.enter_mlp(x)
    if cfg.mlp:
        begun, part = block.begin_mlp(read)
        part = None if part is None else total(part)
        x = block.join_mlp(x, total(block.end_mlp(begun, part)))
    return x, Held(ring, None, state, made), earlier


def forward(
    model: LocalModel,
    leaves: Leaves,
    cache: Cache,
    step: Step,
    total: Total,
    span: int | None = None,
    features: Array | None = None,
    keep: bool = False,
    kernels: bool = False,
    encode: bool = False,
) -> tuple[Array, Cache, tuple[State, ...]]:
    """One step over all layers: the hidden states [N, T, D] before the head, the new cache, and
    with `keep` the states after fewer tokens (`run_recurrent`). `encode`: over those of an encoder,
    not the decoder's.

    With a span rows have one token, and attention reads that many slots of a ring at once. Tokens
    of a draft come with features [N, T, D]. `kernels` says that the device has those of attention.
    """
    ends = model.ends.bind(leaves.ends)
    x = total(ends.embed(step.tokens, step.positions, leaves.vocab, features))
    rings: dict[int, Ring] = dict(zip(model.cfg.cached, cache.rings, strict=True))
    states: dict[int, State] = dict(zip(model.cfg.stateful, cache.states, strict=True))
    earlier: list[State] = []
    chosen = None
    owners = model.cfg.owners
    for index in model.cfg.of_step(encode):
        definition, cfg, values = model.blocks[index], model.cfg.layers[index], leaves.layers[index]
        other = rings[owners[index]] if cfg.kv_heads and not cfg.owns_cache else None
        follows = isinstance(cfg.indexer, Follower)
        held = Held(rings.get(index), other, states.get(index), chosen if follows else None)
        kind = Kind(definition, cfg, total, span, keep, kernels)
        x, held, fewer = _layer(kind, values, x, held, step)
        if held.ring is not None:
            rings[index] = held.ring
        if held.state is not None:
            states[index] = held.state
        chosen = chosen if held.chosen is None else held.chosen
        if fewer is not None:
            earlier.append(fewer)
    return x, Cache(tuple(rings.values()), tuple(states.values())), tuple(earlier)


def pure_step(model: LocalModel, ctx: int, ubatch: int) -> Callable[..., tuple[Array, Cache]]:
    """fn(leaves, cache, tokens [B, T], starts [B]) -> (logits [B, T, V], cache), for one device.

    Positions are known only when the program runs: rows that would leave the context, or reach
    across a multiple of `ubatch` (where a ring may end), get logits that are no numbers, as do rows
    with a token outside the vocabulary.
    """

    def step(leaves: Leaves, cache: Cache, tokens: Array, starts: Array) -> tuple[Array, Cache]:
        count = tokens.shape[1]
        if count > ubatch:
            raise OptionError(f"a step of {count} tokens is longer than ubatch {ubatch}; cut it")
        starts = starts.astype(jnp.int32)
        zeros = jnp.zeros_like(starts)
        written = (starts >= 0) & (starts + count <= ctx) & (starts % ubatch + count <= ubatch)
        counts = jnp.where(written, count, 0)
        own = Step(tokens.astype(jnp.int32), zeros[0], starts, zeros, counts, zeros, zeros)
        x, cache, _ = forward(model, leaves, cache, own, alone)
        known = ((tokens >= 0) & (tokens < model.cfg.vocab)).all(axis=1)
        logits = model.ends.bind(leaves.ends).logits(x, leaves.vocab)
        return jnp.where((written & known)[:, None, None], logits, jnp.nan), cache

    return step
