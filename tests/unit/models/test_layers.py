"""Parts of layers against plain numpy, whole and in the slices of two devices."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import LayerConfig, Rope
from jaxllm.errors import ModelError
from jaxllm.models.heads import HeadNorms, alibi_slopes
from jaxllm.models.layers import ACTIVATIONS, DenseMLP, HeadsOut, Norm, activation
from jaxllm.models.parts import NormStyle, Relative, Yarn
from jaxllm.models.relative import bucket
from jaxllm.models.rope import RopeTable, yarn_scales
from support import layer_config, small_model

F32 = jnp.dtype(jnp.float32)
LAYER = replace(layer_config(3, 2, 16, mlp=96), sub_norms=True, eps=1e-2)


def _draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _rms(x: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


@pytest.mark.parametrize("biases", [(), ("attn_norm.bias",)])
def test_layer_norm(biases: tuple[str, ...]):
    norm = Norm(8, 1e-2, "attn_norm.weight", NormStyle("layer", biases=biases))
    x, w, b = _draw(2, 3, 8), _draw(8, seed=1), _draw(8, seed=2)
    assert norm.weight is not None
    norm.weight[...] = jnp.asarray(w)
    expected = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-2) * w
    if biases:
        assert norm.bias is not None
        norm.bias[...] = jnp.asarray(b)
        expected = expected + b
    np.testing.assert_allclose(norm(jnp.asarray(x)), expected, rtol=1e-5, atol=1e-6)


def test_norm_without_weight():
    x = _draw(1, 2, 8)
    norm = Norm(8, 1e-2, "output_norm.weight", NormStyle(weight=False))
    np.testing.assert_allclose(norm(jnp.asarray(x)), _rms(x, 1e-2), rtol=1e-5, atol=1e-6)


def test_norms_over_all_heads_of_two_devices():
    """Each device has its own heads; the squares of both make the norm of the whole."""
    cfg = replace(LAYER, qk_norm=True, norm_heads="all")
    q, k = _draw(1, 5, 3, 2, 16), _draw(1, 5, 3, 16, seed=1)
    wq, wk = _draw(3, 32, seed=2), _draw(3, 16, seed=3)
    parts, norms = (slice(0, 1), slice(1, 3)), []
    for part in parts:
        norms.append(HeadNorms(cfg, part.stop - part.start))
        norms[-1].q[...], norms[-1].k[...] = jnp.asarray(wq[part]), jnp.asarray(wk[part])
    own = [(jnp.asarray(q[:, :, part]), jnp.asarray(k[:, :, part])) for part in parts]
    squares = sum(norm.squares(*heads) for norm, heads in zip(norms, own, strict=True))
    found = [norm(*heads, squares) for norm, heads in zip(norms, own, strict=True)]
    whole_q = (_rms(q.reshape(1, 5, -1), cfg.eps) * wq.reshape(-1)).reshape(q.shape)
    whole_k = (_rms(k.reshape(1, 5, -1), cfg.eps) * wk.reshape(-1)).reshape(k.shape)
    for part, (own_q, own_k) in zip(parts, found, strict=True):
        np.testing.assert_allclose(own_q, whole_q[:, :, part], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(own_k, whole_k[:, :, part], rtol=1e-5, atol=1e-6)


def test_sub_norms_of_two_devices():
    """The sum of partials, divided by the root of the sum of squares, is the norm of the whole."""
    o, w, out = _draw(1, 5, 3, 2, 16), _draw(3, 32, seed=1), _draw(8, 3, 32, seed=2)
    total = 0
    for part in (slice(0, 1), slice(1, 3)):
        layer = HeadsOut(LAYER, part.stop - part.start, 8, F32)
        assert layer.sub_norm is not None
        layer.weight[...] = jnp.asarray(out[:, part])
        layer.sub_norm.weight[...] = jnp.asarray(w[part])
        total = total + layer(jnp.asarray(o[:, :, part]))
    found = layer.sub_norm.finish(total, F32)
    whole = _rms(o.reshape(1, 5, -1), LAYER.eps) * w.reshape(-1) @ out.reshape(8, -1).T
    np.testing.assert_allclose(found, whole, rtol=1e-4, atol=1e-5)


def test_plain_mlp():
    cfg = replace(LAYER, sub_norms=False, mlp_gated=False, mlp_bias=True, activation="relu2")
    mlp = DenseMLP(cfg, 96, 8, F32)
    up, bias, down, x = _draw(96, 8), _draw(96, seed=1), _draw(8, 96, seed=2), _draw(1, 3, 8)
    assert mlp.bias is not None
    mlp.up[...], mlp.bias[...], mlp.down[...] = map(jnp.asarray, (up, bias, down))
    expected = np.maximum(x @ up.T + bias, 0) ** 2 @ down.T
    np.testing.assert_allclose(mlp(jnp.asarray(x)), expected, rtol=1e-4, atol=1e-4)


def test_xielu():
    numbers = alpha_n, alpha_p, beta, eps = 0.7, 0.4, 0.5, -1e-6
    x = np.linspace(-3, 3, 31)
    softplus_n, softplus_p = np.log1p(np.exp([alpha_n, alpha_p]))
    below = (np.expm1(np.minimum(x, eps)) - x) * (beta + softplus_n) + beta * x
    expected = np.where(x > 0, softplus_p * x * x + beta * x, below)
    found = activation(replace(LAYER, activation="xielu", xielu=numbers))(jnp.asarray(x))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert "xielu" not in ACTIVATIONS  # it needs a layer's numbers


def test_slopes():
    np.testing.assert_allclose(alibi_slopes(8, 8.0), 0.5 ** np.arange(1, 9))
    six = alibi_slopes(6, 8.0)  # four of four heads, then every other one of eight
    np.testing.assert_allclose(six, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3])


@pytest.mark.parametrize(("buckets", "both_ways"), [(32, True), (32, False), (8, True), (8, False)])
def test_buckets_of_distances(buckets: int, both_ways: bool):
    """As in Mesh TensorFlow's T5, in float32."""
    how = Relative("table", buckets, both_ways, furthest=128)
    distance = np.arange(-200, 201)
    count = buckets // 2 if both_ways else buckets
    apart = np.abs(distance) if both_ways else np.maximum(distance, 0)
    exact = count // 2
    ratio = np.log(np.maximum(apart, 1).astype(np.float32) / exact) / np.log(128 / exact)
    far = np.minimum(exact + (ratio.astype(np.float32) * (count - exact)).astype(int), count - 1)
    expected = np.where(apart < exact, apart, far) + (both_ways * count) * (distance < 0)
    assert [bucket(how, int(n)) for n in distance] == expected.tolist()


