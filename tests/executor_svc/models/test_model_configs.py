"""What is read from config.json: older forms, limits on lengths, and what is refused, by the name of its field."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from executor_svc.models.base import ModelConfigError
from executor_svc.models.config_fields import Fields
from executor_svc.models.gguf.config_content import _ARCHITECTURES
from executor_svc.models.registry import ARCHITECTURES
from executor_svc.models.rope_fields import ROPE_TYPES
from executor_svc.models.spec import DecoderSpec
from tests.checkpoints import FAMILIES, MIXTURES, NEWER, RECURRENT
from tests.helpers.paths import ROOT

MODELS_PAGE = ROOT / "docs" / "models.md"

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

# Family, what a current transformers writes, what an older one wrote for the same model.
OLDER: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, {"rope_theta": 5e5}),
    (
        "llama",
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
    ),
    (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    ),
    ("mistral", {"sliding_window": 4096, "head_dim": 12}, {"rope_theta": 10000.0}),
    (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 24,
            "layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 4,
        },
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2},
    ),
    (
        "qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
        {
            "rope_theta": 1e6,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            "use_sliding_window": False,
            "sliding_window": 24,
            "max_window_layers": 1,
        },
    ),
    ("qwen3", {"head_dim": 128, "layer_types": ["full_attention"] * 6}, {"sliding_window": None}),
    (
        "gemma2",
        {
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "head_dim": 256,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        {"hidden_act": "gelu_pytorch_tanh", "rope_theta": 10000.0, "rope_scaling": None},
    ),
    (
        "gemma3_text",
        {
            "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 9000.0},
            },
        },
        {
            "sliding_window_pattern": 3,
            "rope_theta": 2e6,
            "rope_local_base_freq": 9000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    (
        "gemma3_text",
        {
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        {},
    ),
    (
        "phi3",
        {
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 1.0,
                **LONG,
                "original_max_position_embeddings": 64,
            },
        },
        {"original_max_position_embeddings": 64, "rope_theta": 10000.0, "rope_scaling": {"type": "longrope", **LONG}},
    ),
    (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}},
        {"rope_theta": 500.0, "partial_rotary_factor": 0.5, "rope_scaling": None},
    ),
    ("granite", {"rope_parameters": {"rope_type": "default", "rope_theta": 7e4}}, {"rope_theta": 7e4}),
]


def read(family: str, **fields: Any) -> DecoderSpec:
    if family in WRAPPED:
        return ARCHITECTURES[NAMES[family]]({"text_config": SIZES | ALWAYS.get(family, {})} | fields)
    return ARCHITECTURES[NAMES[family]]({**SIZES, **ALWAYS.get(family, {}), **fields})


@pytest.mark.parametrize(("family", "new", "old"), OLDER, ids=[f"{i}-{row[0]}" for i, row in enumerate(OLDER)])
def test_older_forms_describe_the_same_model(family: str, new: dict[str, Any], old: dict[str, Any]) -> None:
    """To us, and to transformers."""
    from transformers import AutoConfig

    assert read(family, **old) == read(family, **new)
    theirs_old, theirs_new = (
        AutoConfig.for_model(family, pad_token_id=None, **SIZES, **fields).to_dict() for fields in (old, new)
    )
    for name in ("layer_types", "rope_parameters", "tie_word_embeddings", "head_dim"):
        assert _without_type(theirs_old.get(name)) == _without_type(theirs_new.get(name)), name
    saved = {name: value for name, value in theirs_new.items() if name not in ("architectures", "model_type")}
    assert read(family, **saved) == read(family, **new), "what transformers writes today"


@pytest.mark.parametrize("name", ["su", "yarn"])
def test_names_that_phi3_had_for_longrope(name: str) -> None:
    forms = [{"rope_scaling": {"type": kind, **LONG}} for kind in (name, "longrope")]
    assert read("phi3", **forms[0]) == read("phi3", **forms[1])


def _without_type(value: Any) -> Any:
    """Transformers keeps the older name of rope_type beside the new one."""
    return {name: entry for name, entry in value.items() if name != "type"} if isinstance(value, dict) else value


LIMITS: list[tuple[str, dict[str, Any], int]] = [
    ("llama", {}, 256),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.5}}, 640),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, 1024),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, 1024),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}}, 400),
    ("llama", {"rope_scaling": {"type": "llama3", **LLAMA3}}, 256),
    ("phi3", {"rope_scaling": {"type": "longrope", **LONG}, "original_max_position_embeddings": 64}, 256),
    ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 256),
    ("mistral", {"sliding_window": 32}, 256),
    ("mimo", {"sliding_window": 32, "use_sliding_window": False, "max_window_layers": 6}, 256),
]


@pytest.mark.parametrize(("family", "fields", "limit"), LIMITS)
def test_context_limit(family: str, fields: dict[str, Any], limit: int) -> None:
    assert read(family, **fields).context_limit == limit


def test_mimo_is_qwen2_with_a_head() -> None:
    for fields in ({}, {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2}):
        spec, plain = read("mimo", num_nextn_predict_layers=1, **fields), read("qwen2", **fields)
        assert replace(spec, num_mtp_layers=0) == plain
        assert spec.num_mtp_layers == 1
        assert spec.digest(256) == plain.digest(256), "a head says nothing of what the model computes"
    assert read("mimo").num_mtp_layers == read("mimo", num_nextn_predict_layers=0).num_mtp_layers == 0


def test_whose_heads_are_known() -> None:
    """The published config.json of Qwen3-Next names none; layers of Kimi Linear's are left alone."""
    assert read("qwen3_next_delta").num_mtp_layers == read("qwen3_5_delta", mtp_num_hidden_layers=1).num_mtp_layers == 1
    assert read("qwen3_5_delta").num_mtp_layers == 0
    assert read("kimi_linear", num_nextn_predict_layers=2).ignored == ("model.layers.6.", "model.layers.7.")


