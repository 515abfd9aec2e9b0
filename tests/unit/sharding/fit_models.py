"""Models whose layers are not alike, small ones and some of well-known shapes; and parts of
units."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from sharding_models import tensors

from sharding import LayerShape, ModelShape, TensorShape

Model = tuple[ModelShape, list[TensorShape]]
GROUPS, BLOCKS, ROWS = 4, 5, 4
PLAIN = LayerShape(GROUPS, 2, 64, 64, BLOCKS * 32)
WINDOW = replace(PLAIN, window=128)
WIDE = replace(PLAIN, kv_heads=2, q_per_kv=4, k_dim=128, v_dim=128)
THREE = replace(PLAIN, kv_heads=3)
NARROW = replace(PLAIN, kv_heads=1, q_per_kv=64, mlp=32)
RECURRENT = replace(PLAIN, kv_heads=0, states=8, state_bytes=1 << 15, state_work=1 << 10)
UNEVEN = replace(RECURRENT, states=6)
MANY = replace(RECURRENT, states=96, state_bytes=1 << 12)
MIXTURE = replace(PLAIN, mlp=2 * 32, experts=8, experts_used=2)
BESIDE = replace(MIXTURE, shared_mlp=3 * 32)
AS_WIDE = replace(MIXTURE, shared_mlp=PLAIN.mlp)
FEW = replace(MIXTURE, kv_heads=1, q_per_kv=8, mlp=32)
THICK = replace(PLAIN, mlp=6 * 32)
THIRDS = replace(MIXTURE, mlp=4 * 32)
SMALL = {
    "windows": (WINDOW, WINDOW, WINDOW, PLAIN),
    "heads": (WIDE, WINDOW, THREE, PLAIN),
    "layers of one unit": (PLAIN, NARROW, NARROW, PLAIN),
    "dense, then mixtures": (PLAIN, MIXTURE, MIXTURE, MIXTURE),
    "dense, then mixtures with an MLP beside": (PLAIN, BESIDE, BESIDE, BESIDE),
    "dense, then mixtures with one as wide beside": (PLAIN, AS_WIDE, AS_WIDE, AS_WIDE),
    "dense, then mixtures of two thirds": (THICK, THIRDS, THIRDS, THIRDS),
    "mixtures on one device alone": (PLAIN, FEW, FEW, PLAIN),
    "hybrid": (UNEVEN, UNEVEN, RECURRENT, PLAIN),
    "no MLPs": (replace(RECURRENT, mlp=0), replace(PLAIN, mlp=0)),
    "many states": (MANY, MANY, MANY, PLAIN),
    "parts in layers of their own": (
        replace(PLAIN, mlp=0),
        replace(PLAIN, kv_heads=0),
        replace(RECURRENT, mlp=0),
        replace(PLAIN, kv_heads=0),
    ),
    "four kinds": (WINDOW, replace(WIDE, mlp=3 * 32), MIXTURE, RECURRENT),
}


def small(name: str) -> Model:
    """One of `SMALL`."""
    layers = SMALL[name]
    vocab = max(layer.mlp for layer in layers) * 2 or ROWS
    shape = ModelShape(layers, vocab, 256, name)
    return shape, tensors_of(shape, 4)


def gemma3(layers: int = 64) -> Model:
    """Sizes of a model of 27B whose layers have windows, five of six."""
    full = LayerShape(16, 2, 128, 128, 21504)
    window = replace(full, window=1024)
    return _large((window, window, window, window, window, full), layers, 262208, 5376)


def gemma4(layers: int = 64) -> Model:
    """Sizes of a model of 31B in which layers without a window, one of six, have fewer, wider
    heads."""
    full = LayerShape(4, 8, 512, 512, 21504)
    window = LayerShape(16, 2, 256, 256, 21504, window=1024)
    return _large((window, window, window, window, window, full), layers, 262144, 5376)


def three_counts(layers: int = 64) -> Model:
    """Layers of 16, 8 and 4 heads by turns, the last without a window."""
    some = LayerShape(16, 2, 128, 128, 14336, window=1024)
    full = LayerShape(4, 8, 256, 256, 14336)
    return _large((some, replace(some, kv_heads=8, q_per_kv=4), full), layers, 128256, 4096)


def jamba(layers: int = 64) -> Model:
    """Sizes of a small hybrid, three recurrent layers of four, with 64 groups of states beside 8
    heads."""
    full = LayerShape(8, 4, 128, 128, 14336)
    recurrent = replace(full, kv_heads=0, states=64, state_bytes=1 << 18, state_work=1 << 14)
    return _large((recurrent, recurrent, recurrent, full), layers, 65536, 4096)


def qwen3_next(layers: int = 64) -> Model:
    """Recurrent layers, three of four, and mixtures with an MLP beside; fewer experts than 512."""
    sizes = dict(experts=128, experts_used=10, shared_mlp=512)
    full = LayerShape(2, 8, 256, 256, 512, gated_q=True, **sizes)  # type: ignore[arg-type]
    states = dict(states=16, state_bytes=2 * 128 * 128 * 4, state_work=4 * 128 * 10)
    recurrent = replace(full, kv_heads=0, **states)
    return _large((recurrent, recurrent, recurrent, full), layers, 151936, 2048)


def deepseek(layers: int = 64) -> Model:
    """Three dense layers, then mixtures with an MLP beside, over one latent head."""
    dense = LayerShape(1, 16, 576, 512, 10944, k_only=True)
    mixture = replace(dense, mlp=1408, experts=64, experts_used=6, shared_mlp=2816)
    return _large((dense,) * 3 + (mixture,) * (layers - 3), layers, 102400, 2048)


def glm(layers: int = 64) -> Model:
    """A dense layer, then mixtures with an MLP beside, over eight heads."""
    dense = LayerShape(8, 12, 128, 128, 10944)
    mixture = replace(dense, mlp=1408, experts=32, experts_used=8, shared_mlp=1408)
    return _large((dense,) + (mixture,) * (layers - 1), layers, 151552, 4096)


def maverick(layers: int = 64) -> Model:
    """Dense layers and mixtures with an MLP beside by turns, half as wide."""
    dense = LayerShape(8, 5, 128, 128, 16384)
    mixture = replace(dense, mlp=8192, experts=4, experts_used=1, shared_mlp=8192)
    return _large((dense, mixture), layers, 202048, 5120)


def _large(kinds: tuple[LayerShape, ...], layers: int, vocab: int, embed: int) -> Model:
    shape = ModelShape(tuple(kinds[i % len(kinds)] for i in range(layers)), vocab, embed)
    return shape, tensors_of(shape, 2)


def parts(total: int, devices: int) -> Iterator[tuple[int, ...]]:
    """All ways to give out whole units."""
    if devices == 1:
        yield (total,)
        return
    for n in range(total + 1):
        for rest in parts(total - n, devices - 1):
            yield (n, *rest)


def tensors_of(shape: ModelShape, itemsize: int) -> list[TensorShape]:
    """Those of every layer that has their part; of mixtures and recurrent layers with their own."""
    found: list[TensorShape] = []
    for tensor in tensors(shape):
        layer = None if tensor.layer is None else shape.layers[tensor.layer]
        sizes = dict(zip(tensor.axes, tensor.shape, strict=True))
        if layer is not None and "mlp" in sizes and layer.experts:
            sizes = {"expert": layer.experts} | sizes
        if layer is not None and "kv_group" in sizes and layer.states:
            own = {"kv_group": ("state_group", layer.states), "head_rows": ("head_rows", 64)}
            sizes = dict(own.get(axis, (axis, n)) for axis, n in sizes.items())
        if all(sizes.values()):
            axes, dims = tuple(sizes), tuple(sizes.values())
            found.append(replace(tensor, axes=axes, shape=dims, itemsize=itemsize))
    for i, layer in enumerate(shape.layers):
        embed, beside = shape.embed, layer.shared_mlp
        if layer.experts:
            axes = "expert", "embed"
            found.append(TensorShape(f"blk.{i}.router", (layer.experts, embed), axes, i, itemsize))
        for name, dims, axes in (
            ("beside_up", (2, beside, embed), ("pair", "shared_mlp", "embed")),
            ("beside_down", (embed, beside), ("embed", "shared_mlp")),
        ):
            if beside:
                found.append(TensorShape(f"blk.{i}.{name}", dims, axes, i, itemsize))
    return found
