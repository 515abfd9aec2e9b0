"""Bytes of a plan: exact sums over what is stored and what is sent; see `Plan`'s methods.

Device and layer indexes are those of the plan and are not checked here.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from sharding.rings import (
    full_pages,
    live_pages,
    position_bytes,
    resident_pages,
    ring_positions,
)
from sharding.shapes import Context, LayerShape, TensorShape
from sharding.splits import Ranges

if TYPE_CHECKING:
    from sharding.plan import Plan

LOGIT_ROWS = 64  # places of a prompt whose logits are made at once
EXPERT_ROWS = 32  # tokens that an expert multiplies at a time


def weight_bytes(plan: Plan, device: int) -> int:
    """Of the tensors given to the plan, what the device stores."""
    return sum(each[device] for each in plan.tensor_bytes)


def tensor_bytes(plan: Plan, tensor: TensorShape) -> list[int]:
    """Of one tensor, what each device stores."""
    devices, split = range(len(plan.mesh)), tensor.split_axis
    if split is None:
        whole = tensor.itemsize * prod(tensor.shape)
        return [whole if plan.padded or plan.holds(tensor, device) else 0 for device in devices]
    ranges = plan.ranges(split.name, tensor.layer)
    assert ranges is not None
    dims = list(zip(tensor.axes, tensor.shape, strict=True))
    others = tensor.itemsize * prod(n for name, n in dims if name != split.name)
    packs = [tensor.packs_along(dim) for dim, (name, _) in enumerate(dims) if name == split.name]
    counts = (_count(plan, ranges, device) for device in devices)
    return [others * prod(count // n for n in packs) for count in counts]


def page_bytes(plan: Plan, layer: int, device: int) -> int:
    """Of one page of one slot, the device's own groups of the layer."""
    start, stop = plan.layers[layer].groups[device]
    return (
        (stop - start) * plan.options.page * position_bytes(plan.model.layers[layer], plan.options)
    )


def cache_bytes(plan: Plan, device: int) -> dict[str, int]:
    """Of the device's cache when all slots are full, by place; recurrent states count as cache."""
    options = plan.options
    place = {"device": 0, "host": 0}
    for index, (shape, layer) in enumerate(zip(plan.model.layers, plan.layers, strict=True)):
        state = _count(plan, layer.states, device) * shape.state_bytes
        place[options.recurrent_state] += options.slots * state
        if not shape.owns_cache:
            continue
        position = _count(plan, layer.groups, device) * position_bytes(shape, options)
        ring = ring_positions(plan.engine, options, shape.window, shape.role)
        place["device"] += options.slots * ring * position
        if plan.engine == "staged" and shape.has_pages:
            kept = plan.residency.pages[index][device]
            page = options.slots * options.page * position
            place["device"] += kept * page
            place["host"] += (full_pages(options, shape.window) - kept) * page
    return place


def staging_bytes(plan: Plan, device: int) -> int:
    """Of the groups of pages in flight, at most; each context has its own."""
    contexts: tuple[Context, ...] = "main", "draft"
    return sum(context_staging(plan, device, context) for context in contexts)


def context_staging(plan: Plan, device: int, context: Context) -> int:
    """Of the groups of one context in flight, at most."""
    if plan.options.kv != "host":
        return 0
    streamed = [
        page_bytes(plan, i, device)
        for i, shape in enumerate(plan.model.layers)
        if shape.cache_context == context
        and shape.role != "encoder"
        and _kept(plan, i, device) < full_pages(plan.options, shape.window)
    ]
    largest = max(streamed, default=0)
    return max(1, plan.options.prefetch) * plan.options.group_pages * largest


def link_bytes(plan: Plan, device: int, position: int, memory: int) -> int:
    """Of the pages sent to the device for one query at `position` that attends to the `memory`
    positions of an encoder."""
    if plan.options.kv != "host":
        return 0
    sent = 0
    for i, shape in enumerate(plan.model.layers):
        if shape.role in ("encoder", "memory"):
            continue
        read = memory if shape.role == "cross" else position
        live = live_pages(plan.options, read, shape.window)
        full = full_pages(plan.options, shape.window)
        streamed = len(live) - resident_pages(live, _kept(plan, i, device), full)
        sent += streamed * page_bytes(plan, i, device)
    return sent


