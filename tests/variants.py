"""Random models of the folder of references with some of their keys and tensors changed, so that
they do what llama.cpp's references leave out.

What they are to give was computed with transformers (`make_variants.py`) and is in
tests/data/variants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

import archs

RESULTS = archs.DATA / "variants"
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Variant:
    """Keys (after the architecture) and tensors that take the place of those of the model `of`;
    tensors whose names begin with one of `without` are left out. Each change has a checksum of its
    values, as specs have."""

    of: str
    sha256: str
    keys: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    tensors: Mapping[str, Shape] = field(default_factory=dict)


SPARSE = {
    "attention.indexer.head_count": ("UINT32", 16),
    "attention.layer_norm_rms_epsilon": ("FLOAT32", 1e-6),
    "expert_weights_norm": ("BOOL", True),
}


def _indexers(*layers: int) -> dict[str, Shape]:
    """Sixteen heads of the indexers of layers: of so many hardly all products are below zero, so
    that no two keys have one score."""
    return {
        f"blk.{i}.indexer.{name}.weight": shape
        for i in layers
        for name, shape in {"attn_q_b": (16 * 64, 512), "proj": (16, 256)}.items()
    }


NEMOTRON = {
    "expert_count": ("UINT32", 8),
    "expert_used_count": ("UINT32", 3),
    "expert_feed_forward_length": ("UINT32", 160),
    "expert_shared_feed_forward_length": ("UINT32", 96),
    "expert_weights_norm": ("BOOL", True),
    "expert_weights_scale": ("FLOAT32", 2.5),
}

NEMOTRON_WITHOUT = (
    "blk.2.ffn_",
    *(f"blk.0.attn_{side}.bias" for side in ("q", "k", "v", "output")),  # unlike transformers
)


def _nemotron_tensors(width: int) -> dict[str, Shape]:
    return {
        "blk.2.ffn_gate_inp.weight": (8, 256),
        "blk.2.exp_probs_b.bias": (8,),
        "blk.2.ffn_up_exps.weight": (8, 160, width),
        "blk.2.ffn_down_exps.weight": (8, width, 160),
        "blk.2.ffn_up_shexp.weight": (96, 256),
        "blk.2.ffn_down_shexp.weight": (256, 96),
    }


VARIANTS = {
    # A context of 24 blocks of keys, of which each query attends to 8.
    "minimax-m3-blocks": Variant(
        "minimax-m3-moe",
        "03b528e0966e13fe572b113d63b18989f88c36d2859944aea2397cd65ab25581",
        {"expert_weights_norm": ("BOOL", True)},
    ),
    "deepseek32-heads": Variant(
        "deepseek32-moe",
        "92bb441e88d1a8230ac2e774b4c8397d47a0646297b801630b11bf40ece742c1",
        SPARSE,
        (),
        _indexers(0, 1, 2, 3),
    ),
    # The second and fourth layer attend to what the ones before them have chosen.
    "glm-dsa-shared": Variant(
        "glm-dsa-moe",
        "22c18683a0b669600cce8c9499a0e1a7353c058dbb395d4b1c3eda7ec34a90d9",
        SPARSE | {"attention.indexer.types": ("ARRAY", "UINT32", [1, 0, 1, 0])},
        ("blk.1.indexer.", "blk.3.indexer."),
        _indexers(0, 2),
    ),
    # A mixture of experts in the place of the MLP, in the width of the model or in their own.
    "nemotron-h-experts": Variant(
        "nemotron_h_moe-dense",
        "ffb09be414155434529b2efabf5465eec834c8d28b2a9a89be25181025c14398",
        NEMOTRON,
        NEMOTRON_WITHOUT,
        _nemotron_tensors(256),
    ),
    "nemotron-h-latent": Variant(
        "nemotron_h_moe-dense",
        "6d690662603cec5a1b5f587877d00ad683bd67a2025d20efde1d553fb8cc3d8e",
        NEMOTRON,
        NEMOTRON_WITHOUT,
        _nemotron_tensors(128)
        | {"blk.2.ffn_latent_down.weight": (128, 256), "blk.2.ffn_latent_up.weight": (256, 128)},
    ),
}


@cache
def spec(name: str) -> dict[str, Any]:
    """The spec of a variant."""
    variant = VARIANTS[name]
    base = archs.read(archs.spec_path(variant.of))
    keys = {f"{base['architecture']}.{key}": value for key, value in variant.keys.items()}
    kept = [entry for entry in base["metadata"] if entry[0] not in keys]
    left = [
        tensor
        for tensor in base["tensors"]
        if tensor["name"] not in variant.tensors and not tensor["name"].startswith(variant.without)
    ]
    new = [_tensor(*item) for item in variant.tensors.items()]
    changed = {"metadata": [*kept, *([k, *v] for k, v in keys.items())], "tensors": [*left, *new]}
    return base | changed | {"name": name, "sha256": variant.sha256}


def _tensor(name: str, shape: Shape) -> dict[str, Any]:
    """A tensor of noise whose products are as large as what they are products of."""
    deviation = 0.1 if len(shape) == 1 else shape[-1] ** -0.5
    fill = {"normal": [[shape[0], 0.0, deviation]]}
    return {"name": name, "shape": list(shape), "type": "F32", "fill": fill}


def reference(name: str) -> dict[str, np.ndarray]:
    """Tokens, logits of some rows of them, and those of further tokens."""
    with np.load(RESULTS / f"{name}.npz") as file:
        return {key: file[key] for key in file.files}
