"""Models, links and rooms for tests of residency."""

from dataclasses import replace

from sharding_models import tensors

from sharding import DeviceInfo, LayerShape, Mesh, ModelShape, PlanOptions, make_plan

FAST, SLOW = 24.2, 3.3  # GB/s of two measured cards on unlike slots
ATTENTION = LayerShape(4, 6, 256, 256, 512)
RECURRENT = replace(ATTENTION, kv_heads=0)
DRAFT = replace(ATTENTION, cache_context="draft")
READER = replace(ATTENTION, owns_cache=False)
LATENT = replace(ATTENTION, kv_heads=1, q_per_kv=24, k_dim=576, v_dim=512)
WINDOW = replace(ATTENTION, window=1000)
HOST = PlanOptions(
    kv="host", cache_type_k="f16", cache_type_v="f16", ctx=4096, group_pages=4, itemsize=2
)
TENSOR = replace(HOST, split_mode="tensor")


def links(*rates, free=None):
    free = free or (None,) * len(rates)
    return Mesh(
        tuple(
            DeviceInfo(f"gpu:{i}", "gpu", "gpu", None, n, r)
            for i, (r, n) in enumerate(zip(rates, free, strict=True))
        )
    )


def shape(*layers):
    return ModelShape(layers, 128, 256, "test")


def with_room(model, mesh, options, *rooms):
    """The mesh with free bytes such that each device has so many for pages beside all else; None
    for unknown."""
    bare = replace(options, kv_gpu_layers=None, kv_device_bytes=None)
    nothing = make_plan(model, mesh, bare, tensors(model))
    free = [None if n is None else nothing.needed_bytes(i) + n for i, n in enumerate(rooms)]
    return Mesh(tuple(replace(d, free=n) for d, n in zip(mesh.devices, free, strict=True)))


def plan_of(model, mesh, options, **change):
    # Shares of whole layers follow free memory; here they are not what is tested.
    if options.split_mode == "layer" and options.tensor_split is None:
        change = {"tensor_split": (1,) * len(mesh)} | change
    return make_plan(model, mesh, replace(options, **change), tensors(model))


def kept_layers(plan, device):
    return [i for i, row in enumerate(plan.residency.pages) if row[device]]


def layer_sums(plan):
    return [d.layers for d in plan.residency.devices]


EIGHT = shape(*(ATTENTION,) * 8)
SLICE = 4096 * 4096  # bytes of one layer
