"""Random matrices that are blocks of a type: the same values under every plan, quantised or not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as T
from gguf.quants import dequantize

from jaxllm import LLM, OptionError, SessionError
from jaxllm.gguf.blocks import BLOCK_TYPES, STORED
from jaxllm.gguf.random_blocks import DEVIATION, random_blocks
from jaxllm.models.config import ModelConfig
from jaxllm.models.quantised import Quantised
from jaxllm.models.sources import RandomSource
from jaxllm.testing import assert_partition, assert_weights_as_planned, random_llm, small_config
from support import nmse, random_ids, run

VOCAB = 130
CUTS: dict[str, dict[str, Any]] = {
    "one": dict(devices=1),
    "uneven": dict(devices=3, split_mode="tensor", tensor_split=(2, 1, 0), kv="host"),
    "padded": dict(devices=2, split_mode="tensor", tensor_split=(3, 1), engine="fused"),
    "layers": dict(devices=2, split_mode="layer"),
}


@pytest.mark.parametrize("kind", BLOCK_TYPES, ids=lambda kind: kind.name)
def test_values_lie_around_zero(kind: T):
    raw = random_blocks(kind, 4096, np.random.default_rng(1), DEVIATION)
    values = dequantize(raw, kind)
    assert values.std() == pytest.approx(DEVIATION, rel=0.05)
    assert abs(values.mean()) < DEVIATION / 8  # Q4_0 has one code more below zero
    assert len(np.unique(raw.view(np.dtype(STORED[kind]))["d"])) > 200  # a mix-up would be seen


@pytest.mark.parametrize("kind", BLOCK_TYPES, ids=lambda kind: kind.name)
def test_quantised_and_dequantised_slices_agree(kind: T, monkeypatch: pytest.MonkeyPatch):
    """Of a tensor that repeats, and whose rows end inside a block of a K-quant."""
    monkeypatch.setattr("jaxllm.models.sources.DRAWN", 7 * 384)
    source = RandomSource(small_config(), stored={"a": kind})
    whole = np.zeros((40, 384), np.float32)
    source.copy("a", whole.shape, slice(0, 40), slice(0, 384), whole)
    assert whole[:7].tobytes() == whole[7:14].tobytes() == whole[28:35].tobytes()
    assert len(np.unique(whole[:7], axis=0)) == 7

    rows, columns = slice(5, 29), slice(96, 384)
    cut = BLOCK_TYPES[kind].cut_at(384, 96)
    assert cut is not None
    empty = {n: np.zeros((24, 288 // p.packs), p.dtype) for n, p in cut.parts.items()}
    own = Quantised(cut, np.dtype(np.float32), empty)
    source.copy("a", whole.shape, rows, columns, own)
    assert np.asarray(own.values()).tobytes() == whole[rows, columns].tobytes()
    inside = np.zeros((24, 11), np.float32)
    source.copy("a", whole.shape, rows, slice(90, 101), inside)
    assert inside.tobytes() == whole[rows, 90:101].tobytes()

    other = np.zeros_like(whole)
    RandomSource(small_config(), 1, stored={"a": kind}).copy(
        "a", whole.shape, slice(0, 40), slice(0, 384), other
    )
    assert not np.array_equal(other, whole)


def model(**changes: Any) -> ModelConfig:
    return small_config(**({"embed": 256, "mlp": 512, "vocab": VOCAB} | changes))


def logits(llm: LLM) -> np.ndarray:
    """Of a prompt in chunks and of steps of one row."""
    return run(llm, random_ids(40, VOCAB), [5, 7, 11]).logits


@pytest.mark.parametrize(("kind", "bits"), [("Q4_K", 4.625), ("Q5_1", 9.0)])
def test_logits_of_every_cut(kind: str, bits: float):
    exact = random_llm(model(), devices=1, random_type=kind)
    expected = logits(exact)
    for name, cut in CUTS.items():
        llm = random_llm(model(), weights="quantised", random_type=kind, **cut)
        assert_partition(llm.plan)
        assert_weights_as_planned(llm)
        assert nmse(logits(llm), expected) <= 1e-11, name
        assert not any("dequantised" in note for note in llm.plan.notes)
        if name == "one":
            norms = 4 * 256 * 5
            few, many = (one.plan.weight_bytes(0) - norms for one in (llm, exact))
            assert few == pytest.approx(many * bits / 32, rel=0.01)
    split = random_llm(model(), random_type=kind, **CUTS["uneven"])
    assert nmse(logits(split), expected) <= 1e-11
    assert nmse(logits(random_llm(model(), devices=1)), expected) > 0.1


def test_what_cannot_stay_quantised_has_the_same_values():
    """A group of 16 columns is half a block of Q8_0, and a row of 384 is one and a half of Q4_K."""
    for kind, cfg in (("Q8_0", model(k_dim=16, q_per_kv=1)), ("Q4_K", model(mlp=384))):
        expected = logits(random_llm(cfg, devices=1, random_type=kind))
        for cut in (CUTS["one"], CUTS["uneven"]):
            llm = random_llm(cfg, weights="quantised", random_type=kind, **cut)
            assert nmse(logits(llm), expected) <= 1e-11
            notes = [note for note in llm.plan.notes if "dequantised" in note]
            assert len(notes) == (kind == "Q8_0")


def test_a_cut_is_between_blocks_of_the_type():
    """As one of a file is, whose down projection has that type."""
    for kind, ends in ((None, 288), ("Q4_K", 256)):
        llm = random_llm(
            model(), random_type=kind, devices=2, split_mode="tensor", tensor_split=(9, 7)
        )
        assert llm.plan.layers[0].mlp == ((0, ends), (ends, 512))


def test_a_session_of_another_type_is_refused(tmp_path: Any):
    one = random_llm(model(), devices=1, random_type="Q4_0", weights="quantised")
    one.generate([[1, 2, 3]])
    one.save_session(tmp_path / "a.session")
    assert len(
        random_llm(model(), devices=1, random_type="Q4_0").load_session(tmp_path / "a.session")
    )
    with pytest.raises(SessionError):
        random_llm(model(), devices=1, random_type="Q8_0").load_session(tmp_path / "a.session")


def test_what_is_refused():
    names = "one of Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K"
    for wrong in ("Q3_K", "q4_k", "", 5, ["Q4_K"]):
        with pytest.raises(OptionError, match=names) as found:
            random_llm(devices=1, random_type=wrong)
        assert str(found.value).endswith(f"not {wrong!r}")
    with pytest.raises(OptionError, match=f"need random_type .*{names}"):
        random_llm(devices=1, weights="quantised")
    with pytest.raises(OptionError, match="there is no argument 'random_type'"):
        LLM.from_gguf("none.gguf", random_type="Q4_K")
