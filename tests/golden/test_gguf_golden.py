"""Models of GGUF files against transformers on the dequantized weights: greedy tokens and logits, for each family."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Type

from cadenza import AsyncClient, SamplingParams
from tests.checkpoints import make_checkpoint
from tests.executor_svc.driver import Model
from tests.helpers.marks import short_and_long
from tests.helpers.models.gguf_files import Kinds, all_of, dequantized, low_bits, write_gguf
from tests.helpers.models.golden import compare_greedy, our_greedy, random_prompts, transformers_model
from tests.helpers.services import cadenza_services

NEW_TOKENS = 16
CLOSE = 5e-5
LENGTHS = (3, 17, 60)
SHAPE: dict[str, Any] = {"vocab_size": 160, "hidden_size": 64, "intermediate_size": 96}
"""Rows of blocks of 32 columns."""
MIXED = Path(__file__).parents[1] / "data" / "gguf" / "llama-q4_k_m.gguf"
EXACT: dict[str, Any] = {"dtype": "float32", "quantized_activations": "off"}
EIGHT_BITS = all_of(Type.Q8_0)
HEADS = {"head_dim": 16}
LATENT = {"kv_lora_rank": 32, "moe_intermediate_size": 32, "v_head_dim": 24}
DEEP_YARN = {"factor": 16.0, "original_max_position_embeddings": 32, "mscale": 0.9, "mscale_all_dim": 0.9}
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
"""Rows of whole blocks of 256 columns."""


def mixed(name: str) -> Type:
    """Return another type for each part of a fused projection, one of them dense."""
    parts = {"attn_q": Type.Q5_1, "attn_k": Type.Q8_0, "attn_v": Type.F16, "ffn_gate": Type.Q4_1, "ffn_up": Type.Q5_0}
    return next((kind for part, kind in parts.items() if f".{part}." in name), Type.Q8_0)


def split_in_f32(name: str) -> Type:
    """Return 8 bits, but for what makes keys and values of latents: files have keys turned."""
    return Type.F32 if any(part in name for part in ("attn_k_b", "attn_v_b", "attn_kv_b")) else Type.Q8_0


@dataclass(frozen=True)
class Case:
    """A checkpoint and the types of its tensors."""

    family: str
    kinds: Kinds = EIGHT_BITS
    shape: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 5000.0, **fields}}


LONG = {"short_factor": [1.0 + 0.1 * i for i in range(6)], "long_factor": [1.5 + i for i in range(6)]}
MIXTURE_LONG = {
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.5 + i for i in range(8)],
    "short_mscale": 1.0,
    "long_mscale": 1.0,
    "original_max_position_embeddings": 512,
}
CASES = {
    "llama": Case("llama", mixed),
    "llama, dense": Case("llama", all_of(Type.BF16), {"attention_bias": True, "tie_word_embeddings": True}),
    "llama, rope_freqs": Case(
        "llama",
        all_of(Type.Q4_0),
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32),
    ),
    "llama, yarn": Case("llama", shape=rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "mistral": Case("mistral", shape=HEADS),
    "qwen2": Case("qwen2", shape={"use_sliding_window": False, **rope("linear", factor=4.0)}),
    "qwen3": Case("qwen3", shape={"head_dim": 32}),
    "gemma2": Case("gemma2", shape={**HEADS, "query_pre_attn_scalar": 16}),
    "gemma3": Case(
        "gemma3_text",
        shape={
            **HEADS,
            "query_pre_attn_scalar": 16,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 9000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
    "phi3": Case("phi3"),
    "phi3, longrope": Case(
        "phi3",
        shape={
            **rope("longrope", **LONG, partial_rotary_factor=0.75),
            "original_max_position_embeddings": 256,
        },
        options={"max_model_len": 256},
    ),
    "granite": Case("granite"),
    "apertus": Case(
        "apertus",
        shape=rope(
            "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
        ),
    ),
    "cohere2": Case("cohere2"),
    "ernie4_5": Case("ernie4_5", shape=HEADS),
    "exaone4": Case("exaone4", shape=HEADS),
    "gemma4": Case(
        "gemma4_text",
        mixed,
        {
            **HEADS,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": 160,
            "attention_bias": False,
            "intermediate_size": 64,
        },
    ),
    "glm4": Case("glm4", mixed, HEADS),
    "hunyuan": Case("hunyuan_v1_dense", shape=HEADS),
    "ministral3": Case("ministral3", mixed, HEADS),
    "nemotron": Case("nemotron", shape=rope("default", partial_rotary_factor=0.5)),
    "starcoder2": Case("starcoder2"),
    "falcon": Case("falcon", shape={"bias": False}),
    "falcon, two norms": Case(
        "falcon", shape={"new_decoder_architecture": True, "num_kv_heads": 2, "initializer_range": 0.3}
    ),
    "falcon, one norm": Case(
        "falcon",
        shape={"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1, "bias": False},
    ),
    "gpt2": Case("gpt2", shape={"n_embd": 64, "n_inner": 96}),
    "gpt_neox": Case("gpt_neox"),
    "granite_swa": Case(
        "granite_swa", shape={**HEADS, "layer_rope_theta": [5000.0, 0, 5000.0, 5000.0]} | rope("default")
    ),
    "phi": Case("phi"),
    "olmo2": Case("olmo2"),
    "olmo3": Case(
        "olmo3",
        shape={
            "rope_parameters": {
                "full_attention": rope("yarn", factor=4.0, original_max_position_embeddings=64)["rope_parameters"],
                "sliding_attention": rope("default")["rope_parameters"],
            }
        },
    ),
    "seed_oss": Case("seed_oss", shape=HEADS),
    "smollm3": Case("smollm3", shape={"no_rope_layers": [1, 1, 1, 0]}),
    "llama, low bits": Case("llama", low_bits, WIDE),
    "deepseek_v2": Case("deepseek_v2", mixed, {**LATENT, **rope("yarn", **DEEP_YARN)}),
    "deepseek_v3": Case(
        "deepseek_v3",
        split_in_f32,
        {**LATENT, **rope("yarn", **DEEP_YARN), "q_lora_rank": 64, "attention_bias": False},
    ),
    "glm4_moe_lite": Case("glm4_moe_lite", split_in_f32, {**LATENT, "q_lora_rank": 64}),
    "mistral4, in F32": Case("mistral4", all_of(Type.F32), rope("yarn", **DEEP_YARN, llama_4_scaling_beta=0.3)),
    "ernie4_5_moe": Case("ernie4_5_moe", mixed, {"moe_intermediate_size": 32, "moe_layer_end_index": -1}),
    "exaone_moe": Case("exaone_moe", shape={**HEADS, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1}),
    "gemma4 with experts": Case(
        "gemma4_text",
        mixed,
        {
            **HEADS,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "attention_bias": False,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "glm4_moe": Case("glm4_moe", shape={**HEADS, "moe_intermediate_size": 32}),
    "gpt_oss, all in F32": Case("gpt_oss", all_of(Type.F32), HEADS),
    "granitemoe": Case("granitemoe", mixed),
    "granitemoeshared": Case("granitemoeshared", mixed),
    "granitemoe_swa": Case(
        "granitemoe_swa", shape={**HEADS, "layer_rope_theta": [5000.0, 0, 5000.0, 5000.0]} | rope("default")
    ),
    "hunyuan_moe": Case("hunyuan_v1_moe", mixed, HEADS),
    "llama4": Case(
        "llama4_text",
        mixed,
        {
            **HEADS,
            "interleave_moe_layer_step": 2,
            "moe_layers": None,
            "intermediate_size": 64,
            "intermediate_size_mlp": 96,
            "attention_chunk_size": 8192,
            "floor_scale": 8192,
            "attn_scale": 0.1,
            "attention_bias": False,
            "num_local_experts": 4,
        },
    ),
    "minimax_m2": Case("minimax_m2", shape={**HEADS, "rotary_dim": 8}),
    "mixtral": Case("mixtral", mixed, HEADS),
    "olmoe": Case("olmoe", all_of(Type.Q4_1)),
    "phimoe": Case(
        "phimoe", mixed, {"router_jitter_noise": 0.01, **rope("longrope", **MIXTURE_LONG)}, {"max_model_len": 512}
    ),
    "qwen2_moe": Case(
        "qwen2_moe", shape={"moe_intermediate_size": 64, "shared_expert_intermediate_size": 32, "mlp_only_layers": []}
    ),
    "qwen3_moe": Case("qwen3_moe", shape={"head_dim": 32, "moe_intermediate_size": 64}),
}
"""Most in 8 bits: each type's kernels are compiled anew in each process."""
OTHER_KINDS = {
    "mistral": all_of(Type.Q4_0),
    "qwen3": all_of(Type.Q5_1),
    "gemma3": mixed,
    "phi3": all_of(Type.Q4_1),
    "granite": all_of(Type.Q5_0),
}
LOW_BITS = ("Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS", "MXFP4", "TQ1_0", "TQ2_0", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS",
            "IQ2_XXS", "IQ1_M", "IQ1_S")  # fmt: skip
