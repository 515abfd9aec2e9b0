"""The table of docs/scaling.md: a 32B model on 1 to 1,024 devices, by the cost model.

python docs/scaling_table.py
"""

from __future__ import annotations

import signal

from sharding import CostModel, LayerShape, ModelShape, Plan, PlanOptions, TensorShape, make_plan
from sharding.machine import machine
from sharding.mesh import Mesh

CTX, WIDEST = 8192, 1024
DEVICE = {"memory_gib": 141, "free_gib": 134, "read_gbps": 3500, "tflops": 600, "link_gbps": 53}
EXCHANGE = {
    "latency_us": 6,
    "gbps": 370,
    "devices_per_host": 8,
    "between_latency_us": 15,
    "between_gbps": 50,
}


def mesh(devices: int) -> Mesh:
    """Hosts of eight devices each."""
    device = {"name": "141 GB", "count": devices, **DEVICE}
    return machine({"device": [device], "exchange": EXCHANGE, "host": {"dispatch_us": 40}})


def model() -> ModelShape:
    """Qwen3 32B's sizes."""
    embed, heads, groups, dim, mlp, vocab = 5120, 64, 8, 128, 25600, 151936
    layer = LayerShape(groups, heads // groups, dim, dim, mlp)
    return ModelShape((layer,) * 64, vocab, embed, "32B")


def tensors(shape: ModelShape, replication: int) -> list[TensorShape]:
    """Its weights in bfloat16, KV heads stored so many times."""
    found, embed = [], shape.embed
    for i, layer in enumerate(shape.layers):
        groups, per = layer.kv_heads * replication, layer.q_per_kv // replication
        rows = (per + 2) * layer.k_dim
        for name, size, axes in (
            ("qkv", (groups, rows, embed), ("kv_group", "head_rows", "embed")),
            ("out", (embed, groups, per * layer.v_dim), ("embed", "kv_group", "head_rows")),
            ("gate_up", (2, layer.mlp, embed), ("pair", "mlp", "embed")),
            ("down", (embed, layer.mlp), ("embed", "mlp")),
        ):
            found.append(TensorShape(f"blk.{i}.{name}", size, axes, i, 2))
    for name in ("token_embd", "output"):
        found.append(TensorShape(name, (shape.vocab, embed), ("vocab", "embed"), None, 2))
    return found


def plan(devices: int, slots: int) -> Plan:
    """Every layer over all devices as one program, KV heads stored as often as gives each some."""
    shape = model()
    replication = min(8, max(1, devices // 8))
    options = PlanOptions(
        split_mode="tensor" if devices > 1 else "none",
        engine="fused",
        kv_replicate=replication > 1,
        cache_type_k="bf16",
        cache_type_v="bf16",
        ctx=CTX,
        slots=slots,
        itemsize=2,
    )
    return make_plan(shape, mesh(devices), options, tensors(shape, replication))


def rate(devices: int, slots: int) -> tuple[float, float] | None:
    """Tokens a second of all slots at half the context, and the exchanges' part of a step; None
    where it does not fit."""
    made = plan(devices, slots)
    if made.needed_bytes(0) > (made.mesh.devices[0].free or 0):
        return None
    step = CostModel(made).decode(CTX // 2)
    return slots / step.overlapped, step.exchange / step.overlapped


def most(width: int) -> int:
    """The most slots, a power of two, that fit when a copy of the model is so many devices wide."""
    slots = 1
    while slots < 1024 and rate(width, 2 * slots) is not None:
        slots *= 2
    return slots


def main() -> None:
    """Print the table."""
    print(
        "| devices | one sequence, t/s | of it exchange | best copies x width | all devices, t/s |"
    )
    print("|---|---|---|---|---|")
    widths = {}
    width = 1
    while width <= 16:
        slots = most(width)
        found = rate(width, slots)
        assert found is not None
        widths[width] = found[0], slots
        width *= 2
    devices = 1
    while devices <= WIDEST:
        one = rate(devices, 1)
        assert one is not None
        fitting = [w for w in widths if w <= devices]
        best = max(fitting, key=lambda w: widths[w][0] / w)
        copies = devices // best
        total = copies * widths[best][0]
        print(
            f"| {devices} | {one[0]:.0f} | {100 * one[1]:.0f} % | {copies} x {best},"
            f" {widths[best][1]} sequences each | {total:.0f} |"
        )
        devices *= 2


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader that goes away ends it quietly
    main()
