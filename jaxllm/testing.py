"""For tests of mesh configurations: virtual devices, small random models, assertions on plans,
links as slow as one likes.

mesh = virtual_mesh(3)                                   # before JAX has started
llm = random_llm(devices=3, split_mode="tensor", attn_split=(2, 1, 0), kv="host")
assert_partition(llm.plan)
assert_weights_as_planned(llm)
simulate_links(llm, (24.2, 3.3, 1.0))                    # GB/s; then time what it does
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxllm.engine.staged import StagedEngine
from jaxllm.llm import LLM
from jaxllm.models.block import Block
from jaxllm.models.config import LayerConfig, ModelConfig
from jaxllm.models.decoder import DecoderBlock
from jaxllm.models.parts import Rope
from sharding import Mesh, Plan, TensorShape, ensure_devices
from sharding.links import Link


def virtual_mesh(devices: int) -> Mesh:
    """A mesh of that many CPU devices; JAX must not have started with fewer."""
    ensure_devices(devices)
    return Mesh.from_jax(jax.devices("cpu")[:devices])


def small_config(
    layers: int = 2,
    kv_heads: int = 4,
    q_per_kv: int = 2,
    k_dim: int = 64,
    v_dim: int | None = None,
    embed: int = 256,
    mlp: int = 384,
    vocab: int = 128,
    tied: bool = True,
    **layer: Any,
) -> ModelConfig:
    """A model of a few hundred thousand parameters; `layer` sets further fields of its layers."""
    fields: dict[str, Any] = dict(
        kv_heads=kv_heads,
        q_per_kv=q_per_kv,
        k_dim=k_dim,
        v_dim=k_dim if v_dim is None else v_dim,
        mlp=mlp,
        rope=Rope(10000.0, k_dim, "halves"),
        scale=1.0 / math.sqrt(k_dim),
        eps=1e-5,
    )
    one = LayerConfig(**(fields | layer))
    return ModelConfig("random", embed, vocab, (one,) * layers, one.eps, tied, ctx_train=128)


def random_llm(
    cfg: ModelConfig | None = None,
    block: type[Block] = DecoderBlock,
    seed: int = 0,
    **arguments: Any,
) -> LLM:
    """A model of random weights, the same under every plan; `arguments` are those of `LLM`."""
    arguments = {"dtype": "float32", "ctx": 128, "page": 16, "ubatch": 32} | arguments
    return LLM.from_config(cfg or small_config(), block=block, seed=seed, **arguments)


def assert_partition(plan: Plan) -> None:
    """Every element of every split tensor is on exactly one device, and what is replicated is on
    every device that works with it."""
    for tensor in plan.tensors:
        counts = np.zeros([tensor.shape[i] for i in _split_dims(plan, tensor)], int)
        for device in range(len(plan.mesh)):
            if plan.holds(tensor, device):
                index = plan.slices(tensor, device)
                counts[tuple(index[i] for i in _split_dims(plan, tensor))] += 1
        if counts.ndim == 0:
            assert counts >= 1, f"{tensor.name} is on no device"
        else:
            assert (counts == 1).all(), f"{tensor.name} is held {counts.min()} to {counts.max()}"


def _split_dims(plan: Plan, tensor: TensorShape) -> list[int]:
    parts = [plan.parts(name, tensor.layer, 0) for name in tensor.axes]
    return [i for i, part in enumerate(parts) if part is not None]


def assert_weights_as_planned(llm: LLM) -> None:
    """The weights on each device take the bytes that the plan says, and no device holds a slice
    that is not its own."""
    plan = llm.plan
    held = dict.fromkeys(plan.mesh.jax_devices or (), 0)
    for leaf in llm.engine.weights():
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    planned = {d: plan.weight_bytes(i) for i, d in enumerate(held)}
    assert held == planned, f"weights take {held} bytes, planned were {planned}"


class SimulatedLink(Link):
    """A link of `gbps` 1e9 bytes a second that carries one group at a time, in the order in which
    they are sent. Groups are held back until they would have arrived."""

    def __init__(self, device: Any, gbps: float):
        super().__init__(device)
        self.gbps = gbps
        self.idle_from = 0.0  # when the last group will have arrived
        self._due: dict[int, float] = {}

    def send(self, groups: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
        now = time.perf_counter()
        self.idle_from = max(now, self.idle_from)
        sent = super().send(groups)
        self._due = {key: due for key, due in self._due.items() if due > now}
        for there, pages in zip(sent, groups, strict=True):
            self.idle_from += sum(p.nbytes for p in pages) / (self.gbps * 1e9)
            self._due[id(there)] = self.idle_from
        return sent

    def arrived(self, sent: tuple[Any, ...]) -> bool:
        return time.perf_counter() >= self._due.get(id(sent), 0.0)


def simulate_links(llm: LLM, rates: Sequence[float]) -> None:
    """Give each device of a model with a host cache a link of its own rate, in 1e9 bytes a second,
    from the next step on."""
    assert isinstance(llm.engine, StagedEngine), "only the staged engine sends pages"
    for stream, gbps in zip(llm.engine.streams, rates, strict=True):
        stream.link = SimulatedLink(stream.store.device, gbps)
