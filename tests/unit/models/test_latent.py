"""Latent attention from one tensor of keys and values, and from two."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from jaxllm.models.decoder import attention
from jaxllm.models.parts import Latent
from support import layer_config


def test_joined_keys_and_values():
    rank, rope, heads, embed = 6, 2, 3, 8
    latent = Latent(q_rank=0, nope=4, v_dim=5)
    cfg = replace(layer_config(1, heads, rank + rope), v_dim=rank, latent=latent)
    f32 = jnp.dtype(jnp.float32)
    apart = attention(cfg, 1, embed, f32)
    together = attention(replace(cfg, latent=replace(latent, joined=True)), 1, embed, f32)
    draw = np.random.default_rng(0).standard_normal
    keys, values = draw((1, heads, 4, rank)), draw((1, heads, 5, rank))
    apart[0].keys[...] = jnp.asarray(np.swapaxes(keys, 2, 3), f32)
    apart[1].values[...] = jnp.asarray(values, f32)
    both = np.concatenate([keys, values], axis=2)
    together[0].keys[...] = jnp.asarray(both.reshape(1, -1, rank), f32)
    for name in ("q", "latent"):
        value = jnp.asarray(draw(getattr(apart[0], name).shape), f32)
        for qkv, _ in (apart, together):
            getattr(qkv, name)[...] = value
    out = jnp.asarray(draw(apart[1].out.weight.shape), f32)
    for _, after in (apart, together):
        after.out.weight[...] = out
    x = jnp.asarray(draw((1, 7, embed)), f32)
    o = jnp.asarray(draw((1, 7, 1, heads, rank)), f32)
    for a, b in zip(apart[0](x), together[0](x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    found, expected = (after(after.heads(o)) for _, after in (together, apart))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
