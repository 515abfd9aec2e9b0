"""Faults to put into the package: each is undone with the patch that it is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm.cache.groups
import sharding.plan
import sharding.residency
import sharding.sizes
from jaxllm.cache.types import CACHE_TYPES
from jaxllm.engine import build, local, staged, stages
from jaxllm.models.layers import QKV
from jaxllm.models.sources import RandomSource, TensorSource
from sharding import Context, Mesh, Plan
from sharding.residency import spend_budget, streaming_all

Patch = pytest.MonkeyPatch


def _change(patch: Patch, owner: Any, name: str, wrong: Callable[..., Any]) -> None:
    """Replace owner.name by a function that is given the right one first."""
    right = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kw: wrong(right, *args, **kw))


# K and V of other groups than the queries'


def _fill_changed(patch: Patch, form: str, wrong: Callable[..., None]) -> None:
    def fill(right: Callable, self: Any, slot: Any, index: Any, out: np.ndarray) -> None:
        right(self, slot, index, out)
        if slot.form == form:
            whole = np.zeros(slot.shape, np.float32)
            right(self, slot, tuple(slice(0, n) for n in slot.shape), whole)
            wrong(self.cfg.layers[slot.layer], whole, index, out)

    right = RandomSource.fill
    patch.setattr(RandomSource, "fill", lambda *args: fill(right, *args))


def mirrored_keys_and_values(patch: Patch) -> None:
    """Every device takes K and V from the first group on; its queries are its own."""

    def wrong(cfg: Any, whole: np.ndarray, index: Any, out: np.ndarray) -> None:
        queries = cfg.q_per_kv * cfg.k_dim
        out[:, queries:] = whole[: len(out), queries:]

    _fill_changed(patch, "qkv", wrong)


def mirrored_cache(patch: Patch) -> None:
    """What a device writes to its cache is in the reverse order of its heads."""

    def wrong(right: Callable, cfg: Any, ring: Any, k: Any, v: Any, *where: Any) -> Any:
        return right(cfg, ring, k[:, :, ::-1], v[:, :, ::-1], *where)

    _change(patch, local, "write_ring", wrong)


# Devices exchanged


def exchanged_weights(patch: Patch) -> None:
    def wrong(right: Callable, plan: Any, whole: Any, own: Any, source: Any, i: int, *to: Any):
        return right(plan, whole, own, source, (1, 0)[i] if len(plan.mesh) == 2 else i, *to)

    _change(patch, build, "load_device", wrong)


def exchanged_queries(patch: Patch) -> None:
    """Of the weights only those before attention."""

    def wrong(cfg: Any, whole: np.ndarray, index: Any, out: np.ndarray) -> None:
        if len(out) < len(whole):
            out[...] = whole[len(out) - index[0].start :][: len(out)]

    _fill_changed(patch, "qkv", wrong)


def exchanged_places(patch: Patch) -> None:
    """The slice of each device is on the other."""

    def wrong(right: Callable, plan: Any, *args: Any) -> Any:
        *given, target, progress = args
        if len(plan.mesh) == 2:
            [target] = set(plan.mesh.jax_devices) - {target}
        return right(plan, *given, target, progress)

    _change(patch, build, "load_device", wrong)


# Boundaries of heads


def overlapping_heads(patch: Patch) -> None:
    def wrong(right: Callable, *args: Any) -> Any:
        (first, *others), vocab = right(*args)
        if len(first.groups) == 2:
            (a, b), second = first.groups
            first = replace(first, groups=((a, b + 1), second))
        return (first, *others), vocab

    _change(patch, sharding.plan, "split_tensor", wrong)


def heads_one_early(patch: Patch) -> None:
    """A device that does not begin with the first group reads its rows one group early."""

    def wrong(right: Callable, self: Any, slot: Any, tensors: Any, groups: slice, out: Any) -> None:
        by = min(groups.start, 1)
        right(self, slot, tensors, slice(groups.start - by, groups.stop - by), out)

    _change(patch, TensorSource, "_fill_qkv", wrong)


def keys_one_row_early(patch: Patch) -> None:
    """Keys begin with the last row of the queries."""

    def call(self: Any, *given: Any) -> Any:
        q, k, v = right(self, *given)
        return q, jnp.concatenate([q[..., -1, -1:], k[..., :-1]], axis=-1), v

    right = QKV.__call__
    patch.setattr(QKV, "__call__", call)


# Values cut by the width of keys


def output_cut_by_key_width(patch: Patch) -> None:
    def wrong(cfg: Any, whole: np.ndarray, index: Any, out: np.ndarray) -> None:
        if out.ndim == 3:
            first = index[1].start * cfg.q_per_kv * cfg.k_dim
            flat = whole.reshape(len(whole), -1)[:, first : first + out[0].size]
            out[...] = flat.reshape(out.shape)

    _fill_changed(patch, "columns", wrong)


def values_cut_by_key_width(patch: Patch) -> None:
    def wrong(cfg: Any, whole: np.ndarray, index: Any, out: np.ndarray) -> None:
        top = (cfg.q_per_kv + 1) * cfg.k_dim
        rows = whole[:, top:].reshape(-1, whole.shape[-1])
        first = index[0].start * cfg.k_dim
        values = rows[first : first + len(out) * cfg.v_dim]
        out[:, top:] = values.reshape(len(out), cfg.v_dim, -1)

    _fill_changed(patch, "qkv", wrong)


def values_counted_by_key_width(patch: Patch) -> None:
    def wrong(right: Callable, layer: Any, options: Any) -> int:
        return right(replace(layer, v_dim=layer.k_dim), options)

    _change(patch, sharding.sizes, "position_bytes", wrong)


# Scales of another head


def _neighbours_scales(stored: Any, axis: int) -> Any:
    """Rows [..., blocks * 34] with the scales of the next head along an axis."""
    blocks = stored.reshape(*stored.shape[:-1], -1, 34)
    scales = jnp.roll(blocks[..., :2], 1, axis)
    return jnp.concatenate([scales, blocks[..., 2:]], axis=-1).reshape(stored.shape)


def scales_of_a_neighbour_when_written(patch: Patch) -> None:
    kind = type(CACHE_TYPES["q8_0"])
    right = kind.encode
    patch.setattr(kind, "encode", lambda self, x: _neighbours_scales(right(self, x), 2))


def scales_of_a_neighbour_in_pages(patch: Patch) -> None:
    def wrong(right: Callable, *args: Any, **kw: Any) -> Any:
        return jax.tree.map(lambda p: _neighbours_scales(p, 1), right(*args, **kw))

    _change(patch, staged, "cut", wrong)


def scales_of_a_neighbour_in_host_memory(patch: Patch) -> None:
    def wrong(right: Callable, values: Any, *where: Any) -> Any:
        def mixed(page: Any) -> Any:
            return np.asarray(_neighbours_scales(jnp.asarray(page), 1))

        return right(jax.tree.map(mixed, values), *where)

    _change(patch, jaxllm.cache.groups, "host_array", wrong)


# A tail that is behind


def newest_not_written(patch: Patch) -> None:
    def wrong(right: Callable, cfg: Any, ring: Any, k: Any, *more: Any) -> Any:
        return ring if k.shape[1] == 1 else right(cfg, ring, k, *more)

    _change(patch, local, "write_ring", wrong)


def newest_not_read(patch: Patch) -> None:
    def wrong(right: Callable, *args: Any) -> Any:
        *given, positions, floor, page = args
        return right(*given, positions - (positions.shape[1] == 1), floor, page)

    _change(patch, stages, "attend_tail", wrong)


def page_cut_too_early(patch: Patch) -> None:
    """The last position of a page is that before it."""

    def wrong(right: Callable, *args: Any, **kw: Any) -> Any:
        return jax.tree.map(lambda p: p.at[:, :, -1].set(p[:, :, -2]), right(*args, **kw))

    _change(patch, staged, "cut", wrong)


# Residency


def _resident_by(patch: Patch, other: Callable[[Plan], Plan]) -> None:
    """The engine asks a plan whose budget has been spent once more."""

    @cache
    def again(plan: Plan) -> Plan:
        fresh = other(plan)
        fresh = replace(fresh, residency=streaming_all(fresh))
        return replace(fresh, residency=spend_budget(fresh)[0])

    right = Plan.resident
    patch.setattr(Plan, "resident", lambda self, *page: right(again(self), *page))


def budget_spent_twice(patch: Patch) -> None:
    def other(plan: Plan) -> Plan:
        layers = 2 * (plan.options.kv_gpu_layers or 0)
        return replace(plan, options=replace(plan.options, kv_gpu_layers=layers))

    _resident_by(patch, other)


def room_taken_twice(patch: Patch) -> None:
    """The second time, what the first has kept counts as taken."""

    def other(plan: Plan) -> Plan:
        pairs = zip(plan.mesh.devices, plan.residency.devices, strict=True)
        infos = [replace(d, free=(d.free or 0) - kept.bytes) for d, kept in pairs]
        return replace(plan, mesh=Mesh(tuple(infos)))

    _resident_by(patch, other)


def drafts_not_counted(patch: Patch) -> None:
    """A draft layer is left out where bytes of caches are added up."""

    def wrong(right: Callable, layer: Any, options: Any) -> int:
        return 0 if layer.cache_context == "draft" else right(layer, options)

    _change(patch, sharding.sizes, "position_bytes", wrong)


def drafts_counted_with_the_rest(patch: Patch) -> None:
    """The budget sees a draft layer as one of the main model's."""

    def wrong(right: Callable, plan: Plan, context: Context) -> Any:
        main = tuple(replace(s, cache_context="main") for s in plan.model.layers)
        return right(replace(plan, model=replace(plan.model, layers=main)), context)

    _change(patch, sharding.residency, "_slices", wrong)
