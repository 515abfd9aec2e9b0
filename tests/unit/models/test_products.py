"""The kernels of products, their instructions done one by one on the host."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import ptx
import pytest
from gguf import GGMLQuantizationType as T

from jaxllm.gguf.blocks import BLOCK_TYPES, BlockType
from jaxllm.models.products import Matrix, Products, Rings, one_product
from jaxllm.models.ptx.share import WARPS, Turned
from jaxllm.models.quantised import Quantised, values
from naive import attend_token, turned

KERNEL = {kind.name: replace(own, kernel=True) for kind, own in BLOCK_TYPES.items()}
TYPES = [*KERNEL, "BF16"]


def rows(n: int, size: int, seed: int = 1) -> jnp.ndarray:
    return jnp.asarray(np.random.default_rng(seed).standard_normal((n, size)), jnp.bfloat16)


def quantised(kind: BlockType, out: int, size: int) -> Quantised:
    """Codes of every value that a type has, with random scales."""
    random, parts = np.random.default_rng(0), {}
    for name, part in kind.parts.items():
        shape = (out, size // part.packs)
        if part.dtype.kind == "f":
            parts[name] = (random.standard_normal(shape) / size).astype(part.dtype)
        elif name == "words":
            words = random.integers(-(2**31), 2**31, shape, np.int32)
            five_bits = kind.bits == 8 and not kind.signed
            parts[name] = words & 0x1F1F1F1F if five_bits else words
        else:
            low = -64 if part.dtype.kind == "i" else 0
            parts[name] = random.integers(low, 64, shape).astype(part.dtype)
    return Quantised(kind, np.dtype(np.float32), parts)


def matrix(kind: str, out: int, size: int) -> Matrix:
    return rows(out, size, 2) / 8 if kind == "BF16" else quantised(KERNEL[kind], out, size)


def run(products: Products, groups: int, seed: int = 0) -> dict[str, np.ndarray]:
    """What the kernel writes, in float64."""
    given = {name: np.array(a) for name, a in (products.arrays | products.counters()).items()}
    found = {
        name: np.full(like.shape, np.nan, like.dtype)
        for name, like in products.written(groups).items()
    }
    chain = products.chain(groups)
    assert chain.fits
    ptx.run(chain.text(), given | found, chain.memory, groups, WARPS, seed)
    assert not any(given[name].any() for name in ("counters", "counts") if name in given)
    found |= {name: given[name] for name in products.changed}
    return {name: array.astype(np.float64) for name, array in found.items()}


def times(x: np.ndarray, w: Matrix) -> np.ndarray:
    return np.asarray(x, np.float64) @ np.asarray(values(w), np.float64).T


def normalised(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """In bfloat16."""
    wide = np.asarray(x, np.float64)
    wide = wide / np.sqrt(np.square(wide).mean(axis=-1, keepdims=True) + eps) * weight
    return wide.astype(np.float32).astype(jnp.bfloat16).astype(np.float64)


def assert_rounded(found: np.ndarray, exact: np.ndarray) -> None:
    """The nearest bfloat16, but for the order of sums before that."""
    spread = np.sqrt(np.square(exact).mean())
    assert (np.abs(found - exact) <= 1.001 * 2**-8 * np.abs(exact) + 2e-5 * spread).all()


def check(kind: str, out: int, size: int, n: int, groups: int = 1) -> None:
    x, w = rows(n, size), matrix(kind, out, size)
    assert_rounded(run(one_product(x, w), groups)["found"], times(x, w))


@pytest.mark.parametrize("kind", TYPES)
def test_it_is_exact_but_for_the_order_of_sums(kind: str):
    check(kind, 16, 2048, 1)


@pytest.mark.parametrize(
    "kind, size, n",
    [
        ("Q4_K", 1280, 1),  # rows that begin between two words, and warps without a last span
        ("Q6_K", 1280, 3),
        ("Q4_0", 3328, 2),
        ("Q8_0", 5120, 4),  # more turns than are on their way
        ("BF16", 640, 1),  # fewer spans than warps
    ],
)
def test_spans_that_do_not_fill_all_warps(kind: str, size: int, n: int):
    check(kind, 32, size, n)


@pytest.mark.parametrize("kind, size", [("Q4_K", 4096), ("Q8_0", 6144), ("Q4_0", 3328)])
def test_groups_go_on_to_further_tiles(kind: str, size: int):
    check(kind, 11 * 16, size, 1, groups=2)


@pytest.mark.parametrize("span", [32, 64, 128])
def test_spans_that_a_cut_has_shortened(span: int):
    kind = KERNEL["Q4_K"].cut_at(span)
    assert kind is not None and kind.span == span
    x, w = rows(1, 1024), quantised(kind, 16, 1024)
    assert_rounded(run(one_product(x, w), 1)["found"], times(x, w))


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_values_of_any_size(kind: str, scale: float):
    x, w = rows(1, 1024) * jnp.bfloat16(scale), matrix(kind, 16, 1024)
    assert_rounded(run(one_product(x, w), 1)["found"], times(x, w))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "BF16"])
def test_what_is_no_number_stays_none(kind: str, bad: float):
    x, w = rows(1, 1024).at[0, 300].set(bad), matrix(kind, 16, 1024)
    with np.errstate(invalid="ignore", over="ignore"):
        assert not np.isfinite(run(one_product(x, w), 1)["found"]).any()


@pytest.mark.parametrize("kind, n", [("Q4_0", 2), ("BF16", 1)])
def test_a_norm_before(kind: str, n: int):
    x, w, weight = 3 * rows(n, 1280), matrix(kind, 32, 1280), rows(1, 1280, 3)[0]
    weight = np.asarray(weight, np.float32)
    found = run(one_product(x, w, jnp.asarray(weight), 1e-5), 1)["found"]
    assert_rounded(found, times(normalised(x, weight, 1e-5), w))


@pytest.mark.parametrize(
    "kinds, n, groups",
    [
        (("Q4_0", "Q4_0", "Q4_0"), 1, 3),
        (("BF16", "BF16", "BF16"), 1, 2),
        (("Q4_K", "Q8_0", "Q6_K"), 2, 2),
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_rest_of_a_layer(kinds: tuple[str, str, str], n: int, groups: int, seed: int):
    heads, embed, columns = 512, 512, 768
    if "Q4_K" in kinds or "Q4_0" in kinds:
        heads, embed = 1024, 512
    o, x = rows(n, heads), rows(n, embed, 4)
    out, up, down = (
        matrix(kind, *shape)
        for kind, shape in zip(
            kinds, [(embed, heads), (2 * columns, embed), (embed, columns)], strict=True
        )
    )
    weight = np.asarray(1 + rows(1, embed, 5)[0] / 8, np.float32)
    products = Products(n, 1e-5, {"x": x, "heads": o})
    products.rest("heads", out, jnp.asarray(weight), up, down)
    made = run(products, groups, seed)
    assert_rounded(made["joined"], np.asarray(x, np.float64) + times(o, out))
    gate, linear = np.split(times(normalised(made["joined"], weight, 1e-5), up), 2, axis=-1)
    assert_rounded(made["hidden"], gate / (1 + np.exp(-gate)) * linear)
    assert_rounded(made["found"], made["joined"] + times(made["hidden"], down))


def attended(heads: np.ndarray, rings: Rings) -> tuple[np.ndarray, list[np.ndarray]]:
    """What attention gives [N, K, G, Hv] in float64, and the rings after it."""
    places, own = np.asarray(rings.places).tolist(), (np.asarray(rings.k), np.asarray(rings.v))
    qkv = heads.reshape(len(places) - 1, rings.k.shape[1], -1)
    return attend_token(qkv, own, places, rings.per_head, rings.scale, rings.window)


def rings(
    starts: list[int],
    heads: int,
    per_head: int,
    dims: tuple[int, int],
    capacity: int,
    window: int | None = None,
) -> Rings:
    """With random values, beyond the positions too."""
    row, random = 1, np.random.default_rng(1)
    k, v = (
        jnp.asarray(random.standard_normal((row + len(starts), heads, capacity, d)), jnp.bfloat16)
        for d in dims
    )
    return Rings(k, v, jnp.asarray([*starts, row], jnp.int32), per_head, dims[0] ** -0.5, window)


@pytest.mark.parametrize(
    ("starts", "heads", "per_head", "dims", "capacity", "window", "groups"),
    [
        ([300], 2, 4, (128, 128), 384, None, 4),
        ([0], 1, 8, (64, 64), 128, None, 1),
        ([15, 16, -1, 383], 2, 1, (64, 128), 384, None, 3),  # units in turn, one part each
        ([1000, 20], 1, 3, (128, 64), 256, 200, 5),  # a window beyond the ring's end
        ([4095], 1, 7, (64, 64), 4096, None, 7),
        ([5] * 48, 1, 4, (128, 128), 128, None, 4),  # more rows than products have room for
        ([767, 768], 1, 4, (64, 64), 1024, None, 6),  # by one group, and by several
        ([4000], 1, 2, (64, 64), 4096, None, 20),  # by more groups than are added up at a time
    ],
)
@pytest.mark.parametrize("seed", range(2))
def test_attention_of_a_token(
    starts: list[int],
    heads: int,
    per_head: int,
    dims: tuple[int, int],
    capacity: int,
    window: int | None,
    groups: int,
    seed: int,
):
    own = rings(starts, heads, per_head, dims, capacity, window)
    qkv = rows(len(starts), heads * (per_head * dims[0] + sum(dims)), 3)
    products = Products(len(starts), arrays={"qkv": qkv})
    products.attend(own, "found")
    made = run(products, groups, seed)
    exact, (k_ring, v_ring) = attended(np.asarray(qkv), own)
    np.testing.assert_array_equal(made["k_ring"], k_ring)
    np.testing.assert_array_equal(made["v_ring"], v_ring)
    found = made["found"].reshape(exact.shape)
    assert np.abs(found - exact).max() <= 2**-7 * np.abs(exact).max()  # weights are bfloat16


@pytest.mark.parametrize(
    ("kind", "halves", "seed"), [("Q4_K", False, 0), ("BF16", False, 1), ("Q8_0", True, 2)]
)
def test_a_whole_layer(kind: str, halves: bool, seed: int):
    n, heads, per_head, size, embed = (1 if kind == "BF16" else 2), 2, 4, 64, 512
    own, x = rings([70, 20][:n], heads, per_head, (size, size), 128), rows(n, embed, 4)
    shapes = (heads * (per_head + 2) * size, embed), (embed, embed), (1536, embed), (embed, 768)
    qkv, out, up, down = (matrix(kind, *shape) for shape in shapes)
    weights = [np.asarray(1 + rows(1, embed, i)[0] / 8, np.float32) for i in (5, 6)]
    angles = np.random.default_rng(2).standard_normal((n, size // 2)).astype(np.float32)
    products = Products(n, 1e-5, {"x": x, "cos": jnp.cos(angles), "sin": jnp.sin(angles)})
    turns = Turned(per_head, size, halves, "cos", "sin")
    products.step(qkv, "x", "qkv", jnp.asarray(weights[0]), turned=turns)
    products.attend(own, "heads")
    products.rest("heads", out, jnp.asarray(weights[1]), up, down)
    made = run(products, 4, seed)
    right = times(normalised(np.asarray(x), weights[0], 1e-5), qkv)
    assert_rounded(made["qkv"], turned(right, angles, turns))
    exact, (k_ring, _) = attended(made["qkv"], own)
    np.testing.assert_array_equal(made["k_ring"], k_ring)
    assert np.abs(made["heads"] - exact.reshape(n, -1)).max() <= 2**-7 * np.abs(exact).max()
    assert_rounded(made["joined"], np.asarray(x, np.float64) + times(made["heads"], out))
    gate, linear = np.split(times(normalised(made["joined"], weights[1], 1e-5), up), 2, axis=-1)
    assert_rounded(made["hidden"], gate / (1 + np.exp(-gate)) * linear)
    assert_rounded(made["found"], made["joined"] + times(made["hidden"], down))


def test_which_products_are_a_kernel():
    w, x = matrix("Q4_0", 32, 1024), rows(1, 1024)
    assert one_product(x, w).are_a_kernel()
    assert one_product(rows(4, 1024), w).are_a_kernel()
    assert not one_product(rows(5, 1024), w).are_a_kernel()
    assert not one_product(x.astype(jnp.float32), w).are_a_kernel()
    wide = matrix("Q4_0", 16, 4 * 14336)  # of which memory has room for one row of x
    assert one_product(rows(1, 4 * 14336), wide).are_a_kernel()
    assert not one_product(rows(2, 4 * 14336), wide).are_a_kernel()
    assert not one_product(x, w[:16]).are_a_kernel()  # one of several matrices
    assert not one_product(x, matrix("Q4_0", 24, 1024)).are_a_kernel()
    assert not one_product(rows(1, 1152), matrix("Q4_0", 32, 1152)).are_a_kernel()
    assert not one_product(x, quantised(BLOCK_TYPES[T.Q4_0], 32, 1024)).are_a_kernel()
    plain = matrix("BF16", 32, 1024)
    assert one_product(x, plain).are_a_kernel()
    assert not one_product(rows(2, 1024), plain).are_a_kernel()
    assert not one_product(x, plain.astype(jnp.float32)).are_a_kernel()
