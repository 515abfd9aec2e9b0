"""Devices, shares, plans and bytes: how a model is cut over unlike devices.

A `Plan` says, for every tensor, KV group and cache page, which device holds it and in which memory.
It is made from sizes alone: this package never imports a model, and making a plan needs no device
and no jax.

    shares.py     reading and apportioning shares     llama_cpp.py  llama.cpp's rounding
    axes.py       named axes and what splits them     mesh.py       the devices
    shapes.py     sizes of models and tensors         options.py    what may be asked
    splits.py     the cuts                            rings.py      positions of cache kept
    cache_types.py  bytes of a cached row             plan.py       the plan
    sizes.py      its bytes                           residency.py  which pages stay
    report.py     the plan as text                    residency_notes.py  what is told of it
    links.py      measured link rates
    exchange.py   partials to sums, by copies         units.py      bytes as text
    fabric.py     wires between devices               machine.py    a machine from a file
    cost.py       the time of a step                  fit.py        the fastest plan that fits
    fit_search.py, fit_kinds.py, fit_ties.py      its search, and the choice between equals
    fit_layers.py, fit_tensor.py, fit_boxes.py, fit_distribute.py  the fastest cuts
    fit_tables.py, fit_probe.py, fit_units.py     layers by kinds, and how units are rounded
    fit_terms.py, fit_exchanges.py                their seconds
    fit_memory.py, fit_cache.py, fit_report.py    their bytes, and its report
"""

from sharding.axes import AXES, Axis, axis
from sharding.cache_types import CACHE_BLOCKS, is_quantised, rotates, row_bytes
from sharding.cost import CostModel, StepTime, calibrated
from sharding.errors import DoesNotFit, FitError, PlanError, ShardingError, ShareError
from sharding.exchange import exchange
from sharding.fabric import Fabric
from sharding.llama_cpp import (
    attention_granularity,
    llama_cpp_cut,
    llama_cpp_heads,
    mlp_granularity,
)
from sharding.mesh import DeviceInfo, Mesh, backend_started, ensure_devices
from sharding.options import PlanOptions
from sharding.plan import Plan, make_plan
from sharding.residency import Kept, Residency
from sharding.rings import (
    full_pages,
    pages_left,
    pages_read,
    position_bytes,
    ring_positions,
)
from sharding.shapes import Context, LayerShape, ModelShape, Role, TensorShape
from sharding.shares import apportion, apportion_blocks, apportion_dithered, parse_shares
from sharding.splits import LayerPlan, replications
from sharding.units import BYTES_HELP, format_bytes, parse_bytes

__all__ = [
    "AXES",
    "BYTES_HELP",
    "CACHE_BLOCKS",
    "Axis",
    "Context",
    "CostModel",
    "DeviceInfo",
    "DoesNotFit",
    "Fabric",
    "FitError",
    "Kept",
    "LayerPlan",
    "LayerShape",
    "Mesh",
    "ModelShape",
    "Plan",
    "PlanError",
    "PlanOptions",
    "Residency",
    "Role",
    "ShardingError",
    "ShareError",
    "StepTime",
    "TensorShape",
    "apportion",
    "apportion_blocks",
    "apportion_dithered",
    "attention_granularity",
    "axis",
    "backend_started",
    "calibrated",
    "ensure_devices",
    "exchange",
    "format_bytes",
    "full_pages",
    "is_quantised",
    "llama_cpp_cut",
    "llama_cpp_heads",
    "make_plan",
    "mlp_granularity",
    "pages_left",
    "pages_read",
    "parse_bytes",
    "parse_shares",
    "position_bytes",
    "replications",
    "ring_positions",
    "rotates",
    "row_bytes",
]
