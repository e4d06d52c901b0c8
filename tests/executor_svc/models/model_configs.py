"""Small configs of every family, as config.json has them, and what is read from them."""

from __future__ import annotations

from typing import Any

from executor_svc.models.registry import ARCHITECTURES
from executor_svc.models.specs.spec import DecoderSpec
from tests.checkpoints import MIXTURES

NAMES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "mimo": "MiMoForCausalLM",
    "apertus": "ApertusForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "falcon": "FalconForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_neox": "GPTNeoXForCausalLM",
    "granite_swa": "GraniteSWAForCausalLM",
    "opt": "OPTForCausalLM",
    "phi": "PhiForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma4": "Gemma4ForConditionalGeneration",
    "llama4": "Llama4ForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "exaone_moe": "ExaoneMoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "granitemoe_swa": "GraniteMoeSWAForCausalLM",
    "granitemoeshared": "GraniteMoeSharedForCausalLM",
    "hunyuan_v1_moe": "HunYuanMoEV1ForCausalLM",
    "kimi_k25": "KimiK25ForConditionalGeneration",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "phimoe": "PhimoeForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "granite_h": "GraniteMoeHybridForCausalLM",
    "kimi_linear": "KimiLinearForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "lfm3": "Lfm3ForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "qwen3_5_delta": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_next_delta": "Qwen3NextForCausalLM",
}
SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
WRAPPED = ("gemma3", "gemma4", "kimi_k25", "llama4", "mistral3", "qwen3_5", "qwen3_5_moe")
"""Their decoder's fields are in `text_config`."""
ALWAYS: dict[str, dict[str, Any]] = {
    "gpt_neox": {"rotary_pct": 0.5},
    "granitemoehybrid": {"layer_types": ["attention"] * 6},
    **{family: {"num_experts": 8, "num_experts_per_tok": 2} for family in (*MIXTURES, "kimi_k25")},
    "qwen3_next": {"num_experts": 8, "num_experts_per_tok": 2, "layer_types": ["full_attention"] * 6},
    "llama4": {"moe_layers": []},
    "llama4_text": {"moe_layers": []},
    "qwen3_5": {"layer_types": ["full_attention"] * 6},
    "qwen3_5_text": {"layer_types": ["full_attention"] * 6},
    "falcon_h1": {"mamba_d_ssm": 96, "mamba_n_heads": 8},
    "granite_h": {"layer_types": ["mamba", "attention"] * 3, "mamba_n_heads": 8, "num_local_experts": 8,
                  "num_experts_per_tok": 2},
    "kimi_linear": {"num_experts": 8, "num_experts_per_token": 2, "linear_attn_config": {
        "full_attn_layers": [2, 6], "kda_layers": [1, 3, 4, 5], "num_heads": 3, "head_dim": 16}},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 3},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 3},
    "nemotron_h": {"hybrid_override_pattern": "ME*-ME"},
}  # fmt: skip
LONG = {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

WRONG: list[Any] = [
    [], {}, "", "x" * 10**6, True, False, -1, 3.5, 1e308, float("nan"), float("inf"), 10**400, -(10**400), ["a"],
    {"a": {}}, [[]] * 10**5, "\x1b[31m\n", 2**63,
]  # fmt: skip
"""Values that few fields may have."""


def read(family: str, **fields: Any) -> DecoderSpec:
    if family in WRAPPED:
        return ARCHITECTURES[NAMES[family]]({"text_config": SIZES | ALWAYS.get(family, {})} | fields)
    return ARCHITECTURES[NAMES[family]]({**SIZES, **ALWAYS.get(family, {}), **fields})