def state_bytes(plan: Plan, device: int) -> int:
    """Of recurrent states of all slots in host memory."""
    if plan.options.recurrent_state == "device":
        return 0
    both = zip(plan.model.layers, plan.layers, strict=True)
    own = sum(_count(plan, layer.states, device) * shape.state_bytes for shape, layer in both)
    return plan.options.slots * own


def compute_bytes(plan: Plan, device: int) -> int:
    """Of what a step makes while it runs, at most: what it hands on, and the arrays that live
    together in its widest part.

    Counted are, for the longest chunk or the whole batch: residuals and partials; queries and
    carries that a layer's programs hand on; projections and layouts of queries, keys and values;
    scores of a block, before and after the exponential, and their biases, or a ring as a kernel
    reads it; what queries keep of the keys that they choose; gate, up and their product; a
    mixture's rows by expert and the expert that is multiplied; logits; the largest matrix that is
    unpacked. Not counted are weights that a backend converts (XLA:CPU makes float32 of 16-bit ones)
    and rings that it copies.
    """
    if device not in plan.used_devices:
        return 0
    options = plan.options
    tokens = max(options.ubatch, options.slots)
    residual = tokens * (plan.model.embed + plan.model.beside) * options.itemsize
    start, stop = plan.vocab[device]
    logit = 4 if options.itemsize == 4 else 4 + options.itemsize  # made in the compute type
    largest = max(options.slots, LOGIT_ROWS) * (stop - start) * logit
    kept = 0  # states of a row after each of a draft's tokens but the last
    for index, (shape, layer) in enumerate(zip(plan.model.layers, plan.layers, strict=True)):
        groups, columns, shared = (
            _count(plan, ranges, device) for ranges in (layer.groups, layer.mlp, layer.shared_mlp)
        )
        handed_on, attention, mlp = layer_compute(plan, index, groups, columns, shared)
        states = _count(plan, layer.states, device)
        attention += states_compute(plan, index, states)
        kept += options.spec_draft_n_max * states * shape.state_bytes
        if plan.engine == "staged" and len(layer.devices) == 1:
            mlp += 2 * handed_on  # one program, from this layer's queries to the next one's
        if plan.engine == "fused" and shape.experts:
            mlp += attention  # one program, in which the loops over blocks and experts overlap
        largest = max(largest, attention, mlp)
    drafting = any(shape.cache_context == "draft" for shape in plan.model.layers)
    whole = _residuals(plan) * residual + largest + _unpacked(plan, device)
    return whole + (kept if drafting else 0)


def _unpacked(plan: Plan, device: int) -> int:
    """Of the largest quantised matrix that a step on the device unpacks."""
    itemsize = plan.options.itemsize
    packed = ((t, n) for t, n in zip(plan.tensors, plan.tensor_bytes, strict=True) if t.packs > 1)
    return max((unpacked(t, each[device], itemsize) for t, each in packed), default=0)


