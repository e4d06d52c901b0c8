"""Tiny seeded checkpoints, made by transformers itself: what tests of the executor and of the whole server run on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.helpers.kept import kept_copy
from tests.recurrent_shapes import MODEL_TYPES, randomize
from tests.recurrent_shapes import RECURRENT as RECURRENT

BOS, EOS = "<s>", "</s>"

_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_SHAPE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 40,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}

_WINDOW = 24
"""Smaller than the sequences of most tests."""

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": _WINDOW, "head_dim": 12},
    "qwen2": {"use_sliding_window": True, "sliding_window": _WINDOW, "max_window_layers": 1},
    "qwen3": {"head_dim": 12, "tie_word_embeddings": True},
    "gemma2": {
        "initializer_range": 0.15,
        "num_hidden_layers": 4,
        "head_dim": 12,
        "sliding_window": _WINDOW,
        "query_pre_attn_scalar": 10,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 12.0,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        "initializer_range": 0.15,
        "num_hidden_layers": 4,
        "head_dim": 12,
        "sliding_window": _WINDOW,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 100,
        "tie_word_embeddings": True,
    },
    "phi3": {"hidden_size": 64, "partial_rotary_factor": 0.75, "sliding_window": 40},
    "granite": {
        "attention_bias": True,
        "mlp_bias": True,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.6,
        "logits_scaling": 2.5,
    },
}
"""What each family's tiny model has beside or over `_SHAPE`, by transformers' model_type: all that sets it apart."""

_YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 16.0, "original_max_position_embeddings": 32}
_PLAIN = {"rope_type": "default", "rope_theta": 5000.0}
_SANDWICHED = {"initializer_range": 0.15, "num_hidden_layers": 4, "sliding_window": _WINDOW}

NEWER: dict[str, dict[str, Any]] = {
    "apertus": {"qk_norm": True},
    "cohere2": {**_SANDWICHED, "logit_scale": 0.25, "tie_word_embeddings": True, "layer_norm_eps": 1e-4},
    "ernie4_5": {"head_dim": 12, "use_bias": True, "tie_word_embeddings": True},
    "exaone4": {**_SANDWICHED, "head_dim": 12, "sliding_window_pattern": 4},
    "gemma4_text": {
        **_SANDWICHED,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "head_dim": 12,
        "global_head_dim": 20,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "attention_bias": True,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 140,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
    "falcon": {"bias": True, "layer_norm_epsilon": 1e-4, "initializer_range": 0.2},
    "glm4": {"head_dim": 12, "attention_bias": True, "initializer_range": 0.15},
    "gpt2": {
        "n_positions": 512,
        "n_embd": 40,
        "n_head": 4,
        "n_layer": 2,
        "n_inner": 72,
        "layer_norm_epsilon": 1e-4,
        "tie_word_embeddings": True,
    },
    "gpt_neox": {"rope_parameters": {**_PLAIN, "partial_rotary_factor": 0.4}, "layer_norm_eps": 1e-4},
    "granite_swa": {
        **_SANDWICHED,
        "head_dim": 12,
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.6,
        "logits_scaling": 2.5,
        "layer_rope_theta": [300.0, 0, 5000.0, 300.0],
    },
    "granitemoehybrid": {
        "layer_types": ["attention"] * 2,
        "num_local_experts": 0,
        "shared_intermediate_size": 72,
        "position_embedding_type": "rope",
        "mamba_n_heads": 8,
        "mamba_d_head": 10,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.6,
        "logits_scaling": 2.5,
    },
    "hunyuan_v1_dense": {
        "head_dim": 12,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 5000.0, "alpha": 50.0, "factor": 1.0},
    },
    "llama4_text": {
        "num_hidden_layers": 4,
        "head_dim": 12,
        "intermediate_size_mlp": 72,
        "moe_layers": [],
        "attention_chunk_size": _WINDOW,
        "floor_scale": 16,
        "attn_scale": 0.4,
        "attention_bias": True,
    },
    "ministral3": {
        "head_dim": 12,
        "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4},
    },
    "nemotron": {
        "attention_bias": True,
        "mlp_bias": True,
        "norm_eps": 1e-4,
        "rope_parameters": {**_PLAIN, "partial_rotary_factor": 0.6},
    },
    "olmo2": {"initializer_range": 0.15},
    "olmo3": {
        **_SANDWICHED,
        "rope_parameters": {
            "full_attention": _YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    },
    "opt": {"ffn_dim": 72, "tie_word_embeddings": True, "pad_token_id": 1},
    "phi": {"rope_parameters": {**_PLAIN, "partial_rotary_factor": 0.4}, "layer_norm_eps": 1e-4},
    "qwen3_5_text": {
        "head_dim": 20,
        "layer_types": ["full_attention"] * 2,
        "rope_parameters": {**_PLAIN, "partial_rotary_factor": 0.4, "mrope_section": [2, 1, 1]},
        "attention_bias": True,
    },
    "seed_oss": {"head_dim": 12, "attention_bias": True, "attention_out_bias": True, "mlp_bias": True},
    "starcoder2": {"sliding_window": _WINDOW, "norm_epsilon": 1e-4, "use_bias": True, "tie_word_embeddings": True},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0], "tie_word_embeddings": True},
}
"""The same for families that have parts which those before lack."""

_EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
_GROUPED = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5, "n_shared_experts": 1}

_LATENT = {
    **_EXPERTS,
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_shared_experts": 1,
}
"""Sizes that differ from each other; those of the cache's rows are no whole vectors."""
_DEEP_YARN = {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.9}

