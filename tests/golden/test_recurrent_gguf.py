"""GGUF files of models with recurrent layers against transformers on the dequantized weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Type

from tests.checkpoints import make_checkpoint
from tests.executor_svc.driver import Model
from tests.golden.test_gguf_golden import EIGHT_BITS, EXACT, NEW_TOKENS, SHAPE, mixed, split_in_f32
from tests.helpers.models.gguf_files import Kinds, all_of, dequantized, write_gguf
from tests.helpers.models.golden import compare_greedy, our_greedy, random_prompts, transformers_model

CLOSE = 5e-5
LENGTHS = (3, 17, 80)
_HEADS = {"head_dim": 16, "moe_intermediate_size": 32}
_DELTA = {
    **_HEADS,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "shared_expert_intermediate_size": 32,
    "attention_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
}
_MAMBA = {**_HEADS, "mamba_d_head": 16}
CASES: dict[str, tuple[str, Kinds, dict[str, Any]]] = {
    "falcon_h1": ("falcon_h1", all_of(Type.F32), {**_MAMBA, "mamba_d_ssm": 128}),
    "falcon_h1 with a norm": (
        "falcon_h1",
        all_of(Type.F32),
        {**_MAMBA, "mamba_d_ssm": 128, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "granite_h": ("granite_h", mixed, {**_MAMBA, "shared_intermediate_size": 64}),
    "granite_h without experts": (
        "granite_h",
        EIGHT_BITS,
        {**_MAMBA, "num_local_experts": 0, "shared_intermediate_size": 96, "mamba_proj_bias": True},
    ),
    "kimi_linear": (
        "kimi_linear",
        split_in_f32,
        {
            "moe_intermediate_size": 32,
            "kv_lora_rank": 32,
            "v_head_dim": 24,
            "linear_head_dim": 32,
            "linear_num_heads": 4,
            "mlp_layer_types": ["sparse"] * 3,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "lfm2": ("lfm2", mixed, {"block_multiple_of": 32}),
    "lfm2_moe": (
        "lfm2_moe",
        EIGHT_BITS,
        {"moe_intermediate_size": 32, "routed_scaling_factor": 1.0, "tie_word_embeddings": True},
    ),
    "nemotron_h": (
        "nemotron_h",
        EIGHT_BITS,
        {**_HEADS, "mamba_head_dim": 16, "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]},
    ),
    "nemotron_h with experts": (
        "nemotron_h",
        EIGHT_BITS,
        {
            **_HEADS,
            "head_dim": 32,
            "mamba_head_dim": 16,
            "n_group": 1,
            "topk_group": 1,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "linear_attention"],
        },
    ),
    "qwen3_5": ("qwen3_5_delta", mixed, _DELTA),
    "qwen3_5_moe": ("qwen3_5_moe_text", EIGHT_BITS, _DELTA),
    "qwen3_next": ("qwen3_next_delta", mixed, {**_DELTA, "mlp_only_layers": []}),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", CASES)
def test_greedy_equals_transformers(tmp_path: Path, name: str) -> None:
    family, kinds, shape = CASES[name]
    folder = make_checkpoint(tmp_path / "source", family, **{**SHAPE, **shape})
    file = write_gguf(folder, tmp_path / "model.gguf", kinds)
    reference = transformers_model(dequantized(folder, tmp_path / "dequantized", kinds))
    prompts = random_prompts(SHAPE["vocab_size"], LENGTHS)
    found = our_greedy(Model(file, **EXACT), prompts, NEW_TOKENS)
    equal = sum(compare_greedy(ours, reference, prompt, CLOSE) for prompt, ours in zip(prompts, found, strict=True))
    assert equal > 0.9 * NEW_TOKENS * len(prompts), "too few tokens were compared to prove anything"
    assert len({token for ours in found for token in ours.tokens}) > 6, "continuations do not wander"
