"""A saved sequence under another number of devices, other places and copies of heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from runs import PROMPT, STEPS, config
from safetensors import safe_open

from jaxllm import LLM, ModelConfig, SamplingParams
from jaxllm.testing import random_llm
from support import random_ids

GREEDY = SamplingParams(max_tokens=STEPS, temperature=0)


def _saved(llm: LLM, path: Path) -> list[int]:
    """Run the prompt, save, and go on: the tokens after those saved."""
    prompt = random_ids(PROMPT, llm.config.vocab)
    (done,) = llm.generate([prompt], GREEDY)
    llm.save_session(path)
    (more,) = llm.generate([[*prompt, *done.token_ids]], GREEDY)
    return list(more.token_ids)


def _bytes(path: Path) -> dict[str, bytes]:
    with safe_open(path, "np") as file:
        return {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("kv", ["device", "host"])
def test_copies_of_heads_are_saved_once(kv: str, tmp_path: Path):
    """8/2 heads on four devices store each KV head twice; the file, and one device, once."""
    model = config(8, 2)
    cut: dict[str, Any] = dict(devices=4, split_mode="tensor", kv_replicate=True, kv=kv)
    four, one = random_llm(model, **cut), random_llm(model, devices=1)
    assert four.config.layers[0].kv_heads == 4
    expected = _saved(four, tmp_path / "four")
    with safe_open(tmp_path / "four", "np") as file:
        assert file.get_tensor("k.0").shape == (2, PROMPT + STEPS - 1, 64)
    ids = one.load_session(tmp_path / "four")
    one.save_session(tmp_path / "one")
    assert _bytes(tmp_path / "one") == _bytes(tmp_path / "four")
    (done,) = one.generate([ids], GREEDY)
    assert list(done.token_ids) == expected and done.cached_tokens == 32
    four.forget()
    assert four.load_session(tmp_path / "one") == ids
    four.save_session(tmp_path / "again")
    assert _bytes(tmp_path / "again") == _bytes(tmp_path / "four")


MODEL: ModelConfig = config(8, 4)


def test_other_devices_go_on(tmp_path: Path):
    """From two devices to one and three, on devices and host: what is in common is not computed
    again, and a second request is like the first."""
    types: dict[str, Any] = dict(cache_type_k="q8_0", cache_type_v="q8_0")
    path = tmp_path / "two"
    expected = _saved(random_llm(MODEL, devices=2, split_mode="tensor", **types), path)
    for devices, kv in ((1, "device"), (1, "host"), (3, "host")):
        mode = "tensor" if devices > 1 else "none"
        llm = random_llm(MODEL, devices=devices, split_mode=mode, kv=kv, **types)
        ids = llm.load_session(path)
        for _ in range(2):
            (done,) = llm.generate([ids], GREEDY)
            assert list(done.token_ids) == expected, (devices, kv)
            assert done.cached_tokens == 32
        (other,) = llm.generate([[*ids[:40], 1, 2, 3]], GREEDY)
        assert other.cached_tokens == 32
