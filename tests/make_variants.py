"""Make tests/data/variants: logits of the models of variants.py by transformers, in float32.

    pip install torch transformers && python tests/make_variants.py

Needs the folder of references beside the repository, for the models that they are variants of.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from transformers import (
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
)
from transformers.models.minimax_m3_vl import configuration_minimax_m3_vl as minimax_config
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as minimax

import archs
import parity
import variants

EVERY = 8  # rows of which one is kept
Tensors = Mapping[str, np.ndarray]
State = dict[str, np.ndarray]


def _experts(t: Tensors, blk: str, to: str) -> State:
    """Gated experts and the gated MLP beside them."""
    both = [t[f"{blk}ffn_{side}_exps.weight"] for side in ("gate", "up")]
    return {
        f"{to}.gate.weight": t[f"{blk}ffn_gate_inp.weight"],
        f"{to}.gate.e_score_correction_bias": t[f"{blk}exp_probs_b.bias"],
        f"{to}.experts.gate_up_proj": np.concatenate(both, axis=1),
        f"{to}.experts.down_proj": t[f"{blk}ffn_down_exps.weight"],
    }


def _minimax(t: Tensors) -> tuple[torch.nn.Module, State]:
    """Norms of transformers add one to their weights."""
    config = minimax_config.MiniMaxM3VLTextConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=320,
        dense_intermediate_size=320,
        shared_intermediate_size=320,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        rms_norm_eps=1e-5,
        num_experts_per_tok=2,
        num_local_experts=8,
        routed_scaling_factor=1.0,
        rotary_dim=64,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 1.0,
        },
        index_n_heads=2,
        index_head_dim=64,
        index_block_size=4,
        index_topk_blocks=8,
        index_local_blocks=1,
        layer_types=["full_attention", *["minimax_m3_sparse"] * 3],
        mlp_layer_types=["dense", *["sparse"] * 3],
        attn_implementation="eager",
    )
    state = {
        "model.embed_tokens.weight": t["token_embd.weight"],
        "model.norm.weight": t["output_norm.weight"] - 1,
        "lm_head.weight": t["output.weight"],
    }
    for i in range(4):
        blk, to = f"blk.{i}.", f"model.layers.{i}."
        sides = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "output"}
        for theirs, ours in sides.items():
            state[f"{to}self_attn.{theirs}.weight"] = t[f"{blk}attn_{ours}.weight"]
        for side in "qk":
            norm = t[f"{blk}attn_{side}_norm.weight"]
            state[f"{to}self_attn.{side}_norm.weight"] = norm - 1
        state[f"{to}input_layernorm.weight"] = t[f"{blk}attn_norm.weight"] - 1
        state[f"{to}post_attention_layernorm.weight"] = t[f"{blk}ffn_norm.weight"] - 1
        dense = to + ("mlp" if i == 0 else "mlp.shared_experts")
        end = "" if i == 0 else "_shexp"
        both = [t[f"{blk}ffn_{side}{end}.weight"] for side in ("gate", "up")]
        state[f"{dense}.gate_up_proj.weight"] = np.concatenate(both)
        state[f"{dense}.down_proj.weight"] = t[f"{blk}ffn_down{end}.weight"]
        if i:
            state |= _experts(t, blk, f"{to}mlp")
            for side in "qk":
                own, norm = f"{to}self_attn.indexer.{side}", t[f"{blk}indexer.{side}_norm.weight"]
                state[f"{own}_proj.weight"] = t[f"{blk}indexer.{side}_proj.weight"]
                state[f"{own}_norm.weight"] = norm - 1
    return minimax.MiniMaxM3VLForCausalLM(config), state


def _sparse(t: Tensors, make: Any, model: Any, **more: Any) -> tuple[torch.nn.Module, State]:
    """Attention that is not absorbed: what makes keys and values of a latent vector is one."""
    config = make(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=320,
        moe_intermediate_size=320,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=1,
        n_routed_experts=8,
        routed_scaling_factor=1.0,
        kv_lora_rank=512,
        q_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=128,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        mlp_layer_types=["dense", *["sparse"] * 3],
        index_topk=8,
        index_head_dim=64,
        index_n_heads=16,
        **more,
        attn_implementation="eager",
    )
    state = {
        "model.embed_tokens.weight": t["token_embd.weight"],
        "model.norm.weight": t["output_norm.weight"],
        "lm_head.weight": t["output.weight"],
    }
    plain = {
        "q_a_proj": "attn_q_a",
        "q_a_layernorm": "attn_q_a_norm",
        "q_b_proj": "attn_q_b",
        "kv_a_proj_with_mqa": "attn_kv_a_mqa",
        "kv_a_layernorm": "attn_kv_a_norm",
        "o_proj": "attn_output",
        "indexer.wq_b": "indexer.attn_q_b",
        "indexer.wk": "indexer.attn_k",
        "indexer.k_norm": "indexer.k_norm",
        "indexer.weights_proj": "indexer.proj",
    }
    for i in range(4):
        blk, to = f"blk.{i}.", f"model.layers.{i}."
        for theirs, ours in plain.items():
            if f"{blk}{ours}.weight" in t:
                state[f"{to}self_attn.{theirs}.weight"] = t[f"{blk}{ours}.weight"]
        if f"{blk}indexer.proj.weight" in t:
            bias = t.get(f"{blk}indexer.k_norm.bias", np.zeros(64, np.float32))
            state[f"{to}self_attn.indexer.k_norm.bias"] = bias
        keys, own = t[f"{blk}attn_k_b.weight"].swapaxes(1, 2), t[f"{blk}attn_v_b.weight"]
        joined = np.concatenate([keys, own], axis=1)
        state[f"{to}self_attn.kv_b_proj.weight"] = joined.reshape(-1, 512)
        state[f"{to}input_layernorm.weight"] = t[f"{blk}attn_norm.weight"]
        state[f"{to}post_attention_layernorm.weight"] = t[f"{blk}ffn_norm.weight"]
        dense = to + ("mlp" if i == 0 else "mlp.shared_experts")
        end = "" if i == 0 else "_shexp"
        for side in ("gate", "up", "down"):
            state[f"{dense}.{side}_proj.weight"] = t[f"{blk}ffn_{side}{end}.weight"]
        if i:
            state |= _experts(t, blk, f"{to}mlp")
    return model(config), state


def _deepseek(t: Tensors) -> tuple[torch.nn.Module, State]:
    groups = dict(n_group=1, topk_group=1)
    return _sparse(t, DeepseekV32Config, DeepseekV32ForCausalLM, **groups)


def _glm(t: Tensors) -> tuple[torch.nn.Module, State]:
    types = ["full", "shared"] * 2
    return _sparse(t, GlmMoeDsaConfig, GlmMoeDsaForCausalLM, indexer_types=types)


def _nemotron(t: Tensors) -> tuple[torch.nn.Module, State]:
    latent = t.get("blk.2.ffn_latent_down.weight")
    config = NemotronHConfig(
        vocab_size=256,
        hidden_size=256,
        layers_block_type=["full_attention", "linear_attention", "moe", "linear_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        ssm_state_size=64,
        mamba_num_heads=4,
        mamba_head_dim=128,
        n_groups=2,
        conv_kernel=4,
        time_step_min=1e-30,  # which bounds steps from below; llama.cpp has no bound
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=160,
        moe_shared_expert_intermediate_size=96,
        moe_latent_size=None if latent is None else len(latent),
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
        layer_norm_epsilon=1e-5,
        attn_implementation="eager",
    )
    state = {
        "model.embeddings.weight": t["token_embd.weight"],
        "model.norm_f.weight": t["output_norm.weight"],
        "lm_head.weight": t["output.weight"],
    }
    for i in range(4):
        state[f"model.layers.{i}.norm.weight"] = t[f"blk.{i}.attn_norm.weight"]
    for theirs, ours in {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "output"}.items():
        state[f"model.layers.0.mixer.{theirs}.weight"] = t[f"blk.0.attn_{ours}.weight"]
    for i in (1, 3):
        blk, to = f"blk.{i}.ssm_", f"model.layers.{i}.mixer."
        state |= {
            f"{to}in_proj.weight": t[f"{blk}in.weight"],
            f"{to}out_proj.weight": t[f"{blk}out.weight"],
            f"{to}norm.weight": t[f"{blk}norm.weight"].reshape(-1),
            f"{to}conv1d.weight": t[f"{blk}conv1d.weight"][:, None],
            f"{to}conv1d.bias": t[f"{blk}conv1d.bias"],
            f"{to}A_log": np.log(-t[f"{blk}a"].reshape(-1)),
            f"{to}D": t[f"{blk}d"].reshape(-1),
            f"{to}dt_bias": t[f"{blk}dt.bias"],
        }
    blk, to = "blk.2.", "model.layers.2.mixer."
    state |= {
        f"{to}gate.weight": t[f"{blk}ffn_gate_inp.weight"],
        f"{to}gate.e_score_correction_bias": t[f"{blk}exp_probs_b.bias"],
    }
    for side in ("up", "down"):
        state[f"{to}experts.{side}_proj"] = t[f"{blk}ffn_{side}_exps.weight"]
        state[f"{to}shared_experts.{side}_proj.weight"] = t[f"{blk}ffn_{side}_shexp.weight"]
    if latent is not None:
        for theirs, ours in {"fc1": "down", "fc2": "up"}.items():
            state[f"{to}{theirs}_latent_proj.weight"] = t[f"{blk}ffn_latent_{ours}.weight"]
    return NemotronHForCausalLM(config), state


MODELS: dict[str, Callable[[Tensors], tuple[Any, State]]] = {
    "minimax-m3-blocks": _minimax,
    "deepseek32-heads": _deepseek,
    "glm-dsa-shared": _glm,
    "nemotron-h-experts": _nemotron,
    "nemotron-h-latent": _nemotron,
}


def main() -> None:
    """Write the logits of all variants, and print the checksums that variants.py is to have."""
    variants.RESULTS.mkdir(exist_ok=True)
    for name, make in MODELS.items():
        spec = variants.spec(name)
        tensors = archs.tensors(spec)
        sha = hashlib.sha256()
        for tensor, values in tensors.items():
            sha.update(tensor.encode() + np.ascontiguousarray(values).tobytes())
        print(name, sha.hexdigest())
        model, state = make(tensors)
        own = {key: torch.from_numpy(value.copy()) for key, value in state.items()}
        missing, unexpected = model.load_state_dict(own, strict=False)
        assert not missing and not unexpected, (missing, unexpected)
        of = parity.reference(variants.VARIANTS[name].of)
        tokens, more = of["tokens"], of["greedy_ids"]
        with torch.no_grad():
            given = torch.from_numpy(np.concatenate([tokens, more])[None].astype(np.int64))
            logits = model.eval()(given, use_cache=False).logits[0].float().numpy()
        rows = np.arange(EVERY - 1, len(tokens), EVERY, dtype=np.int32)
        np.savez_compressed(
            variants.RESULTS / f"{name}.npz",
            tokens=tokens,
            rows=rows,
            logits=logits[rows],
            greedy_ids=more,
            greedy_logits=logits[len(tokens) :],
        )


if __name__ == "__main__":
    main()
