"""What a machine could do at most: the limits that measured rates are held against."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def machine_rates() -> dict[str, float]:
    """1e9 bytes a second that the first device reads, and 1e9 float32 operations a second.

    Reading is the better of a sum and a matrix-vector product over an array no cache holds; which
    of them XLA makes fast differs by platform. Best of five, as this is a limit.
    """
    import jax
    import jax.numpy as jnp

    def best(fn: Callable[..., Any], *operands: Any) -> float:
        jitted = jax.jit(fn)
        jitted(*operands).block_until_ready()
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            jitted(*operands).block_until_ready()
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    rows = 1 << (13 if jax.default_backend() == "cpu" else 16)
    large, vector = jnp.ones((rows, 1 << 13)), jnp.ones(1 << 13)
    read = large.nbytes / min(best(jnp.sum, large), best(jnp.matmul, large, vector))
    square = jnp.ones((2048, 2048))
    with jax.default_matmul_precision("highest"):
        flops = 2 * 2048**3 / best(jnp.matmul, square, square)
    return {"read_gb_s": read / 1e9, "float32_gflop_s": flops / 1e9}
