"""Named logical axes: what each dimension of a tensor means and which share splits it.

A tensor names one axis a dimension. An axis follows the attention share, the weight share, or none:
the last is a declaration that every device which needs the tensor holds the whole dimension. A name
that is not declared here is an error when a plan is made, never a silent replication.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from sharding.errors import PlanError


@dataclass(frozen=True)
class Axis:
    """One logical axis: its name, the share it follows and what one index of it is."""

    name: str
    follows: Literal["attn", "weight", "none"]
    meaning: str

    @property
    def split(self) -> bool:
        """Whether the axis is cut over devices at all."""
        return self.follows != "none"


_DECLARED = (
    Axis("kv_group", "attn", "one KV head with the query heads that read it"),
    Axis("state_group", "attn", "one head of a recurrent layer that has a state of its own"),
    Axis("mlp", "weight", "one hidden column of the MLP"),
    Axis("shared_mlp", "weight", "one hidden column of the MLP beside a mixture of experts"),
    Axis("vocab", "weight", "one row of the embedding or output table"),
    Axis("embed", "none", "one channel of the residual stream"),
    Axis("head_rows", "none", "one row of the projections that belong to a KV group"),
    Axis("head_dim", "none", "one channel of a head"),
    Axis("latent", "none", "one channel of a vector that all heads share"),
    Axis("expert", "none", "one MLP of a mixture, every device holding its own columns of it"),
    Axis("stream", "none", "one of several residual streams"),
    Axis("pair", "none", "which of the tensors joined into one (gate and up, for example)"),
    Axis("tap", "none", "one token that a short convolution sees"),
    Axis("rope", "none", "one rotary frequency"),
    Axis("position", "none", "one learned position"),
    Axis("distance", "none", "a range of distances between query and key"),
)

AXES: Mapping[str, Axis] = MappingProxyType({a.name: a for a in _DECLARED})


def axis(name: str) -> Axis:
    """Return the declared axis `name`; raise `PlanError` when nobody declared it."""
    try:
        return AXES[name]
    except (KeyError, TypeError):
        raise PlanError(
            f"axis {name!r} is not declared: use one of {', '.join(AXES)}, or declare in"
            " sharding/axes.py which share it follows."
        ) from None
