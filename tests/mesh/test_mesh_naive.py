"""The random models of the mesh tests compute what a plain numpy forward pass computes."""

from __future__ import annotations

import numpy as np
import pytest

import naive
from mesh_models import MODELS, SWITCHES
from support import assert_close, make_llm, random_ids, run

# The smoke tests of tests/reference have plain families.
SMOKE = ("experts", "wide-keys")
# With the tests of one model's cuts, which run the same programs of one device.
NAMES = [
    pytest.param(n, marks=[pytest.mark.xdist_group(n), *[pytest.mark.smoke] * (n in SMOKE)])
    for n in MODELS
    if n not in SWITCHES
]


@pytest.mark.parametrize("name", NAMES)
def test_one_device(name: str):
    block, model = MODELS[name]
    prompt, forced = random_ids(40), random_ids(20, seed=1)
    expected = naive.logits(model, prompt + forced, block)
    for arguments in (dict(engine="fused"), dict(kv="host")):
        found = run(make_llm(model, block=block, **arguments), prompt, forced)
        assert_close(found.logits, expected.astype(np.float32), what=f"{name} {arguments}")
