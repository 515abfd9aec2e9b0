"""Element types of a cache, by the names of `--cache-type-k` and `--cache-type-v`."""

import jax.numpy as jnp

CACHE_TYPES = {"f32": jnp.float32, "f16": jnp.float16, "bf16": jnp.bfloat16}