MIXTURES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        **_LATENT,
        "q_lora_rank": None,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
        "rope_parameters": _DEEP_YARN,
    },
    "deepseek_v3": {
        **_LATENT,
        **_GROUPED,
        "first_k_dense_replace": 1,
        "attention_bias": True,
        "rope_parameters": _DEEP_YARN,
    },
    "ernie4_5_moe": {
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_num_shared_experts": 2,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 3,
        "moe_layer_end_index": 2,
        "tie_word_embeddings": True,
    },
    "exaone_moe": {
        **_SANDWICHED,
        **_EXPERTS,
        "num_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "head_dim": 12,
        "sliding_window_pattern": 4,
    },
    "glm4_moe": {
        **_EXPERTS,
        **_GROUPED,
        "head_dim": 12,
        "use_qk_norm": True,
        "attention_bias": True,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 3,
    },
    "glm4_moe_lite": {**_LATENT, **_GROUPED, "num_hidden_layers": 3, "tie_word_embeddings": True},
    "gpt_oss": {"head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": _WINDOW},
    "granitemoe": {
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.6,
        "logits_scaling": 2.5,
    },
    "granitemoe_swa": {
        **_SANDWICHED,
        "head_dim": 12,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.6,
        "layer_rope_theta": [300.0, 0, 5000.0, 300.0],
    },
    "granitemoeshared": {
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
        "attention_multiplier": 0.2,
    },
    "hunyuan_v1_moe": {"head_dim": 12, "num_experts": 5, "moe_topk": 2},
    "mistral4": {
        **_LATENT,
        **_GROUPED,
        "rope_parameters": {**_DEEP_YARN, "llama_4_scaling_beta": 0.3},
    },
    "minimax_m2": {"head_dim": 12, "num_local_experts": 6, "num_experts_per_tok": 3, "rotary_dim": 8},
    "mixtral": {"head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 3},
    "phimoe": {
        "num_local_experts": 5,
        "attention_bias": True,
        "lm_head_bias": True,
        "router_jitter_noise": 0.4,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 5000.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4],
            "long_factor": [2.0] * 5,
            "short_mscale": 1.2,
            "long_mscale": 1.5,
            "original_max_position_embeddings": 512,
        },
    },
    "qwen2_moe": {
        **_EXPERTS,
        "num_experts": 6,
        "shared_expert_intermediate_size": 40,
        "num_hidden_layers": 4,
        "mlp_only_layers": [1],
    },
    "qwen3_moe": {**_EXPERTS, "head_dim": 12, "num_experts": 8, "norm_topk_prob": True},
    "qwen3_next": {
        **_EXPERTS,
        "head_dim": 20,
        "layer_types": ["full_attention"] * 2,
        "partial_rotary_factor": 0.4,
        "num_experts": 6,
        "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [1],
    },
}
"""The same for families whose layers have experts."""

HOSTED: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 6, "n_positions": 512, "n_embd": 40, "n_head": 4, "n_layer": 2, "n_inner": 72},
    "gpt_neo": {
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": _WINDOW,
        "tie_word_embeddings": True,
    },
    "gptj": {"rotary_dim": 6, "n_positions": 512, "n_embd": 40, "n_head": 4, "n_layer": 2, "n_inner": 72},
}
"""The same for families that Cadenza has no code of its own for: they run through transformers'."""


