"""Families with parts of their own against transformers: greedy tokens, logits, and bits under chunking, in one run.

Texts are several times as long as the windows, and longer than the original lengths of scaled embeddings.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import NEWER, blend, edit_config, make_checkpoint
from tests.executor_svc.driver import Model
from tests.golden.test_model_families import serve
from tests.helpers.models.golden import (
    check_bfloat16,
    check_bits_of_chunks,
    compare_greedy,
    our_greedy,
    random_prompts,
    transformers_greedy,
    transformers_model,
)
from tests.helpers.models.quantized_layouts import quantize_checkpoint

NEW_TOKENS = 16
CLOSE = 2e-5
LENGTHS = (1, 3, 17, 64, 90)
VOCABULARY = 131

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in NEWER},
    "exaone4 without window": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "falcon of few KV heads": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": False}),
    "falcon of one norm": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon one after the other": ("falcon", {"multi_query": False, "parallel_attn": False}),
    "gpt2 with a head of its own": ("gpt2", {"tie_word_embeddings": False, "activation_function": "gelu"}),
    "gpt_neox one after the other": (
        "gpt_neox",
        {"use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_fast"},
    ),
    "opt without biases": ("opt", {"enable_bias": False, "activation_function": "gelu", "ffn_dim": 160}),
    "phi of few KV heads": ("phi", {"num_key_value_heads": 2}),
    "glm4 of few dimensions": ("glm4", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.2}}),
    "granitemoehybrid without rope": ("granitemoehybrid", {"position_embedding_type": None, "attention_bias": True}),
    "olmo2 of many KV heads": ("olmo2", {"num_key_value_heads": 4, "attention_bias": True, "initializer_range": 0.4}),
    "smollm3 with windows": (
        "smollm3",
        {"use_sliding_window": True, "sliding_window": 24, "attention_bias": True, "mlp_bias": True},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_family(tmp_path: Path, name: str) -> None:
    family, shape = CASES[name]
    folder = make_checkpoint(tmp_path, family, **shape)
    check_greedy(folder, folder)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", CASES)
def test_bits_in_bfloat16(tmp_path: Path, name: str) -> None:
    family, shape = CASES[name]
    folder = make_checkpoint(tmp_path, family, **shape)
    check_bits_of_chunks(check_bfloat16(folder, random_prompts(VOCABULARY, (90,))[0]))


def check_greedy(folder: Path, reference: Path, **options: Any) -> None:
    """Our tokens of a folder's model equal those of transformers of another folder's."""
    prompts, model = random_prompts(VOCABULARY, LENGTHS), transformers_model(reference)
    found = our_greedy(Model(folder, **options), prompts, NEW_TOKENS)
    equal = sum(compare_greedy(ours, model, prompt, CLOSE) for prompt, ours in zip(prompts, found, strict=True))
    assert equal > 0.9 * NEW_TOKENS * len(prompts), "too few tokens were compared to prove anything"
    assert len({token for ours in found for token in ours.tokens}) > 10, "continuations do not wander"


WRAPPED = [
    ("deepseek_v3", "kimi_k25", "KimiK25ForConditionalGeneration", "language_model.model.", "language_model."),
    ("gemma3_text", "gemma3", "Gemma3ForConditionalGeneration", "language_model.model.", "language_model."),
    ("gemma4_text", "gemma4", "Gemma4ForConditionalGeneration", "model.language_model.", ""),
    ("llama4_text", "llama4", "Llama4ForConditionalGeneration", "language_model.model.", "language_model."),
    ("mistral", "mistral3", "Mistral3ForConditionalGeneration", "language_model.model.", "language_model."),
    ("ministral3", "mistral3", "Mistral3ForConditionalGeneration", "model.language_model.", ""),
    ("mistral4", "mistral3", "Mistral3ForConditionalGeneration", "language_model.model.", "language_model."),
    ("qwen3_5_text", "qwen3_5", "Qwen3_5ForConditionalGeneration", "model.language_model.", ""),
]


@pytest.mark.parametrize(("family", "outer", "name", "prefix", "head"), WRAPPED, ids=[row[0] for row in WRAPPED])
def test_text_part_of_models_for_images(
    tmp_path: Path, family: str, outer: str, name: str, prefix: str, head: str
) -> None:
    folder, wrapped = make_checkpoint(tmp_path / "text", family), tmp_path / "wrapped"
    wrapped.mkdir()
    tensors = load_file(folder / "model.safetensors")
    renamed = {prefix + key.removeprefix("model.") if key.startswith("model.") else head + key: value
               for key, value in tensors.items()}  # fmt: skip
    others = "model." if prefix.startswith("model.") else ""
    renamed[f"{others}vision_tower.encoder.layers.0.layer_norm1.weight"] = torch.ones(3)
    renamed[f"{others}vision_tower.encoder.layers.0.input_layernorm.weight"] = torch.ones(3)
    renamed[f"{others}multi_modal_projector.linear.weight"] = torch.ones(3, 3)
    if outer == "qwen3_5":
        renamed["model.visual.blocks.0.norm1.weight"] = torch.ones(3)
        renamed["mtp.layers.0.input_layernorm.weight"] = torch.ones(3)
    save_file(renamed, wrapped / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((folder / "config.json").read_text())
    tied = {"tie_word_embeddings": text.pop("tie_word_embeddings")}
    text["architectures"] = None
    content = {"architectures": [name], "model_type": outer, "text_config": text, "vision_config": {}, **tied}
    (wrapped / "config.json").write_text(json.dumps(content))
    check_greedy(wrapped, folder)


def test_ignored_linears_of_a_text_part_have_the_names_of_the_files(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path / "made", "mistral", hidden_size=64, intermediate_size=96, head_dim=16)
    quantized, dense = tmp_path / "quantized", tmp_path / "dense"
    quantize_checkpoint(made, "w4a16", quantized, dense)
    tensors, whole = load_file(quantized / "model.safetensors"), load_file(made / "model.safetensors")
    module = "model.layers.1.mlp.down_proj"
    tensors = {name: value for name, value in tensors.items() if not name.startswith(f"{module}.")}
    tensors[f"{module}.weight"] = whole[f"{module}.weight"]
    renamed = {f"language_model.{name}": value for name, value in tensors.items()}
    save_file(renamed, quantized / "model.safetensors", metadata={"format": "pt"})
    content = json.loads((quantized / "config.json").read_text())
    ignore = [*content["quantization_config"].get("ignore", []), f"language_model.{module}", "language_model.lm_head"]
    edit_config(quantized, quantization_config={**content["quantization_config"], "ignore": ignore})
    assert Model(quantized).whole([3, 4, 5]).isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["cohere2", "glm4", "gpt2", "granite_swa"])
async def test_through_both_services_with_a_draft_model(tmp_path: Path, family: str) -> None:
    """In small chunks, from a pool too small for all requests, with drafts of a model of the same family."""
    folder, draft = (make_checkpoint(tmp_path / str(seed), family, seed=seed) for seed in range(2))
    blend(draft, folder, 0.05)
    reference, prompts = transformers_model(folder), random_prompts(VOCABULARY, (*LENGTHS, 90))
    outputs = await serve(folder, prompts, ignore_eos=True, speculative="draft", speculative_model=str(draft))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == transformers_greedy(reference, prompt, NEW_TOKENS).tokens
