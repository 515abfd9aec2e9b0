"""A model as a search over splits begins: everything on one device, and bytes of its layers by what
they follow when layers are cut."""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import numpy as np

from sharding import sizes
from sharding.cost import CostModel, values_of
from sharding.mesh import Mesh
from sharding.options import PlanOptions
from sharding.plan import make_plan
from sharding.shapes import ModelShape, TensorShape

FOLLOWED = "kv_group", "state_group", "mlp", "shared_mlp"  # axes of layers


class Probe:
    """A plan with everything on one device, whose figures are those of whole layers; `fused` is the
    same as one program with the cache on the device."""

    def __init__(
        self,
        model: ModelShape,
        mesh: Mesh,
        options: PlanOptions,
        tensors: tuple[TensorShape, ...],
    ):
        alone = replace(
            options, split_mode="none", kv="host", kv_device_bytes=None, engine="staged"
        )
        first = Mesh(mesh.devices[:1])
        self.plan = make_plan(model, first, alone, tensors)
        self.fused = make_plan(model, first, replace(alone, kv="device", engine="fused"), tensors)
        self.cost = CostModel(self.plan)
        layers = len(model.layers)
        self.weights = np.zeros(layers)
        # Bytes and values of a layer by what its tensors follow, [2, L], those of experts apart,
        # and of vectors outside the layers. Bytes there: of vocabulary tables, of what goes with
        # their rows, and of rotary frequencies, which go with attention.
        self.parts = {name: np.zeros((2, layers)) for name in (*FOLLOWED, "expert", "whole")}
        self.vocab, self.outside, self.rotary, self.vectors = 0.0, 0.0, 0.0, np.zeros(2)
        # The largest matrix that a step unpacks, of the same kinds.
        self.unpacked = {name: np.zeros(layers) for name in (*FOLLOWED, "whole")}
        self.unpacked_vocab = 0.0
        self._counted: set[str] = set()
        for tensor in tensors:
            self._weigh(tensor)

    def under(self, options: PlanOptions) -> Probe:
        """The same with other cache types, chunks or prefetch."""
        found = copy(self)
        names = ("cache_type_k", "cache_type_v", "ubatch", "prefetch")
        mine = {name: getattr(options, name) for name in names}
        for name in ("plan", "fused"):
            plan = getattr(self, name)
            setattr(found, name, replace(plan, options=replace(plan.options, **mine)))
        found.cost = self.cost.under(found.plan)
        return found

    def _weigh(self, tensor: TensorShape) -> None:
        size = float(tensor.nbytes)
        unpacked = float(sizes.unpacked(tensor, size, self.plan.options.itemsize))
        split = tensor.split_axis
        both = np.array((size, values_of(tensor, self._counted)[1]))
        if tensor.layer is None:
            if split is None:
                rotary = "rope" in tensor.axes
                self.rotary += size * rotary
                self.outside += size * (not rotary)
                self.vectors += both * (len(tensor.shape) == 1)
            else:
                self.vocab += size
                self.unpacked_vocab = max(self.unpacked_vocab, unpacked)
            return
        self.weights[tensor.layer] += size
        follows = "whole" if split is None else split.name
        most = self.unpacked[follows]
        most[tensor.layer] = max(most[tensor.layer], unpacked)
        expert = follows == "mlp" and "expert" in tensor.axes
        self.parts["expert" if expert else follows][:, tensor.layer] += both