def scaled(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, **fields}}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"hidden_size": None}, "hidden_size must be a positive integer, not None"),
    ("llama", {"vocab_size": -5}, "vocab_size must be a positive integer, not -5"),
    ("llama", {"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, not 0"),
    ("llama", {"intermediate_size": 7.5}, "intermediate_size must be a positive integer, not 7.5"),
    ("llama", {"num_attention_heads": True}, "num_attention_heads must be a positive integer, not True"),
    ("llama", {"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
    ("llama", {"hidden_size": 46}, "hidden_size 46 is no multiple of num_attention_heads 4"),
    ("qwen3", {"head_dim": 11}, "head_dim 11 is odd"),
    ("llama", {"rms_norm_eps": -1e-6}, "rms_norm_eps must be a number above 0, not -1e-06"),
    ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number above 0, not nan"),
    ("llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false, not 'yes'"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu, swish"),
    ("llama", {"hidden_act": ["silu"]}, "hidden_act ['silu'] is not supported"),
    ("gemma2", {"hidden_activation": "relu"}, "hidden_activation 'relu' is not supported; supported: gelu_pytorch"),
    ("mistral", {"num_local_experts": 8}, "num_local_experts is 8: mixtures of experts"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0: Gemma 3 has no softcap"),
    ("gemma2", {"final_logit_softcapping": -30.0}, "final_logit_softcapping must be a number above 0, not -30.0"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a number above 0, not 0"),
    (
        "gemma2",
        {"layer_types": ["full_attention"]},
        "layer_types must be a list with num_hidden_layers 6 entries, not 1",
    ),
    ("qwen2", {"layer_types": ["chunked_attention"] * 6}, "layer_types 'chunked_attention' is not supported"),
    ("qwen2", {"layer_types": ["sliding_attention"] * 6}, "sliding_window must be a positive integer: layer_types has"),
    ("gemma2", {"sliding_window": None}, "sliding_window must be a positive integer: layer_types has"),
    ("mimo", {"attention_bias": False}, "attention_bias is false: MiMo has biases on q, k and v"),
    ("mimo", {"use_mrope": True}, "use_mrope is True: rotary embeddings of images"),
    ("mimo", {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers must be a positive integer, not -1"),
    ("mistral", {"sliding_window": 0}, "sliding_window must be a positive integer, not 0"),
    ("mistral", {"layer_types": ["full_attention"] * 6}, "layer_types is"),
    ("granite", {"residual_multiplier": "a"}, "residual_multiplier must be a number of at least 0, not 'a'"),
    ("granite", {"logits_scaling": 0}, "logits_scaling must be a number above 0, not 0"),
    ("llama", {"rope_scaling": 4.0}, "rope_scaling must be an object, not 4.0"),
    (
        "llama",
        scaled("mrope"),
        f"rope_parameters.rope_type 'mrope' is not supported; supported: {', '.join(ROPE_TYPES)}",
    ),
    ("llama", scaled(["yarn"]), "rope_parameters.rope_type must be a text, not ['yarn']"),
    ("llama", {"rope_scaling": {"type": "ntk"}}, "rope_scaling.type 'ntk' is not supported"),
    ("llama", scaled("linear"), "rope_parameters.factor must be a number of at least 1, not None"),
    ("llama", scaled("dynamic", factor=0.5), "rope_parameters.factor must be a number of at least 1, not 0.5"),
    ("llama", {**scaled("dynamic", factor=2), "head_dim": 2}, "rope_type 'dynamic' needs at least 4 rotated"),
    ("llama", scaled("default", rope_theta=1), "rope_parameters.rope_theta 1 must be above 1"),
    ("llama", {"rope_theta": "big"}, "rope_theta must be a number above 0, not 'big'"),
    (
        "llama",
        scaled("llama3", **{**LLAMA3, "high_freq_factor": 0.5}),
        "high_freq_factor 0.5 must be at least low_freq_factor 1",
    ),
    ("llama", scaled("llama3", factor=8.0), "rope_parameters.low_freq_factor must be a number above 0, not None"),
    ("llama", scaled("yarn", factor=4.0, beta_fast=1, beta_slow=2), "beta_fast 1 must be at least beta_slow 2"),
    ("llama", scaled("yarn", factor=4.0, truncate="no"), "truncate must be true or false, not 'no'"),
    ("llama", scaled("yarn", factor=4.0, mscale=-1), "mscale must be a number of at least 0, not -1"),
    (
        "llama",
        scaled("yarn", factor=2.0, original_max_position_embeddings=1),
        "original_max_position_embeddings 1 must",
    ),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported here; supported: 1"),
    (
        "llama",
        {"rope_parameters": {"full_attention": {}}},
        "full_attention is an object: rotary embeddings by layer type",
    ),
    ("gemma3_text", scaled("linear", factor=8.0), "rope_parameters of Gemma 3 must have objects full_attention and"),
    ("phi3", scaled("linear", factor=2.0), "'linear' is not supported; supported: default, longrope, su, yarn"),
    ("phi3", {"partial_rotary_factor": 0.6}, "partial_rotary_factor gives 7 rotated dimensions of head_dim 12"),
    ("phi3", {"partial_rotary_factor": 1.5}, "partial_rotary_factor gives 18 rotated dimensions of head_dim 12"),
    (
        "phi3",
        scaled("longrope", **{**LONG, "long_factor": [1.0]}),
        "long_factor must be a list of 6 numbers above 0, not 1",
    ),
    ("apertus", {"qk_norm": False}, "qk_norm is false: Apertus has norms of heads"),
    ("apertus", {"post_norm": True}, "post_norm is True: norms after"),
    (
        "apertus",
        {"hidden_act": "silu"},
        "hidden_act 'silu' is not supported; supported: xielu, relu2, gelu_pytorch_tanh",
    ),
    ("cohere2", {"use_qk_norm": True}, "use_qk_norm must be false"),
    ("cohere2", {"use_parallel_block": False}, "use_parallel_block must be true"),
    ("cohere2", {"logit_scale": 0}, "logit_scale must be a number of at least 1e-06, not 0"),
    ("cohere2", {"logit_scale": 1e-320}, "logit_scale must be"),
    ("cohere2", {"sliding_window": None}, "sliding_window must be a positive integer: layer_types has"),
    ("cohere2", scaled("dynamic", factor=2.0), "'dynamic' is not supported here"),
    ("ernie4_5", {"use_bias": 1}, "use_bias must be true or false, not 1"),
    ("exaone4", {"sliding_window_pattern": "LLX"}, "sliding_window_pattern must be a text of L and G, not 'LLX'"),
    ("gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all': attention must be"),
    ("gemma4_text", {"global_head_dim": 33}, "global_head_dim 33 is odd"),
    (
        "gemma4_text",
        {"attention_k_eq_v": True, "num_global_key_value_heads": 3},
        "num_global_key_value_heads 3 does not divide num_attention_heads 4",
    ),
    ("gemma4_text", {"num_kv_shared_layers": 6}, "num_kv_shared_layers 6 must be below num_hidden_layers 6"),
    ("gemma4_text", {"num_kv_shared_layers": 5}, "num_kv_shared_layers leaves no layer of full_attention"),
    ("gemma4_text", {"num_kv_shared_layers": -1}, "num_kv_shared_layers must be an integer of at least 0, not -1"),
    ("gemma4_text", {"vocab_size_per_layer_input": 96}, "vocab_size_per_layer_input 96 must be at least vocab_size 97"),
    ("gemma4_text", {"layer_types": ["chunked_attention"] * 6}, "layer_types 'chunked_attention' is not supported"),
    ("gemma4_text", scaled("default"), "rope_parameters of Gemma 4 must have objects full_attention and"),
    (
        "gemma4_text",
        {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2.0}}},
        "rope_parameters.full_attention.rope_type 'yarn' is not supported; supported: default",
    ),
    (
        "gemma4_text",
        {"rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 1.5}}},
        "partial_rotary_factor 1.5 must be at most 1",
    ),
    ("gemma4_text", {"per_layer_config": {"5": {"sliding_window": 3}}}, "per_layer_config.5.sliding_window is not"),
    ("gemma4_text", {"per_layer_config": {"5": {"head_dim": 31}}}, "per_layer_config.5.head_dim 31 is odd"),
    (
        "gemma4_text",
        {
            "per_layer_config": {"5": {"head_dim": 32}},
            "layer_types": ["full_attention"] * 6,
            "num_kv_shared_layers": 1,
        },
        "per_layer_config gives layer 5 other heads than layer 4",
    ),
    ("gemma4", {"text_config": {**SIZES, "enable_moe_block": True}}, "text_config.moe_intermediate_size must be"),
    ("llama4_text", {"no_rope_layers": [1, 0]}, "no_rope_layers must be a list of 0 and 1 with num_hidden_layers 6"),
    ("llama4_text", {"layer_types": ["sliding_attention"] * 6}, "layer_types 'sliding_attention' is not supported"),
    ("llama4_text", {"attention_chunk_size": 0}, "attention_chunk_size must be a positive integer, not 0"),
    ("llama4_text", {"floor_scale": -1}, "floor_scale must be a positive integer, not -1"),
    ("falcon", {"alibi": True}, "alibi is True: positions by ALiBi"),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 3}, "num_kv_heads 3 does not divide num_attention_h"),
    ("falcon", {"num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn must be at most 2, not 3"),
    ("falcon", {"activation": "silu"}, "activation 'silu' is not supported; supported: gelu, gelu_fast, gelu_new"),
    ("falcon", {"n_head": 0}, "n_head must be a positive integer, not 0"),
    ("gpt2", {"n_embd": "a"}, "n_embd must be a positive integer, not 'a'"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention is True: the model has no encoder"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights is false: attention without a scale"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True: layers with scales"),
    ("gpt_neox", {"rotary_pct": 0.3}, "partial_rotary_factor gives 3 rotated dimensions of head_dim 12"),
    ("gpt_neox", {"attention_bias": 1}, "attention_bias must be true or false, not 1"),
    ("granite_swa", {"layer_rope_theta": [1e4] * 5}, "layer_rope_theta must be a list with num_hidden_layers 6 entr"),
    ("granite_swa", {"layer_rope_theta": [1e4] * 5 + [1]}, "layer_rope_theta must be a list of numbers above 1, or 0"),
    ("granite_swa", {"sliding_window": None}, "sliding_window must be a positive integer: layer_types has"),
    ("opt", {"ffn_dim": -1}, "ffn_dim must be a positive integer, not -1"),
    ("opt", {"activation_function": "swish"}, "activation_function 'swish' is not supported; supported: gelu, gelu_f"),
    ("phi", {"partial_rotary_factor": 2}, "partial_rotary_factor gives 24 rotated dimensions of head_dim 12"),
    ("glm4", {"partial_rotary_factor": 0.2}, "partial_rotary_factor gives 25 rotated dimensions of head_dim 128"),
    ("granitemoehybrid", {"layer_types": ["mamba"] * 6}, "layer_types has no layer of attention"),
    ("granitemoehybrid", {"layer_types": ["attention"]}, "layer_types must be a list with num_hidden_layers 6 entries"),
    ("granitemoehybrid", {"layer_types": ["attention"] * 5 + ["conv"]}, "layer_types[5]: 'conv' is not supported"),
    ("hunyuan_v1_dense", {"use_cla": True}, "use_cla is True: attention across layers"),
    ("hunyuan_v1_dense", {"num_experts": 8}, "num_experts is 8: mixtures of experts"),
    ("hunyuan_v1_dense", scaled("dynamic", alpha=1e308), "rope_parameters.alpha 1e+308 must be 1e-09 to 1e+09"),
    ("ministral3", scaled("dynamic", factor=2.0, llama_4_scaling_beta=0.1), "llama_4_scaling_beta is not supported"),
    ("ministral3", scaled("default", llama_4_scaling_beta=0.1), "original_max_position_embeddings must be a positive"),
    ("ministral3", scaled("default", llama_4_scaling_beta=1e9), "llama_4_scaling_beta 1e+09 must be at most"),
    ("olmo3", scaled("default"), "rope_parameters of OLMo 3 must have objects full_attention and"),
    ("qwen3_5_text", {"layer_types": ["linear_attention"] * 6}, "layer_types has no layer of attention"),
    (
        "qwen3_5_text",
        {"layer_types": ["full_attention", "sliding_attention"] * 3},
        "layer_types[1]: 'sliding_attention' is not supported; supported: linear_attention, full_attention",
    ),
    ("qwen3_5_text", {"layer_types": ["full_attention"]}, "layer_types must be a list with num_hidden_layers 6 entr"),
    (
        "qwen3_5_text",
        {"partial_rotary_factor": 2},
        "partial_rotary_factor gives 512 rotated dimensions of head_dim 256",
    ),
    ("qwen3_5_text", {"num_experts": 4}, "num_experts is 4: mixtures of experts"),
    (
        "qwen3_next",
        {"layer_types": None, "full_attention_interval": 1, "mlp_only_layers": 3},
        "mlp_only_layers must be",
    ),
    ("qwen3_next", {"layer_types": None, "full_attention_interval": 8}, "layer_types has no layer of attention"),
    ("qwen3_5", {"text_config": {**SIZES, "layer_types": ["conv"] * 6}}, "text_config.layer_types[0]: 'conv' is not"),
    ("qwen3_5_delta", {"attn_output_gate": False}, "attn_output_gate is false: attention without a gate"),
    ("qwen3_5_delta", {"linear_num_value_heads": 24}, "linear_num_value_heads 24 is no multiple of linear_num_key_he"),
    ("qwen3_5_delta", {"linear_num_key_heads": 0}, "linear_num_key_heads must be a positive integer, not 0"),
    ("qwen3_5_delta", {"linear_num_value_heads": 1 << 40}, "linear_num_value_heads must be at most 4096"),
    ("qwen3_5_delta", {"linear_conv_kernel_dim": 65}, "linear_conv_kernel_dim must be at most 64, not 65"),
    ("falcon_h1", {"mamba_n_groups": 3}, "mamba_n_groups 3 does not divide mamba_n_heads 8"),
    ("falcon_h1", {"mamba_d_ssm": 95}, "mamba_n_heads 8 times mamba_d_head 11 is not the inner size 95"),
    ("falcon_h1", {"ssm_multipliers": [1.0] * 4}, "ssm_multipliers must be a list of 5 numbers above 0, not 4 entries"),
    ("falcon_h1", {"time_step_limit": [1.0, 0.5]}, "time_step_limit must be a number of at least 0 and a larger one"),
    ("granite_h", {"mamba_d_state": -1}, "mamba_d_state must be a positive integer, not -1"),
    ("granite_h", {"mamba_d_head": 5}, "mamba_n_heads 8 times mamba_d_head 5 is not the inner size 96"),
    ("kimi_linear", {"linear_attn_config": {"full_attn_layers": [1], "kda_layers": [2]}}, "must name the 6 layers"),
    (
        "kimi_linear",
        {"linear_attn_config": {"full_attn_layers": 4}},
        "linear_attn_config.full_attn_layers must be a li",
    ),
    ("kimi_linear", {"linear_attn_config": {"num_heads": 0}}, "linear_attn_config.num_heads must be a positive"),
    ("kimi_linear", {"num_experts_per_token": 9}, "num_experts_per_token 9 is more than the 8 experts to choose"),
    ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope is false: rotary embedding is not supported here"),
    ("kimi_linear", {"moe_router_activation_func": "softmax"}, "moe_router_activation_func other than sigmoid"),
    ("kimi_linear", {"routed_expert_hidden_size": 8}, "routed_expert_hidden_size is 8: Kimi K3 is not supported"),
    ("kimi_linear", {"linear_attn_config": {"gate_lower_bound": -5.0}}, "linear_attn_config.gate_lower_bound is -5.0"),
    ("lfm2", {"conv_L_cache": 0}, "conv_L_cache must be a positive integer, not 0"),
    ("lfm2", {"layer_types": ["conv"] * 6}, "layer_types has no layer of attention"),
    ("lfm2", {"layer_types": ["conv"] * 5}, "layer_types must be a list with num_hidden_layers 6 entries, not 5"),
    ("lfm2", {"layer_types": None, "full_attn_idxs": 3}, "full_attn_idxs must be a list of layers"),
    ("lfm3", {"layer_types": ["chunked_attention"] * 6}, "layer_types[0]: 'chunked_attention' is not supported"),
    ("lfm3", scaled("default"), "rope_parameters of LFM3 must have objects full_attention and"),
    ("lfm3", {"conv_L_cache": True}, "conv_L_cache must be a positive integer, not True"),
    ("nemotron_h", {"hybrid_override_pattern": "MX*"}, "hybrid_override_pattern must be a text of M, *, -, E"),
    ("nemotron_h", {"hybrid_override_pattern": "M*"}, "hybrid_override_pattern has 2 marks, not num_hidden_layers"),
    ("nemotron_h", {"hybrid_override_pattern": "MMMM-M"}, "hybrid_override_pattern has no layer of attention"),
    ("nemotron_h", {"n_groups": 7}, "n_groups 7 does not divide mamba_num_heads 128"),
    ("nemotron_h", {"moe_latent_size": 32}, "moe_latent_size is 32: experts between latent projections"),
    ("smollm3", {"no_rope_layers": [1, 1]}, "no_rope_layers must be a list of 0 and 1 for num_hidden_layers 6"),
    ("gemma3", {"text_config": {"model_type": "gemma2"}}, "text_config.model_type 'gemma2' is not supported"),
    ("gemma3", {"text_config": 4}, "text_config must be an object, not 4"),
    ("mistral3", {"text_config": {**SIZES, "hidden_size": -1}}, "text_config.hidden_size must be a positive integer"),
    ("phi3", scaled("longrope", short_factor=[1.0] * 6), "long_factor must be a list of 6 numbers above 0, not None"),
]


@pytest.mark.parametrize(("family", "fields", "message"), REFUSED, ids=[f"{f}-{m[:50]}" for f, _, m in REFUSED])
def test_refused(family: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=f"^config.json: .*{re.escape(message)}"):
        read(family, **fields)


WRONG: list[Any] = [
    [], {}, "", "x" * 10**6, True, False, -1, 3.5, 1e308, float("nan"), float("inf"), 10**400, -(10**400), ["a"],
    {"a": {}}, [[]] * 10**5, "\x1b[31m\n", 2**63,
]  # fmt: skip


def check_refusals(family: str, tries: Iterable[dict[str, Any]]) -> None:
    """Some are read, and the others refused."""
    count, messages = 0, []
    for fields in tries:
        count += 1
        try:
            read(family, **fields)
        except ModelConfigError as error:
            messages.append(str(error))
    assert len(messages) > count / 2
    for message in messages:
        assert message.startswith("config.json: ")
        assert len(message) < 500
        assert message.isprintable()


@pytest.mark.parametrize("family", [*FAMILIES, "mimo", *NEWER, *WRAPPED, *MIXTURES, *RECURRENT])
def test_any_value_of_any_field_is_read_or_refused_in_one_line(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each field that is read is given each of these."""
    seen: set[str] = set()
    get = Fields.get
    monkeypatch.setattr(Fields, "get", lambda fields, name: seen.add(fields._path + name) or get(fields, name))
    read(family)

    def tries() -> Iterator[dict[str, Any]]:
        places = {f"text_config.{each.removeprefix('text_config.')}" for each in seen} if family in WRAPPED else seen
        for place, value in itertools.product(sorted(places), WRONG):
            *sections, name = place.split(".")
            for section in reversed(sections):
                kept = SIZES | ALWAYS.get(family, {}) if section == "text_config" else {}
                value, name = {**kept, name: value}, section
            yield {name: value}

    check_refusals(family, tries())


@pytest.mark.parametrize("kind", ROPE_TYPES)
def test_any_value_of_a_rotary_embedding(kind: str) -> None:
    whole = {**LLAMA3, **LONG, "rope_theta": 1e4, "beta_fast": 32, "mscale": 1, "truncate": True, "rope_type": kind}
    check_refusals(
        "llama", ({"rope_parameters": whole | {name: value}} for name in ("rope_type", "rope_theta") for value in WRONG)
    )
    fields = {"factor", "low_freq_factor", "short_factor", "attention_factor", "original_max_position_embeddings"} | {
        *whole
    }
    for name, value in itertools.product(sorted(fields), WRONG):
        with contextlib.suppress(ModelConfigError):
            read("llama", rope_parameters=whole | {name: value})


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the table under a heading of docs/models.md, without its head."""
    section = MODELS_PAGE.read_text(encoding="utf-8").split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


HOW = ("native", "through transformers", "refused")


def test_page_lists_the_architectures() -> None:
    found = {how: [row for row in rows("Architectures") if row[2] == how] for how in HOW}
    assert rows("Architectures") == [row for how in HOW for row in found[how]]
    assert [row[0].strip("`") for row in found["native"]] == sorted(ARCHITECTURES)
    assert not {row[0].strip("`") for how in HOW[1:] for row in found[how]} & set(ARCHITECTURES)
    assert {row[3] for row in rows("Architectures")} == {"own", "by transformers", "no"}
    files = {row[4].strip("`") for row in found["native"]} - {"no"}
    assert {name.strip("`") for each in files for name in each.split(", ")} == set(_ARCHITECTURES)
    assert set(NAMES) == {*FAMILIES, *NEWER, *WRAPPED, *MIXTURES, *RECURRENT, "mimo"}, (
        "transformers has no code for MiMo: tests make its checkpoints from Qwen2's"
    )
    assert set(NAMES.values()) == set(ARCHITECTURES)


def test_page_lists_the_rope_types() -> None:
    assert [row[0].strip("`") for row in rows("Rotary embeddings")] == list(ROPE_TYPES)


@pytest.mark.parametrize(("architecture", "field", "message"), rows("Refused"))
def test_page_lists_what_is_refused(architecture: str, field: str, message: str) -> None:
    name, value = field.strip("`").split(": ", 1)
    with pytest.raises(ModelConfigError, match=re.escape(message.strip("`"))):
        ARCHITECTURES[architecture.strip("`")]({**SIZES, name: json.loads(value)})
