"""Bytes of compute that plans count against what the compiler says of the programs that ran."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from jaxllm.engine import fused, staged, staged_step
from jaxllm.engine.prefill import LOGIT_PLACES
from jaxllm.engine.stages import StageIn
from jaxllm.models.experts import BLOCK_ROWS
from jaxllm.models.parts import BlockIndexer, Experts, Indexer, Latent, Relative, Rope
from jaxllm.testing import random_llm, small_config
from sharding import sizes

CTX, MIB = 1024, 1 << 20
# Buffers are laid out before LLVM's passes, which take almost half of the time.
UNOPTIMISED = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
NEAR = Relative("attn_rel_b.weight", 32, both_ways=False, furthest=128)
TURNED = Rope(10000.0, 16, "neighbours")
CHOSEN = Indexer(heads=8, dim=32, top_k=256, rope=TURNED, bias=True)
LATENT: dict[str, Any] = dict(
    kv_heads=1, q_per_kv=8, v_dim=64, rope=TURNED, latent=Latent(q_rank=24, nope=16, v_dim=16)
)
SHAPES: dict[str, dict[str, Any]] = {
    "plain": dict(),
    "wide MLP": dict(mlp=16384, k_dim=32),
    "wide residual": dict(embed=4096, mlp=4096, k_dim=32),
    "many heads": dict(kv_heads=16, q_per_kv=4, k_dim=64),
    "one KV head": dict(kv_heads=1, q_per_kv=32, k_dim=128),
    "values wider than keys": dict(kv_heads=8, k_dim=32, v_dim=128),
    "big vocabulary": dict(vocab=100_000, embed=64, k_dim=16),
    "experts": dict(experts=Experts(8, 2), mlp=512, embed=512, k_dim=16),
    "many experts": dict(experts=Experts(32, 6), mlp=1024, embed=256, k_dim=16),
    "chosen keys": dict(k_dim=80 + CHOSEN.dim, indexer=CHOSEN, **LATENT),
    "biased scores": dict(kv_heads=16, q_per_kv=1, k_dim=16, mlp=64, embed=64, relative=NEAR),
    "chosen blocks": dict(indexer=BlockIndexer(32, size=16, top=16, local=1, rope=None)),
}
CUTS: dict[str, dict[str, Any]] = {
    "fused": dict(devices=1),
    "staged": dict(devices=1, kv="host"),
    "padded": dict(devices=2, split_mode="tensor", engine="fused"),
    "tensor": dict(devices=3, split_mode="tensor", kv="host", attn_split="2,1,1"),
    "layer": dict(devices=2, split_mode="layer"),
}
# Rings that XLA:CPU copies are not counted, and it copies those of a padded slice in a chunk of one
# row: with a long chunk the rest is larger.
CASES = [
    pytest.param(shape, cut, ubatch, rows, marks=pytest.mark.xdist_group(f"compute-{cut}"))
    for cut in CUTS
    for shape in (SHAPES if CUTS[cut]["devices"] == 1 else ("many heads",))
    for ubatch, rows in ((512, 1), (64, 4))
    if rows == 1 or (shape == "plain" and cut == "staged")
]


def _made(args: tuple[Any, ...]) -> list[jax.Array]:
    """The arguments that the step itself has made: residual, partials, queries and their carry."""
    match args[0]:
        case (StageIn() as first, *_):
            return jax.tree.leaves((first.x, first.parts, first.queries))
    return []


class Measured:
    """Bytes of the largest program a device: what it is given by the step, its temporaries, and its
    results but those in the place of arguments."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.bytes: dict[Any, int] = {}
        self.programs: dict[Any, Any] = {}
        self.patch = patch
        for name in ("run_stages", "attend", "embed"):
            self._watch(staged_step, name)
        for name in ("head", "cut"):
            self._watch(staged, name)
        for name in ("whole_step", "head"):
            self._watch(fused, name)

    def _watch(self, module: Any, name: str) -> None:
        right = getattr(module, name)

        def call(*args: Any, **kw: Any) -> Any:
            leaves = jax.tree.leaves(args)
            key = name, *(str((x.shape, x.dtype, getattr(x, "sharding", None))) for x in leaves)
            key = (*key, jax.tree.structure(args), *kw.values())
            if key not in self.programs:
                self.programs[key] = right.lower(*args, **kw).compile(UNOPTIMISED)
            program = self.programs[key]
            own = program.memory_analysis()
            size = own.temp_size_in_bytes + own.output_size_in_bytes - own.alias_size_in_bytes
            given = _made(args)
            if name == "attend":  # carry and queries
                given = jax.tree.leaves(args[:2])
            if name == "head":
                given = [args[2]]
            size += sum(x.addressable_shards[0].data.nbytes for x in given)
            for device in next(x for x in jax.tree.leaves(args) if hasattr(x, "devices")).devices():
                self.bytes[device] = max(self.bytes.get(device, 0), size)
            return program(*args)  # what is given by keyword is static

        self.patch.setattr(module, name, call)


def test_plans_count_the_rows_that_programs_take():
    assert (sizes.LOGIT_ROWS, sizes.EXPERT_ROWS) == (LOGIT_PLACES, BLOCK_ROWS)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "cut", "ubatch", "rows"), CASES)
def test_compute_is_bounded_by_the_plan(
    shape: str, cut: str, ubatch: int, rows: int, monkeypatch: pytest.MonkeyPatch
):
    """Above 4 MiB also not by more than twice as much."""
    measured = Measured(monkeypatch)
    arguments = dict(ctx=CTX, ubatch=ubatch, page=64, parallel=rows, group_pages=4)
    llm = random_llm(small_config(**SHAPES[shape]), **arguments, **CUTS[cut])
    engine = llm.engine
    for at in (0, ubatch):
        hidden = engine.forward(np.zeros((1, ubatch), np.int32), 0, np.asarray([at]))
        engine.settle(0, np.asarray([at + ubatch]))
        engine.logits(hidden, np.zeros((1, 64), np.int32), 0)
    starts = np.asarray([2 * ubatch - 1] + [0] * (rows - 1))
    hidden = engine.forward(np.zeros((rows, 1), np.int32), 0, starts)
    engine.logits(hidden, np.zeros((rows, 1), np.int32), 0)
    for index, device in enumerate(llm.plan.mesh.jax_devices or ()):
        need, planned = measured.bytes.get(device, 0), llm.plan.compute_bytes(index)
        told = f"{device}: {need / MIB:.2f} MiB, planned {planned / MIB:.2f}"
        assert need <= planned, told
        assert planned <= max(2 * need, 4 * MIB), told
