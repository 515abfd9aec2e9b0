"""How an architecture routes tokens to experts, and the reading of a layer's mixture."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from jaxllm.errors import ModelError
from jaxllm.gguf.metadata import Metadata
from jaxllm.gguf.reader import TensorInfo
from jaxllm.models.config import LayerConfig
from jaxllm.models.parts import Experts

Tensors = Mapping[str, TensorInfo]
Scores = Literal["softmax", "sigmoid", "chosen"]
GATING: dict[int, Scores] = {1: "softmax", 2: "sigmoid", 3: "chosen"}  # expert_gating_func


@dataclass(frozen=True)
class Routing:
    """What an architecture fixes of `Experts`. Where `scores_key` is set the file's
    expert_gating_func comes before `scores`; where `normalised` is None its expert_weights_norm
    says, and no is its default."""

    scores: Scores = "softmax"
    scores_key: bool = False
    normalised: bool | None = True
    weigh_input: bool = False
    shared: str = "_shexp"  # ends the names of the tensors of an MLP beside the mixture
    blend: float = 1.0  # of the sum with it
    reads: Literal["mlp", "norm", "route"] = "mlp"


def read_experts(
    meta: Metadata, tensors: Tensors, layer: int, routing: Routing | None
) -> dict[str, Any]:
    """The fields of a layer that has a router; none of a dense layer."""
    prefix = f"blk.{layer}."
    if f"{prefix}ffn_gate_inp.weight" not in tensors:
        return {}
    count, used = int(meta.get("expert_count", 0)), int(meta.get("expert_used_count", 0))
    if routing is None:
        raise ModelError(
            f"{meta.architecture} with {count} experts is not supported; "
            "use a dense model of this architecture"
        )
    if not 0 < used <= count:
        raise ModelError(f"expert_used_count is {used}; it must be between 1 and {count} experts")
    groups, groups_used = _groups(meta, count, used)
    shared = columns_of(tensors, f"{prefix}ffn_down{routing.shared}.weight", 0)
    experts = Experts(
        count,
        used,
        scores=_scores(meta, routing),
        normalised=(
            bool(meta.get("expert_weights_norm", False))
            if routing.normalised is None
            else routing.normalised
        ),
        scale=float(meta.get("expert_weights_scale", 0.0)) or 1.0,
        weigh_input=routing.weigh_input,
        groups=groups,
        groups_used=groups_used,
        choice_bias=next(
            (n for n in ("exp_probs_b.bias", "exp_probs_b") if prefix + n in tensors), None
        ),
        router_bias=f"{prefix}ffn_gate_inp.bias" in tensors,
        biases=f"{prefix}ffn_down_exps.bias" in tensors,
        down_scale=f"{prefix}ffn_down_exps.scale" in tensors,
        joined=f"{prefix}ffn_gate_up_exps.weight" in tensors,
        shared=shared,
        shared_suffix=routing.shared,
        shared_gate=f"{prefix}ffn_gate_inp_shexp.weight" in tensors,
        blend=routing.blend if shared else 1.0,
        reads=routing.reads,
        **_narrow(tensors, prefix),
    )
    return {"experts": experts, "mlp": columns_of(tensors, f"{prefix}ffn_down_exps.weight")}


def _narrow(tensors: Tensors, prefix: str) -> dict[str, Any]:
    """The projections around experts that work in a width of their own, where there are any."""
    for name in ("ffn_latent", "ffn_routed"):
        down = tensors.get(f"{prefix}{name}_down.weight")
        if down is not None:
            norm = f"{prefix}{name}_norm.weight" in tensors
            return dict(narrow=down.shape[0], narrow_name=name, narrow_norm=norm)
    return {}


def without_experts(
    layers: Sequence[LayerConfig], which: Sequence[int]
) -> tuple[list[LayerConfig], tuple[str, ...]]:
    """The layers, those at `which` without their experts, and the names of tensors that are of no
    use then: llama.cpp looks for a single MLP there, and where it finds none computes with the
    activation alone."""
    if which:
        warnings.warn(
            f"experts of layers {', '.join(map(str, which))} are where the architecture has none; "
            "they are left out, as in llama.cpp",
            stacklevel=2,
        )
    changed = [
        replace(layer, experts=None, mlp=0, mlp_bare=True) if i in which else layer
        for i, layer in enumerate(layers)
    ]
    parts = ("gate_inp", "gate_exps", "up_exps", "down_exps", "gate_up_exps")
    parts = (*parts, "gate_shexp", "up_shexp", "down_shexp")
    names = (*(f"ffn_{part}.weight" for part in parts), "exp_probs_b.bias")
    return changed, tuple(f"blk.{i}.{name}" for i in which for name in names)


def columns_of(tensors: Tensors, name: str, default: int | None = None) -> int:
    """What the down tensor of that name reads: the columns of its MLP."""
    if name in tensors:
        return tensors[name].shape[-1]
    if default is None:
        raise ModelError(f"{name} is missing; the layer has a router and no experts")
    return default


def _scores(meta: Metadata, routing: Routing) -> Scores:
    kind = int(meta.get("expert_gating_func", 0)) if routing.scores_key else 0
    if kind and kind not in GATING:
        raise ModelError(
            f"{meta.architecture}.expert_gating_func is {kind}; supported are "
            f"{', '.join(f'{n} ({name})' for n, name in GATING.items())}"
        )
    return GATING[kind] if kind else routing.scores


def _groups(meta: Metadata, count: int, used: int) -> tuple[int, int]:
    groups = int(meta.get("expert_group_count", 0)) or 1
    kept = int(meta.get("expert_group_used_count", 0)) or groups
    if groups < 1 or count % groups or not 0 < kept <= groups or kept * (count // groups) < used:
        raise ModelError(
            f"{count} experts in {groups} groups of which {kept} are used do not give {used} "
            "experts; convert the model again"
        )
    return groups, kept
