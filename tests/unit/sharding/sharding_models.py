"""Models and their tensors for tests of plans."""

from sharding import LayerShape, ModelShape, TensorShape


def model(layers: int = 2, kv: int = 4, group: int = 2, dim: int = 64, **kw) -> ModelShape:
    vocab = kw.pop("vocab", 128)
    layer = LayerShape(kv, group, dim, dim, kw.pop("mlp", 384), **kw)
    return ModelShape((layer,) * layers, vocab, 256, "test")


def tensors(shape: ModelShape, repeat: tuple[int, ...] | None = None) -> list[TensorShape]:
    """What a decoder has: joined QKV, output, joined gate and up, down, norms, tables."""
    e, found = shape.embed, []
    for i, (layer, r) in enumerate(
        zip(shape.layers, repeat or (1,) * len(shape.layers), strict=True)
    ):
        k, rows = layer.kv_heads * r, layer.q_per_kv // r * layer.k_dim
        qkv = rows + layer.k_dim + layer.v_dim
        for name, dims, axes in (
            ("qkv", (k, qkv, e), ("kv_group", "head_rows", "embed")),
            ("out", (e, k, layer.q_per_kv // r * layer.v_dim), ("embed", "kv_group", "head_rows")),
            ("gate_up", (2, layer.mlp, e), ("pair", "mlp", "embed")),
            ("down", (e, layer.mlp), ("embed", "mlp")),
            ("norm", (e,), ("embed",)),
        ):
            found.append(TensorShape(f"blk.{i}.{name}", dims, axes, i, 4))
    found.append(TensorShape("token_embd", (shape.vocab, e), ("vocab", "embed"), None, 4))
    found.append(TensorShape("output_norm", (e,), ("embed",), None, 4))
    return found
