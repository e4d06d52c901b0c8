"""The architectures with code in Cadenza, by their names in config.json. docs/models.md describes each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cadenza_common.brief import brief
from executor_svc.models.families.apertus import read_apertus
from executor_svc.models.families.cohere import read_cohere2
from executor_svc.models.families.deepseek import (
    read_deepseek_v2,
    read_deepseek_v3,
    read_glm4_moe_lite,
    read_mistral4,
)
from executor_svc.models.families.ernie import read_ernie
from executor_svc.models.families.exaone import read_exaone4
from executor_svc.models.families.falcon import read_falcon
from executor_svc.models.families.falcon_h1 import read_falcon_h1
from executor_svc.models.families.gemma import read_gemma2, read_gemma3
from executor_svc.models.families.gemma4 import read_gemma4
from executor_svc.models.families.glm4 import read_glm4
from executor_svc.models.families.gpt2 import is_opt_of_one_width, read_gpt2, read_opt
from executor_svc.models.families.gpt_oss import read_gpt_oss
from executor_svc.models.families.granite import read_granite, read_granite_swa
from executor_svc.models.families.granite_hybrid import read_granite_4
from executor_svc.models.families.hunyuan import read_hunyuan
from executor_svc.models.families.kimi_linear import read_kimi_linear
from executor_svc.models.families.lfm2 import read_lfm2, read_lfm2_moe
from executor_svc.models.families.lfm3 import read_lfm3
from executor_svc.models.families.llama import read_llama, read_seed_oss, read_smollm3
from executor_svc.models.families.llama4 import read_llama4
from executor_svc.models.families.mimo import read_mimo
from executor_svc.models.families.mistral import read_ministral3, read_mistral
from executor_svc.models.families.mixtures import (
    read_ernie_moe,
    read_exaone_moe,
    read_glm4_moe,
    read_granite_moe,
    read_granite_moe_swa,
    read_hunyuan_moe,
    read_minimax_m2,
    read_mixtral,
    read_olmoe,
    read_qwen2_moe,
    read_qwen3_moe,
)
from executor_svc.models.families.nemotron import read_nemotron
from executor_svc.models.families.nemotron_h import read_nemotron_h
from executor_svc.models.families.neox import read_gpt_neox
from executor_svc.models.families.olmo import read_olmo2, read_olmo3
from executor_svc.models.families.phi import has_plain_heads, read_phi
from executor_svc.models.families.phi3 import read_phi3, read_phimoe
from executor_svc.models.families.qwen import read_qwen2, read_qwen3
from executor_svc.models.families.qwen3_5 import read_qwen3_5, read_qwen3_5_moe, read_qwen3_next
from executor_svc.models.families.starcoder import read_starcoder2
from executor_svc.models.families.wrapped import (
    read_gemma3_wrapped,
    read_gemma4_wrapped,
    read_kimi_wrapped,
    read_llama4_wrapped,
    read_mistral3_wrapped,
    read_qwen3_5_moe_wrapped,
    read_qwen3_5_wrapped,
)
from executor_svc.models.specs.spec import DecoderSpec

ARCHITECTURES: dict[str, Callable[[dict[str, Any]], DecoderSpec]] = {
    "ApertusForCausalLM": read_apertus,
    "Cohere2ForCausalLM": read_cohere2,
    "DeepseekV2ForCausalLM": read_deepseek_v2,
    "DeepseekV3ForCausalLM": read_deepseek_v3,
    "Ernie4_5ForCausalLM": read_ernie,
    "Ernie4_5_MoeForCausalLM": read_ernie_moe,
    "Exaone4ForCausalLM": read_exaone4,
    "ExaoneMoeForCausalLM": read_exaone_moe,
    "FalconForCausalLM": read_falcon,
    "FalconH1ForCausalLM": read_falcon_h1,
    "GPT2LMHeadModel": read_gpt2,
    "GPTNeoXForCausalLM": read_gpt_neox,
    "Gemma2ForCausalLM": read_gemma2,
    "Gemma3ForCausalLM": read_gemma3,
    "Gemma3ForConditionalGeneration": read_gemma3_wrapped,
    "Gemma4ForCausalLM": read_gemma4,
    "Gemma4ForConditionalGeneration": read_gemma4_wrapped,
    "Glm4ForCausalLM": read_glm4,
    "Glm4MoeForCausalLM": read_glm4_moe,
    "Glm4MoeLiteForCausalLM": read_glm4_moe_lite,
    "GptOssForCausalLM": read_gpt_oss,
    "GraniteForCausalLM": read_granite,
    "GraniteMoeForCausalLM": read_granite_moe,
    "GraniteMoeHybridForCausalLM": read_granite_4,
    "GraniteMoeSWAForCausalLM": read_granite_moe_swa,
    "GraniteMoeSharedForCausalLM": read_granite_moe,
    "GraniteSWAForCausalLM": read_granite_swa,
    "HunYuanDenseV1ForCausalLM": read_hunyuan,
    "HunYuanMoEV1ForCausalLM": read_hunyuan_moe,
    "KimiK25ForConditionalGeneration": read_kimi_wrapped,
    "KimiLinearForCausalLM": read_kimi_linear,
    "Lfm2ForCausalLM": read_lfm2,
    "Lfm2MoeForCausalLM": read_lfm2_moe,
    "Lfm3ForCausalLM": read_lfm3,
    "Llama4ForCausalLM": read_llama4,
    "Llama4ForConditionalGeneration": read_llama4_wrapped,
    "LlamaForCausalLM": read_llama,
    "MiMoForCausalLM": read_mimo,
    "MiniMaxM2ForCausalLM": read_minimax_m2,
    "Ministral3ForCausalLM": read_ministral3,
    "Mistral3ForConditionalGeneration": read_mistral3_wrapped,
    "Mistral4ForCausalLM": read_mistral4,
    "MistralForCausalLM": read_mistral,
    "MixtralForCausalLM": read_mixtral,
    "NemotronForCausalLM": read_nemotron,
    "NemotronHForCausalLM": read_nemotron_h,
    "OPTForCausalLM": read_opt,
    "Olmo2ForCausalLM": read_olmo2,
    "Olmo3ForCausalLM": read_olmo3,
    "OlmoeForCausalLM": read_olmoe,
    "Phi3ForCausalLM": read_phi3,
    "PhiForCausalLM": read_phi,
    "PhimoeForCausalLM": read_phimoe,
    "Qwen2ForCausalLM": read_qwen2,
    "Qwen2MoeForCausalLM": read_qwen2_moe,
    "Qwen3ForCausalLM": read_qwen3,
    "Qwen3MoeForCausalLM": read_qwen3_moe,
    "Qwen3NextForCausalLM": read_qwen3_next,
    "Qwen3_5ForCausalLM": read_qwen3_5,
    "Qwen3_5ForConditionalGeneration": read_qwen3_5_wrapped,
    "Qwen3_5MoeForCausalLM": read_qwen3_5_moe,
    "Qwen3_5MoeForConditionalGeneration": read_qwen3_5_moe_wrapped,
    "SeedOssForCausalLM": read_seed_oss,
    "SmolLM3ForCausalLM": read_smollm3,
    "Starcoder2ForCausalLM": read_starcoder2,
}
_FORMS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "OPTForCausalLM": is_opt_of_one_width,
    "PhiForCausalLM": has_plain_heads,
}
"""Whether a config.json is of the form that there is code for; others run through transformers."""
_OLD_NAMES = {
    "ExaoneMoEForCausalLM": "ExaoneMoeForCausalLM",
    "Kimi_K25ForConditionalGeneration": "KimiK25ForConditionalGeneration",
    "LLaMAForCausalLM": "LlamaForCausalLM",
    "PhiMoEForCausalLM": "PhimoeForCausalLM",
}
"""Names that the same models have in other files: of before transformers had the model, or as transformers calls it."""

_INDEXER = "attention to keys that an indexer chooses is not supported"
_REFUSED = {
    "DeepseekV32ForCausalLM": _INDEXER,
    "DeepseekV4ForCausalLM": "attention to keys that an indexer chooses, and hyper-connections, are not supported",
    "GlmMoeDsaForCausalLM": _INDEXER,
    "MiniMaxM3SparseForCausalLM": _INDEXER,
    "MiniMaxM3SparseForConditionalGeneration": _INDEXER,
    "MiniMaxM3VLForCausalLM": _INDEXER,
}
"""Architectures that transformers' code, too, would run otherwise than they are meant, and why."""
_MOST_NAMED = 200
"""Characters of names in a message."""
_MODEL_TYPES = {
    "apertus": "ApertusForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "exaone_moe": "ExaoneMoeForCausalLM",
    "falcon": "FalconForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4": "Gemma4ForConditionalGeneration",
    "gemma4_text": "Gemma4ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_neox": "GPTNeoXForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM",
    "granite_swa": "GraniteSWAForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "granitemoe_swa": "GraniteMoeSWAForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "granitemoeshared": "GraniteMoeSharedForCausalLM",
    "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
    "hunyuan_v1_moe": "HunYuanMoEV1ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "kimi_k25": "KimiK25ForConditionalGeneration",
    "kimi_linear": "KimiLinearForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "lfm3": "Lfm3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4": "Llama4ForConditionalGeneration",
    "llama4_text": "Llama4ForCausalLM",
    "mimo": "MiMoForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mistral3": "Mistral3ForConditionalGeneration",
    "mistral4": "Mistral4ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "opt": "OPTForCausalLM",
    "phi": "PhiForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "phimoe": "PhimoeForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
}


