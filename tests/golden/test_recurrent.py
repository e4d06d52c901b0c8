"""Families with recurrent layers against transformers: greedy tokens, logits, and bits under chunking, in one run.

Prompts are longer than the pieces that transformers computes prompts in.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import RECURRENT, make_checkpoint
from tests.executor_svc.driver import Model
from tests.golden.test_model_families import serve
from tests.golden.test_newer_families import LENGTHS, NEW_TOKENS, VOCABULARY, check_greedy
from tests.helpers.models.golden import (
    check_bfloat16,
    check_bits_of_chunks,
    random_prompts,
    transformers_greedy,
    transformers_model,
)
from tests.helpers.models.quantized_layouts import quantize_checkpoint
from tests.helpers.models.qwen_mtp import make_qwen_mtp
from tests.helpers.models.stacked_experts import by_expert, stack_again
from tests.helpers.models.wrapped_text import wrap_text

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in RECURRENT},
    "falcon_h1 with a norm": (
        "falcon_h1",
        {
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_proj_bias": True,
            "ssm_in_multiplier": 1.0,
            "attention_bias": True,
            "attention_in_multiplier": 1.0,
        },
    ),
    "falcon_h1 with a norm before": ("falcon_h1", {"mamba_rms_norm": True, "mamba_conv_bias": False}),
    "granite_h without experts": (
        "granite_h",
        {"num_local_experts": 0, "position_embedding_type": "rope", "mamba_proj_bias": True},
    ),
    "granite_h with limits": ("granite_h", {"time_step_limit": [0.2, 1.0]}),
    "granite_h of heads that leave a rest": (
        "granite_h",
        {
            "hidden_size": 44,
            "mamba_d_head": 11,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "num_local_experts": 0,
        },
    ),
    "kimi_linear of dense layers alone": ("kimi_linear", {"mlp_layer_types": ["dense"] * 3, "q_lora_rank": 16}),
    "kimi_linear of dense layers": ("kimi_linear", {"mlp_layer_types": ["dense", "sparse", "dense"]}),
    "lfm2 of one size": ("lfm2", {"block_auto_adjust_ff_dim": False, "conv_bias": False, "conv_L_cache": 7}),
    "nemotron_h of all biases": (
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
            "mlp_bias": True,
            "use_bias": True,
            "attention_bias": True,  # transformers' code has none
            "n_groups": 4,
        },
    ),
    "qwen3_5 of one key head": (
        "qwen3_5_delta",
        {"linear_num_key_heads": 1, "linear_num_value_heads": 3, "initializer_range": 0.15},
    ),
    "qwen3_5 of a part that is odd": (
        "qwen3_5_delta",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.25}},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_family(tmp_path: Path, name: str) -> None:
    family, shape = CASES[name]
    folder = make_checkpoint(tmp_path, family, **shape)
    check_greedy(folder, folder)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", CASES)
def test_bits_in_bfloat16(tmp_path: Path, name: str) -> None:
    family, shape = CASES[name]
    folder = make_checkpoint(tmp_path, family, **shape)
    check_bits_of_chunks(check_bfloat16(folder, random_prompts(VOCABULARY, (90,))[0], median=True))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["granite_h", "kimi_linear", "lfm2", "qwen3_5_delta"])
async def test_through_both_services_with_a_draft_model(tmp_path: Path, family: str) -> None:
    """In small chunks, from a pool too small for all requests, with drafts of a model without recurrent layers."""
    folder, draft = make_checkpoint(tmp_path / "target", family), make_checkpoint(tmp_path / "draft", "llama")
    reference, prompts = transformers_model(folder), random_prompts(VOCABULARY, (*LENGTHS, 90))
    outputs = await serve(folder, prompts, ignore_eos=True, speculative="draft", speculative_model=str(draft))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == transformers_greedy(reference, prompt, NEW_TOKENS).tokens


@pytest.mark.slow
async def test_through_both_services_with_a_head(tmp_path: Path) -> None:
    """As above, with drafts of a head of multi-token prediction, of which most are rejected."""
    folder = make_qwen_mtp(tmp_path, "qwen3_5_delta")
    reference, prompts = transformers_model(folder), random_prompts(VOCABULARY, (*LENGTHS, 90))
    outputs = await serve(folder, prompts, ignore_eos=True, speculative="mtp")
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == transformers_greedy(reference, prompt, NEW_TOKENS).tokens


WRAPPED = [
    ("qwen3_5_delta", "qwen3_5", "Qwen3_5ForConditionalGeneration"),
    ("qwen3_5_moe_text", "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
]


@pytest.mark.parametrize(("family", "outer", "name"), WRAPPED)
def test_text_part_of_models_for_images(tmp_path: Path, family: str, outer: str, name: str) -> None:
    folder = make_checkpoint(tmp_path / "text", family)
    more = {"mtp.layers.0.input_layernorm.weight": torch.ones(3)}
    wrapped = wrap_text(folder, tmp_path / "wrapped", outer, name)
    path = wrapped / "model.safetensors"
    save_file(load_file(path) | more, path, metadata={"format": "pt"})
    check_greedy(wrapped, folder)


_WIDE = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "moe_intermediate_size": 64}
"""Columns in whole groups."""
_DELTA: dict[str, Any] = {
    **_WIDE,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 64,
}
FEW_BITS: list[tuple[str, str, dict[str, Any]]] = [
    ("falcon_h1", "w4a16", {**_WIDE, "mamba_d_ssm": 128, "mamba_d_head": 16}),
    ("granite_h", "w4a16", {**_WIDE, "mamba_d_head": 16, "shared_intermediate_size": 64}),
    (
        "kimi_linear",
        "awq",
        {
            **_WIDE,
            "linear_head_dim": 32,
            "linear_num_heads": 8,
            "mlp_layer_types": ["sparse"] * 3,
            "kv_lora_rank": 32,
            "v_head_dim": 16,
        },
    ),
    ("lfm2", "gptq with desc_act", {**_WIDE, "block_auto_adjust_ff_dim": False, "conv_bias": False}),
    ("nemotron_h", "gptq", {**_WIDE, "mamba_head_dim": 16, "moe_shared_expert_intermediate_size": 64}),
    ("qwen3_5_delta", "gptq", _DELTA | {"attention_bias": False}),
    ("qwen3_next_delta", "awq", _DELTA),
    ("qwen3_next_delta", "w8a8", _DELTA),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("family", "layout", "shape"), FEW_BITS, ids=[f"{row[0]} {row[1]}" for row in FEW_BITS])
def test_in_few_bits(tmp_path: Path, family: str, layout: str, shape: dict[str, Any]) -> None:
    """Greedy tokens are those of transformers on the dequantized weights, of recurrences too."""
    folder = make_checkpoint(tmp_path / "made", family, **shape)
    by_expert(folder)
    quantized, dense = tmp_path / "quantized", tmp_path / "dense"
    quantize_checkpoint(folder, layout, quantized, dense)
    stack_again(dense)
    check_greedy(quantized, dense, dtype="float32", quantized_activations="off")


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_rounded_at_load(tmp_path: Path, bits: str) -> None:
    folder = make_checkpoint(tmp_path, "qwen3_next_delta", **_DELTA)
    rounded = Model(folder, quantization=bits, quantized_activations="off", dtype="bfloat16")
    check_bits_of_chunks(rounded)
    assert rounded.device.few_bits.forms


@pytest.mark.parametrize(("family", "shape"), [("qwen3_next_delta", _DELTA), ("lfm2", {**_WIDE, "conv_bias": True})])
def test_what_is_saved_in_few_bits_is_the_model_that_saved_it(
    tmp_path: Path, family: str, shape: dict[str, Any]
) -> None:
    """Rows that lie by key head, biases, convolutions."""
    folder, saved = make_checkpoint(tmp_path / "made", family, **shape), tmp_path / "saved"
    (prompt,) = random_prompts(VOCABULARY, (40,))
    options: dict[str, Any] = {"quantization": "int4", "dtype": "bfloat16"}
    first = Model(folder, save_quantized=str(saved), **options).whole(prompt)
    assert torch.equal(Model(saved, dtype="bfloat16").whole(prompt), first)
