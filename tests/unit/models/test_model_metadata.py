"""Which keys of a file change a model: those that llama.cpp reads for its architecture."""

from __future__ import annotations

from math import sqrt
from types import SimpleNamespace
from typing import Any

import pytest

from jaxllm import ModelConfig, ModelError
from jaxllm.gguf.metadata import Metadata
from jaxllm.models.parts import Follower
from jaxllm.models.registry import family

SIZES = {
    "embedding_length": 256,
    "block_count": 6,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "feed_forward_length": 320,
}
WINDOWED = ("gemma2", "gemma3")
PLAIN = ("llama", "qwen2", "qwen3", *WINDOWED)


def configured(architecture: str, tensors: tuple[str, ...] = (), **keys: Any) -> ModelConfig:
    """The config of a small model whose file also has these keys, dots written as double
    underscores."""
    given = SIZES | {key.replace("__", "."): value for key, value in keys.items()}
    meta = Metadata({f"{architecture}.{k}": v for k, v in given.items()}, architecture)
    names = ("token_embd.weight", *tensors)
    there: Any = {name: SimpleNamespace(shape=(128, 256)) for name in names}
    return family(architecture).configure(meta, there)


UNREAD: tuple[dict[str, Any], ...] = (
    dict(attention__scale=0.5, logit_scale=2.0, residual_scale=2.0, embedding_scale=2.0),
    dict(attention__clamp_kqv=0.1, attention__max_alibi_bias=8.0),
    dict(attention__layer_norm_epsilon=0.1, attention__key_length_mla=8),
    dict(router_logit_softcapping=5.0, attn_output_scale=0.5, attention__temperature_scale=3.0),
    dict(expert_weights_scale=2.0, expert_group_scale=2.0, expert_gating_func=2),
    dict(rope__scaling__original_context_length=7, rope__scaling__finetuned=True),
    dict(rope__scaling__alpha=2.0, pooling_type=1),
)


@pytest.mark.parametrize("architecture", PLAIN)
@pytest.mark.parametrize("keys", UNREAD)
def test_keys_that_are_not_read_change_nothing(architecture: str, keys: dict[str, Any]):
    assert configured(architecture, **keys) == configured(architecture)


@pytest.mark.parametrize("architecture", [a for a in PLAIN if a not in WINDOWED])
def test_without_windows_their_keys_change_nothing(architecture: str):
    keys = dict(attention__sliding_window=24, attention__sliding_window_pattern=2)
    more = dict(rope__freq_base_swa=5.0, attention__key_length_swa=32)
    caps = dict(attn_logit_softcapping=5.0, final_logit_softcapping=5.0)
    assert configured(architecture, **keys, **more, **caps) == configured(architecture)


@pytest.mark.parametrize("architecture", PLAIN)
def test_attention_that_is_not_causal_is_refused(architecture: str):
    with pytest.raises(ModelError, match=r"attention\.causal is False"):
        configured(architecture, attention__causal=False)
    assert configured(architecture, attention__causal=True) == configured(architecture)


@pytest.mark.parametrize("architecture", WINDOWED)
def test_window_layers_of_another_size_are_refused(architecture: str):
    window = dict(attention__sliding_window=24)
    same = dict(attention__key_length=64, attention__key_length_swa=64)
    assert configured(architecture, **window, **same) == configured(architecture, **window)
    for key in ("attention__key_length", "attention__value_length", "rope__dimension_count"):
        sizes = {key: 64, f"{key}_swa": 32}
        with pytest.raises(ModelError, match="_swa is 32"):
            configured(architecture, **window, **sizes)


def test_granite_reads_the_scale_of_scores():
    keys = dict(logit_scale=1.0)
    assert configured("granite", **keys).layers[0].scale == 1.0 / sqrt(64)
    assert configured("granite", **keys, attention__scale=0.25).layers[0].scale == 0.25


def test_gemma2_reads_pattern_and_base_of_windows():
    usual = configured("gemma2", attention__sliding_window=24)
    assert [layer.window for layer in usual.layers] == [24, None] * 3
    keys = dict(attention__sliding_window_pattern=3, rope__freq_base_swa=500.0)
    found = configured("gemma2", attention__sliding_window=24, **keys)
    assert [layer.window for layer in found.layers] == [24, 24, None] * 2
    assert [layer.rope.theta for layer in found.layers] == [500.0, 500.0, 10000.0] * 2
    assert found.layers[0].scale == 1.0 / sqrt(64)
    for key in ("attention__sliding_window", "attn_logit_softcapping", "final_logit_softcapping"):
        with pytest.raises(ModelError, match="positive"):
            configured("gemma2", **{key: 0})


