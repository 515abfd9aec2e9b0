"""Products of a few rows on a GPU that has kernels for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as T

from jaxllm import LLM, SamplingParams
from jaxllm.bench.shapes import model_config
from jaxllm.gguf.blocks import BLOCK_TYPES, take_apart
from jaxllm.gguf.random_blocks import random_blocks
from jaxllm.models.products import Matrix, Products, Rings, one_product
from jaxllm.models.ptx.share import Turned
from jaxllm.models.quantised import Quantised, values
from jaxllm.runtime import has_kernels
from naive import attend_token, turned
from support import compilations

pytestmark = pytest.mark.skipif(
    not has_kernels(jax.devices()[0]), reason="no GPU that the kernel of products is for"
)
BF16 = 2e-3  # NMSE of logits of bfloat16 against float32
SHAPES = [(48, 1024, 1), (9600, 4096, 1), (4224, 14336, 4), (160, 1280, 2), (9008, 2304, 3)]
LAYERS = [(512, 512, 768), (4096, 4096, 14336), (2048, 1024, 5632)]  # embedding, heads, columns
TYPES = [*BLOCK_TYPES, T.BF16]


def _rows(n: int, size: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (n, size)).astype(jnp.bfloat16)


def _matrix(kind: T, out: int, size: int) -> Matrix:
    if kind == T.BF16:
        return _rows(out, size, 9) / 32
    count = out * size // GGML_QUANT_SIZES[kind][0]
    drawn = random_blocks(kind, 1 << 14, np.random.default_rng(0), 0.02)
    raw = np.resize(drawn, (count, drawn.shape[1])).reshape(out, -1)
    own = replace(BLOCK_TYPES[kind], kernel=True)
    return jax.tree.map(jnp.asarray, Quantised(own, np.dtype(np.float32), take_apart(raw, kind)))


@jax.jit
def _values(w: Matrix) -> jax.Array:
    return values(w).astype(jnp.float32)


def _times(x: jax.Array, w: Matrix) -> np.ndarray:
    return np.asarray(x, np.float64) @ np.asarray(_values(w), np.float64).T


def _assert_rounded(found: jax.Array, exact: np.ndarray) -> None:
    """The nearest bfloat16, but for the order of sums before that."""
    spread = np.sqrt(np.square(exact).mean())
    error = np.abs(np.asarray(found, np.float64) - exact)
    assert (error <= 1.001 * 2**-8 * np.abs(exact) + 5e-5 * spread).all()


def _normalised(x: jax.Array, weight: jax.Array) -> jax.Array:
    wide = np.asarray(x, np.float64)
    wide = wide / np.sqrt(np.square(wide).mean(axis=-1, keepdims=True) + 1e-5)
    return jnp.asarray(wide * np.asarray(weight, np.float64), jnp.bfloat16)


def _assert_near(found: jax.Array, exact: np.ndarray) -> None:
    """Where a few of what was normalised may be rounded to the other side."""
    error = np.asarray(found, np.float64) - exact
    assert np.square(error).sum() / np.square(exact).sum() < 1e-5


def _assert_rest(
    found: dict[str, jax.Array],
    heads: jax.Array,
    x: jax.Array,
    weight: jax.Array,
    matrices: tuple[Matrix, Matrix, Matrix],
) -> None:
    """What follows on attention in a layer is what its output, gate and up, and down make."""
    out, up, down = matrices
    _assert_rounded(found["joined"], np.asarray(x, np.float64) + _times(heads, out))
    gate, linear = np.split(_times(_normalised(found["joined"], weight), up), 2, axis=-1)
    _assert_near(found["hidden"], gate / (1 + np.exp(-gate)) * linear)
    exact = np.asarray(found["joined"], np.float64) + _times(found["hidden"], down)
    _assert_rounded(found["found"], exact)


@pytest.mark.parametrize("out, size, n", SHAPES)
@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_products_are_exact_but_for_the_order_of_sums(kind: T, out: int, size: int, n: int):
    n = 1 if kind == T.BF16 else n
    x, w = _rows(n, size), _matrix(kind, out, size)
    assert one_product(x, w).are_a_kernel()
    found = jax.jit(lambda x, w: one_product(x, w).made()["found"])(x, w)
    _assert_rounded(found, _times(x, w))


@pytest.mark.parametrize("embed, heads, columns", LAYERS)
@pytest.mark.parametrize("kind", [T.Q4_0, T.Q8_0, T.Q4_K, T.BF16], ids=lambda kind: kind.name)
def test_the_rest_of_a_layer(kind: T, embed: int, heads: int, columns: int):
    o, x = _rows(1, heads), _rows(1, embed, 1)
    out, up, down = (
        _matrix(kind, *shape) for shape in ((embed, heads), (2 * columns, embed), (embed, columns))
    )
    weight = 1 + _rows(1, embed, 2)[0].astype(jnp.float32) / 8

    @jax.jit
    def made(o: jax.Array, x: jax.Array, *given: Any) -> dict[str, jax.Array]:
        products = Products(1, 1e-5, {"x": x, "heads": o})
        products.rest("heads", *given)
        return products.made()

    found = made(o, x, out, weight, up, down)
    for _ in range(20):  # groups that do not wait for each other would not always be found out
        again = made(o, x, out, weight, up, down)
        assert all((again[name] == found[name]).all() for name in found)
    _assert_rest(found, o, x, weight, (out, up, down))


@pytest.mark.parametrize(
    ("starts", "heads", "per_head", "dim", "capacity", "window"),
    [
        ([511], 8, 4, 128, 1024, None),
        ([20000], 8, 4, 128, 20480, None),
        ([100, -1, 4095, 0], 8, 4, 64, 4096, None),
        ([9000, 300], 2, 8, 128, 1536, 1000),  # a window beyond the ring's end
        ([700] * 40, 4, 1, 64, 1024, None),  # more heads than groups
    ],
)
def test_attention_of_a_token(
    starts: list[int], heads: int, per_head: int, dim: int, capacity: int, window: int | None
):
    n, width = len(starts), (per_head + 2) * dim
    qkv = _rows(n * heads, width).reshape(n, heads, width)
    k, v = (
        _rows((n + 1) * heads * capacity, dim, i).reshape(n + 1, heads, -1, dim) for i in (1, 2)
    )
    given = k, v, jnp.asarray([*starts, 1], jnp.int32)

    @jax.jit
    def attend(given: Any, qkv: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        return Rings(*given, per_head, dim**-0.5, window).attend(qkv)

    found, written = attend(given, qkv)
    for _ in range(20):
        again, _ = attend(given, qkv)
        assert (again == found).all()
    rings, how = (np.asarray(k), np.asarray(v)), (per_head, dim**-0.5, window)
    exact, after = attend_token(np.asarray(qkv), rings, [*starts, 1], *how)
    error = np.abs(np.asarray(found, np.float64) - exact).max(axis=(1, 2, 3))
    assert (error <= 2**-7 * np.abs(exact).max(axis=(1, 2, 3))).all()  # weights are bfloat16
    for ring, right in zip(written, after, strict=True):
        np.testing.assert_array_equal(np.asarray(ring), right)


@pytest.mark.parametrize(
    ("kind", "n", "start", "embed", "heads", "per_head", "size", "columns", "halves"),
    [
        (T.BF16, 1, 511, 4096, 8, 4, 128, 14336, False),
        (T.Q4_0, 1, 20000, 4096, 8, 4, 128, 14336, True),
        (T.Q4_K, 1, 1000, 4096, 8, 4, 128, 14336, False),
        (T.Q8_0, 2, 700, 2048, 4, 8, 64, 5632, True),
        (T.BF16, 1, 3000, 1024, 2, 8, 64, 2048, True),
    ],
)
def test_a_whole_layer(
    kind: T,
    n: int,
    start: int,
    embed: int,
    heads: int,
    per_head: int,
    size: int,
    columns: int,
    halves: bool,
):
    wide, capacity = heads * per_head * size, -(-start // 1024) * 1024
    x, angles = _rows(n, embed, 1), np.random.default_rng(2).standard_normal((n, size // 2))
    shapes = (wide + 2 * heads * size, embed), (embed, wide), (2 * columns, embed), (embed, columns)
    matrices = [_matrix(kind, *shape) for shape in shapes]
    weights = [1 + _rows(1, embed, i)[0].astype(jnp.float32) / 8 for i in (2, 3)]
    turns = Turned(per_head, size, halves, "cos", "sin")
    k, v = (_rows(n * heads * capacity, size, i).reshape(n, heads, -1, size) for i in (4, 5))
    starts = [start, *range(n - 1), 0]
    places = jnp.asarray(starts, jnp.int32)

    @jax.jit
    def made(given: Any, matrices: Any, weights: Any) -> dict[str, jax.Array]:
        x, angles, k, v = given
        turning = {"cos": jnp.cos(angles), "sin": jnp.sin(angles)}
        qkv, *rest = matrices
        products = Products(n, 1e-5, {"x": x} | turning)
        products.step(qkv, "x", "qkv", weights[0], turned=turns)
        products.attend(Rings(k, v, places, per_head, size**-0.5, None), "heads")
        products.rest("heads", rest[0], weights[1], *rest[1:])
        assert products.are_a_kernel()
        return products.made()

    given = x, jnp.asarray(angles, jnp.float32), k, v
    found = made(given, matrices, weights)
    for _ in range(20):
        again = made(given, matrices, weights)
        assert all((again[name] == found[name]).all() for name in found)
    qkv = _times(_normalised(x, weights[0]), matrices[0])
    _assert_near(found["qkv"], turned(qkv, angles, turns))
    each = np.asarray(found["qkv"]).reshape(n, heads, -1)
    rings, how = (np.asarray(k), np.asarray(v)), (per_head, size**-0.5, None)
    exact, after = attend_token(each, rings, starts, *how)
    for name, right in zip(("k_ring", "v_ring"), after, strict=True):
        np.testing.assert_array_equal(np.asarray(found[name]), right)
    exact = exact.reshape(n, -1)
    error = np.abs(np.asarray(found["heads"], np.float64) - exact).max(axis=1)
    assert (error <= 2**-7 * np.abs(exact).max(axis=1)).all()  # weights are bfloat16
    _assert_rest(found, found["heads"], x, weights[1], tuple(matrices[1:]))


@pytest.mark.parametrize("engine", ["fused", "staged"])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K", "Q6_K", None])
def test_logits_are_those_of_float32(kind: str | None, engine: str):
    base = model_config("small")
    layer = replace(base.layers[0], mlp=2048)
    cfg = replace(base, embed=1024, layers=(layer,) * 2)
    settings: dict[str, Any] = {"ctx": 512, "page": 128, "ubatch": 128, "parallel": 2}
    if kind is not None:
        settings |= {"weights": "quantised", "random_type": kind}
    exact = LLM.from_config(cfg, devices=jax.devices("cpu")[:1], dtype="float32", **settings)
    llm = LLM.from_config(cfg, devices=1, engine=engine, **settings)
    assert all(own.kernel for kinds in llm.model.kinds for _, own in kinds)
    llm.warmup()
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    prompts = np.random.default_rng(0).integers(0, 8192, (2, 40)).tolist()
    with compilations() as compiled:
        found = [*llm.generate(prompts, params), *llm.generate(prompts[:1], params)]
    assert not compiled
    for prompt, completion in zip((*prompts, prompts[0]), found, strict=True):
        ids = [*prompt, *completion.token_ids]
        logits = exact.logits(ids)[len(prompt) - 1 : -1]
        taken = logits[np.arange(len(logits)), completion.token_ids]
        assert (logits.max(axis=1) - taken <= 0.1 * logits.std()).all()
    together = exact.logits(prompts[0])
    own = llm.logits(prompts[0])
    assert np.square(own - together).sum() / np.square(together).sum() < BF16