LOW = {f"llama, {name}": Case("llama", all_of(Type[name]), WIDE) for name in LOW_BITS}
IN_OTHER_KINDS = LOW | {
    f"{name}, other types": replace(CASES[name], kinds=kinds) for name, kinds in OTHER_KINDS.items()
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", short_and_long([*CASES, *IN_OTHER_KINDS], CASES))
def test_greedy_equals_transformers(tmp_path: Path, name: str) -> None:
    case = {**CASES, **IN_OTHER_KINDS}[name]
    folder = make_checkpoint(tmp_path / "source", case.family, **{**SHAPE, **case.shape})
    file = write_gguf(folder, tmp_path / "model.gguf", case.kinds)
    reference = transformers_model(dequantized(folder, tmp_path / "dequantized", case.kinds))
    prompts = random_prompts(SHAPE["vocab_size"], LENGTHS)
    found = our_greedy(Model(file, **EXACT, **case.options), prompts, NEW_TOKENS)
    equal = 0
    for prompt, ours in zip(prompts, found, strict=True):
        equal += compare_greedy(ours, reference, prompt, CLOSE)
    assert equal > 0.9 * NEW_TOKENS * len(prompts), "too few tokens were compared to prove anything"
    assert len({token for ours in found for token in ours.tokens}) > 6, "continuations do not wander"


@pytest.mark.long
async def test_through_both_services() -> None:
    """A file of llama.cpp that mixes formats, without a tokenizer."""
    prompts = random_prompts(96, LENGTHS)
    found = our_greedy(Model(MIXED, **EXACT), prompts, NEW_TOKENS)
    limits: dict[str, Any] = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "block_size": 8,
        "num_gpu_blocks": 36,
        "num_threads": 1,
    }
    async with cadenza_services(MIXED, **EXACT, **limits) as running, AsyncClient(running.target) as client:
        params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
        outputs = await client.generate(prompts, params)
    assert [output.outputs[0].token_ids for output in outputs] == [each.tokens for each in found]