def make_llama(
    folder: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shards: bool = False,
    tokenizer: bool = False,
    **shape: Any,
) -> Path:
    """Save a random LlamaForCausalLM checkpoint to a folder and return it; arguments as in `make_checkpoint`."""
    return make_checkpoint(folder, "llama", seed=seed, dtype=dtype, shards=shards, tokenizer=tokenizer, **shape)


def make_checkpoint(
    folder: Path,
    family: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shards: bool = False,
    tokenizer: bool = False,
    **shape: Any,
) -> Path:
    """Save a random checkpoint of a family to a folder and return it. Each is made once in a run of the tests.

    Args:
        folder: made if need be.
        family: one of `FAMILIES`, `NEWER`, `MIXTURES`, `HOSTED` or `RECURRENT`.
        seed: of the weights. They are wide enough that greedy continuations wander, norms and biases included.
        dtype: of the weights as saved.
        shards: save several safetensors files and their index.
        tokenizer: add a byte-level tokenizer with a chat template; the vocabulary must hold at least 261 ids.
        shape: fields of the family's config in transformers, over those of a tiny model.
    """
    wanted = family, seed, dtype, shards, tokenizer, sorted(shape.items())
    kept_copy(folder, wanted, lambda made: _make(made, family, seed, dtype, shards, tokenizer, shape))
    return folder


def _make(
    folder: Path, family: str, seed: int, dtype: torch.dtype, shards: bool, tokenizer: bool, shape: dict[str, Any]
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, Mistral4Config, Mistral4ForCausalLM

    AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)  # it lacks this one alone
    families = {**FAMILIES, **NEWER, **MIXTURES, **HOSTED, **RECURRENT}
    config = AutoConfig.for_model(MODEL_TYPES.get(family, family), **{**_SHAPE, **families[family], **shape})
    # Gemma adds 1 to its weights; they are large, or the scaled and tied embedding would repeat each token forever.
    norms = (0.5, 2.5) if family.startswith("gemma") else (0.5, 1.5)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if family in RECURRENT and randomize(name, parameter):
                    continue
                if name.endswith("sinks"):
                    parameter.normal_(0, 2)
                elif name.endswith("bias"):
                    parameter.normal_(0, 0.1)
                elif name.endswith(("alpha_p", "alpha_n")):
                    parameter.normal_(0, 0.5)
                elif family == "gemma4_text" and name.endswith(("q_norm.weight", "k_norm.weight")):
                    parameter.uniform_(0.1, 0.7)  # scores are not divided: larger ones would leave one key a head
                elif "norm" in name or ".ln_" in name:
                    parameter.uniform_(*norms)
                elif name.endswith(("router.scale", "router.per_expert_scale")):
                    parameter.uniform_(0.5, 1.5)
        for name, buffer in model.named_buffers():
            if name.endswith("act_fn.beta"):
                buffer.fill_(0.4)
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(0, 0.1)
            elif name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    model = model.to(dtype)
    model.config.dtype = dtype
    size = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(folder, max_shard_size=max(1, size // 3) if shards else "50GB")
    if tokenizer:
        add_tokenizer(folder, config.vocab_size)


def add_tokenizer(folder: Path, vocab_size: int) -> None:
    """Save a tokenizer with one token per byte, `<s>` 0, `</s>` 1, role markers, and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    specials = [BOS, EOS, "<|system|>", "<|user|>", "<|assistant|>"]
    vocabulary = {token: i for i, token in enumerate([*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    if vocab_size < len(vocabulary):
        raise ValueError(f"vocab_size must be at least {len(vocabulary)} for a byte-level tokenizer")
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "chat_template": _CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def edit_config(folder: Path, **fields: Any) -> None:
    """Change fields of a folder's config.json; None removes one."""
    path = folder / "config.json"
    content = {**json.loads(path.read_text(encoding="utf-8")), **fields}
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}), encoding="utf-8")


def blend(folder: Path, other: Path, share: float) -> None:
    """Replace the weights in a folder by those of another one, mixed with a share of its own."""
    path = folder / "model.safetensors"
    own, others = load_file(path), load_file(other / "model.safetensors")
    mixed = {name: torch.lerp(others[name].float(), own[name].float(), share).to(own[name].dtype) for name in own}
    save_file(mixed, path, metadata={"format": "pt"})
