"""Compiling ahead: run every program once, on tokens that mean nothing."""

from __future__ import annotations

import numpy as np

from jaxllm import interrupts
from jaxllm.engine.base import Engine
from jaxllm.engine.prefill import chunk_sizes
from jaxllm.engine.sampling import TOPS
from sharding import Plan


def warm_up(engine: Engine, plan: Plan, places: int) -> None:
    """Every chunk size and the decode step, with all heads that generation and `logits` ask for.

    places: positions that one head program takes when the logits of whole prompts are asked for.
    """
    options = plan.options
    steps = [(1, size) for size in chunk_sizes(options.ubatch)] + [(options.slots, 1)]
    encodes = any(shape.role == "encoder" for shape in plan.model.layers)
    for rows, size in dict.fromkeys(steps):
        hidden = None
        if encodes and size > 1:
            with interrupts.kept():
                engine.encode(np.zeros((1, size), np.int32), 0, size)
        for position in engine.rehearse(size):
            tokens, starts = np.zeros((rows, size), np.int32), np.full(rows, position, np.int32)
            with interrupts.kept():
                hidden = engine.forward(tokens, 0, starts)
            if (rows, size) == (options.slots, 1):
                for count in sorted({1, engine.greedy_steps}):
                    with interrupts.kept():
                        engine.greedy(tokens[:, 0], starts, count)
        for top in (0, *TOPS):
            with interrupts.kept():
                engine.logits(hidden, np.zeros((rows, 1), np.int32), top)
        if size > 1:
            engine.logits(hidden, np.zeros((rows, min(size, places)), np.int32), 0)
    if options.slots > 1:
        engine.reuse(0, 1, 0)
    for row in range(options.slots):
        engine.release(row)