def test_rwkv6_halves_the_residual_after_every_second_block():
    sizes = dict(wkv__head_size=64, time_mix_extra_dim=8, time_decay_extra_dim=8)
    sizes |= dict(attention__layer_norm_epsilon=1e-5, attention__head_count=0)
    tensors = ("blk.0.time_mix_lerp_fused.weight",)
    layers = configured("rwkv6", tensors, rescale_every_n_layers=2, **sizes).layers
    assert [layer.halved for layer in layers] == [False, False, False, True] * 3
    assert not any(layer.halved for layer in configured("rwkv6", tensors, **sizes).layers)
    with pytest.raises(ModelError, match=r"time_mix_lerp_fused\.weight is missing"):
        configured("rwkv6", **sizes)
    with pytest.raises(ModelError, match="heads of 60"):
        configured("rwkv6", tensors, **sizes | dict(wkv__head_size=60))


def test_glm_dsa_says_which_layers_choose_keys():
    sizes = dict(block_count=12, attention__head_count_kv=1, rope__dimension_count=32)
    sizes |= dict(attention__key_length=96, attention__value_length=64)
    sizes |= dict(attention__key_length_mla=64, attention__value_length_mla=32)
    sizes |= dict(attention__kv_lora_rank=64, attention__q_lora_rank=48)
    sizes |= {f"attention__indexer__{k}": n for k, n in dict(head_count=2, key_length=32).items()}
    sizes |= dict(attention__indexer__top_k=8)

    def follow(**keys: Any) -> list[int]:
        layers = configured("glm-dsa", **sizes, **keys).layers
        followed = [i for i, c in enumerate(layers) if getattr(c.indexer, "followed", False)]
        after = [i for i, c in enumerate(layers) if isinstance(c.indexer, Follower)]
        assert followed == [i - 1 for i in after if i - 1 not in after]
        return after

    assert follow(context_length=1 << 17) == []
    assert follow(context_length=1 << 20) == [3, 4, 5, 7, 8, 9, 11]
    assert follow(attention__indexer__types=[1, 0] * 6) == [1, 3, 5, 7, 9, 11]
    with pytest.raises(ModelError, match="the first layer of glm-dsa has no indexer"):
        follow(attention__indexer__types=[0] * 12)


def test_t5_says_who_shares_biases_and_whether_the_mlp_is_gated():
    first = tuple(f"{side}.blk.0.attn_rel_b.weight" for side in ("enc", "dec"))
    more = "enc.blk.0.ffn_gate.weight", "dec.blk.1.attn_rel_b.weight", "output.weight"
    keys = dict(block_count=2, decoder_block_count=3, decoder_start_token_id=7)
    found = configured("t5", (*first, *more), **keys)
    assert (found.start, found.encoder, found.logit_scale, found.tied) == (7, 2, 1.0, False)
    names = [found.stored(i) for i in range(len(found.layers))]
    assert names == [f"enc.blk.{i}." for i in (0, 1)] + [
        f"dec.blk.{i}." for i in (0, 1, 2) for _ in ("own", "memory", "cross")
    ]
    biases = [layer.relative.source for layer in found.layers if layer.relative]
    assert biases == [f"/{first[0]}"] * 2 + [f"/{first[1]}", more[1][10:], f"/{first[1]}"]
    assert [(c.activation, c.mlp_gated) for c in found.layers[1::6]] == [
        ("gelu", True),
        ("relu", False),
    ]
    tied = configured("t5", first, block_count=2)
    assert (tied.start, tied.logit_scale, len(tied.layers)) == (0, 1.0 / 16.0, 2 + 3 * 2)
    with pytest.raises(ModelError, match=r"dec\.blk\.0\.attn_rel_b\.weight is missing"):
        configured("t5", first[:1])


@pytest.mark.parametrize(
    ("architecture", "hint"),
    [
        ("gemma4-assistant", "a draft in a file of its own; use gemma4 without a draft"),
        ("rwkv7", "the nearest that are: rwkv6"),
        ("zzz", "docs/architectures.md has those that are"),
    ],
)
def test_what_is_not_supported_is_refused_with_the_nearest(architecture: str, hint: str):
    with pytest.raises(ModelError, match=f"architecture '{architecture}' is not supported.*{hint}"):
        family(architecture)