def test_yarn():
    """Fast pairs keep their speed, slow ones are divided by the scale, one between is mixed."""
    rope = Rope(1e4, 16, "halves", scale=4.0, yarn=Yarn(context=4096), magnitude=1.5)
    turns = 4096 * rope.theta ** (-np.arange(0, 16, 2) / 16) / (2 * np.pi)
    scales = yarn_scales(rope, Yarn(context=4096))
    np.testing.assert_allclose(scales[turns > 64], 1.0)
    np.testing.assert_allclose(scales[turns < 0.5], 0.25)
    assert np.all(np.diff(scales) <= 0) and np.any((scales > 0.25) & (scales < 1.0))
    x, at = _draw(1, 2, 16), np.asarray([[3, 900]], np.int32)
    [found] = RopeTable(rope)(jnp.asarray(at), jnp.asarray(x))
    angle = at[..., None] * (rope.theta ** (-np.arange(0, 16, 2) / 16) * scales)
    a, b = np.split(x, 2, axis=-1)
    turned = [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)]
    np.testing.assert_allclose(found, 1.5 * np.concatenate(turned, -1), rtol=1e-3, atol=1e-3)


def test_no_rope():
    x = jnp.asarray(_draw(1, 2, 16))
    [found] = RopeTable(None)(jnp.zeros((1, 2), jnp.int32), x)
    assert found is x


def test_contexts_choose_factors_and_are_checked():
    rope = Rope(1e4, 16, "halves", factors="short", longer=(64, "long"))
    layer: LayerConfig = replace(LAYER, rope=rope)
    model = replace(small_model(), layers=(layer,), positions=100)
    chosen = [model.in_context(ctx).layers[0].rope for ctx in (64, 65)]
    assert [rope.factors for rope in chosen if rope] == ["short", "long"]
    with pytest.raises(ModelError, match="100 positions"):
        model.in_context(101)