def own_architecture(names: Sequence[str], model_type: object = None) -> str | None:
    """Return the first of the names in config.json with code in Cadenza.

    Without a name, or with that of the model without its head, such as LlamaModel: that of model_type.
    """
    found = next((name for each in names if (name := _OLD_NAMES.get(each, each)) in ARCHITECTURES), None)
    return found or (_MODEL_TYPES.get(str(model_type)) if has_no_head(names) else None)


def has_code(architecture: str, content: dict[str, Any]) -> bool:
    """Return whether there is code for the form of an architecture that a config.json describes."""
    return architecture not in _FORMS or _FORMS[architecture](content)


def has_no_head(names: Sequence[str]) -> bool:
    """Return whether these architectures do not say what the model is for: there is none, or the bare model."""
    return all(name.endswith("Model") and "Head" not in name for name in names)


def refused_architecture(names: Sequence[str]) -> str | None:
    """Return the error message for an architecture that is refused by its name; None for others."""
    found = next((name for name in names if name in _REFUSED), None)
    return None if found is None else f"architecture {found} in config.json: {_REFUSED[found]}"


def unknown_architecture(names: Sequence[str], model_type: object) -> str:
    """Return the error message for architectures that neither Cadenza nor transformers supports."""
    given = ", ".join(names)[:_MOST_NAMED] or "none"
    return (
        f"architecture {given} in config.json, with model_type {brief(model_type)}, is not supported; supported: the "
        f"{len(ARCHITECTURES)} of docs/models.md, such as LlamaForCausalLM, and most causal LMs of transformers, such "
        "as GPTJForCausalLM"
    )
