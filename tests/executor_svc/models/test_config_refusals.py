"""What is refused in config.json, by the name of its field."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from executor_svc.models.base import ModelConfigError
from executor_svc.models.config.config_fields import Fields
from executor_svc.models.config.rope_fields import ROPE_TYPES
from tests.checkpoints import FAMILIES, MIXTURES, NEWER, RECURRENT
from tests.executor_svc.models.model_configs import ALWAYS, LLAMA3, LONG, SIZES, WRAPPED, WRONG, read


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
