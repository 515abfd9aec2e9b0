"""Biases of attention scores by the distance between query and key."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxllm.models.layers import Array


class Biases(NamedTuple):
    """Of scores: by_distance [N, K, G, W] of each distance from -(W // 2) to W // 2, at both ends
    also of what is further; positions [N, T] of the queries themselves, who may see later keys."""

    by_distance: Array
    positions: Array

    def of(self, keys: Array) -> Array:
        """What is added to the scores of keys at positions [N, P]: [N, K, G, T, P]."""
        most = self.by_distance.shape[-1] // 2
        distance = self.positions[:, :, None] - keys[:, None, :]
        at = jnp.clip(distance, -most, most) + most
        return jax.vmap(lambda biases, at: biases[:, :, at])(self.by_distance, at)