def unpacked(tensor: TensorShape, stored: float, itemsize: int) -> int:
    """Of so many stored bytes of a quantised matrix, once its values are unpacked; of a mixture one
    expert. 0 for other tensors."""
    if tensor.packs == 1:
        return 0
    experts = tensor.shape[tensor.axes.index("expert")] if "expert" in tensor.axes else 1
    return int(stored // tensor.itemsize * tensor.packs // experts * itemsize)


def layer_compute(
    plan: Plan, layer: int, groups: int, columns: int, shared: int
) -> tuple[int, int, int]:
    """Of so many groups of a layer, columns of its MLP and columns of an MLP beside a mixture: what
    programs hand on, queries and carry; all that lives in attention; all that lives in the MLP."""
    tokens = max(plan.options.ubatch, plan.options.slots)
    handed_on, attention = _attention(plan, layer, groups, tokens)
    return handed_on, attention, _mlp(plan, plan.model.layers[layer], columns, shared, tokens)


def states_compute(plan: Plan, layer: int, states: int) -> int:
    """Of so many groups of a layer's recurrent state: its step's arrays, and the state twice, for
    it is copied while a step changes it."""
    shape, options = plan.model.layers[layer], plan.options
    tokens = max(options.ubatch, options.slots)
    return states * (tokens * shape.state_work + 2 * options.slots * shape.state_bytes)


def _residuals(plan: Plan) -> int:
    """Arrays of the residual's size: before and after, the norm and the partial made of it; where
    devices exchange by copies also the partials of up to three of them."""
    exchange = plan.engine == "staged" and plan.options.split_mode == "tensor"
    return 4 + (min(3, len(plan.used_devices)) if exchange else 0)


def _attention(plan: Plan, index: int, groups: int, tokens: int) -> tuple[int, int]:
    shape, layer, options = plan.model.layers[index], plan.layers[index], plan.options
    heads = groups * (shape.q_per_kv // layer.replication)
    queries = tokens * heads * shape.k_dim * options.itemsize
    keys_values = tokens * groups * (shape.k_dim + shape.v_dim) * options.itemsize
    carry = tokens * heads * (shape.v_dim + 2) * 4
    staged = plan.engine == "staged"
    # A chunk folds a ring in blocks of its own size (`jaxllm.cache.attention.ring_step`).
    block = options.page if staged else max(128, min(tokens, 512))
    scores = (3 if shape.biased else 2) * tokens * heads * block * 4
    kept, mixed = _choice(shape, groups, heads, block, options.itemsize)
    handed_on = queries + carry + tokens * kept
    decoded = _decoded(plan, index, groups)
    if staged:
        before = 4 * queries + 2 * keys_values + carry + tokens * kept
        own = 2 * queries + 4 * carry
        rows = options.slots * (own // tokens + decoded)  # each of which has one token
        return handed_on, max(before, own + max(scores + tokens * mixed, decoded), rows)
    scores = max(scores, decoded)
    tiles = 2 * carry if tokens > 128 else 0  # those of a chunk's own keys, and put together
    whole = 3 * queries + 2 * keys_values + 3 * carry + tiles + scores + tokens * mixed
    return handed_on, whole


def _decoded(plan: Plan, index: int, groups: int) -> int:
    """Of a row's ring as a kernel is given it, which reads values of 16 bits alone, where the cache
    has them in another size."""
    shape, options = plan.model.layers[index], plan.options
    values = (shape.k_dim + shape.v_dim) * options.itemsize
    stored = position_bytes(shape, options)
    if options.itemsize != 2 or shape.k_only or stored == values:
        return 0
    return groups * ring_positions(plan.engine, options, shape.window, shape.role) * values


def _choice(
    shape: LayerShape, groups: int, heads: int, block: int, itemsize: int
) -> tuple[int, int]:
    """Of one query of a layer that attends to chosen keys or blocks of them: what it keeps of these
    (keys with scores and positions; or attention to each block), and all that lives while a block
    of keys is folded: before, after, and mixed with what is folded."""
    if shape.kept_blocks:
        part = (heads * (shape.v_dim + 2) + groups) * 4
        return shape.kept_blocks * part, (4 * shape.kept_blocks + block // shape.block_keys) * part
    kept = groups * shape.kept_keys * (shape.k_dim * itemsize + 8)
    scored = groups * block * (4 * shape.index_heads + 8) if kept else 0
    return kept, 4 * kept + scored


def _mlp(plan: Plan, shape: LayerShape, columns: int, shared: int, tokens: int) -> int:
    """Of a layer's MLP over so many columns, and those of an MLP beside a mixture."""
    embed, itemsize = plan.model.embed, plan.options.itemsize
    if not shape.experts:
        return 3 * tokens * columns * itemsize
    beside = (3 * tokens * shared + tokens * embed) * itemsize if shape.shared_mlp else 0
    rows, block = tokens * shape.experts_used, min(EXPERT_ROWS, tokens)
    # Rows in the order of experts and back, in and out; then weighted, in float32.
    moved = (2 * (rows + block) + rows) * embed * itemsize + rows * embed * 4
    routing = 3 * tokens * shape.experts * 4 + 8 * rows * 4
    one = 3 * columns * (embed + block) * itemsize
    return moved + routing + one + beside


def _kept(plan: Plan, layer: int, device: int) -> int:
    """Pages a slot that stay of the cache that a layer reads."""
    return plan.residency.pages[plan.model.cache_owner(layer)][device]


def _count(plan: Plan, ranges: Ranges, device: int) -> int:
    """Units that a device stores, padding of the fused engine included."""
    counts = [stop - start for start, stop in ranges]
    return max(counts) if plan.padded else counts[device]
