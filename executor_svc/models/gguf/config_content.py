"""The metadata of a GGUF file as the content of a config.json, which `models.families` read.

Keys: github.com/ggml-org/llama.cpp, gguf-py/gguf/constants.py; what its code takes for an absent key is taken here.
"""

from __future__ import annotations

import math
from typing import Any

from cadenza_common.gguf.file import GgufFile
from cadenza_common.gguf.metadata import END_KEYS, END_TEXTS
from executor_svc.models.folder import LoaderError
from executor_svc.models.gguf.expert_content import MAX_LAYERS, MIXTURES, expert_content
from executor_svc.models.gguf.gemma4_content import GEMMA4, gemma4_content
from executor_svc.models.gguf.latent_content import LATENTS
from executor_svc.models.gguf.recurrent_content import KIMI, RECURRENT, recurrent_content
from executor_svc.models.gguf.rope_content import VectorReader, rope_content, shortest

_ARCHITECTURES = {name: architecture for name, (architecture, _) in (MIXTURES | RECURRENT).items()} | {
    "apertus": "ApertusForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "falcon": "FalconForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gptneox": "GPTNeoXForCausalLM",
    "granite": "GraniteForCausalLM",
    "granite_swa": "GraniteSWAForCausalLM",
    "hunyuan-dense": "HunYuanDenseV1ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral3": "Ministral3ForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "phi2": "PhiForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
}
_MODEL_TYPES = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gptneox": "gpt_neox",
    "hunyuan-dense": "hunyuan_v1_dense",
    "mistral3": "ministral3",
    "phi2": "phi",
}
"""Where config.json has another model_type than the name in GGUF."""
_TABLE = "token_embd.weight"
_LAYER_NORMS = {
    "cohere2": "layer_norm_eps",
    "falcon": "layer_norm_epsilon",
    "gpt2": "layer_norm_epsilon",
    "gptneox": "layer_norm_eps",
    "nemotron": "norm_eps",
    "phi2": "layer_norm_eps",
    "starcoder2": "norm_epsilon",
}
"""Architectures with norms of mean and variance, and the field of their eps."""
_EXAONE_32B = 64
"""Layers of the EXAONE 4 with windows; llama.cpp knows these, and files of older converters do not name them."""
_SENTENCEPIECE_BOS, _SENTENCEPIECE_EOS = 1, 2
"""Ids of vocabularies of sentencepiece that do not name them."""
_EXAONE_WINDOW = 4096
_EXAONE_MIXTURE_WINDOW, _EXAONE_EVERY = 128, 4
_LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27B models, whose attention scale is of hidden_size / num_attention_heads; others: of the head size."""


def config_content(file: GgufFile, read_vector: VectorReader) -> dict[str, Any]:
    """Return what config.json would hold; raises GgufError naming a key, or LoaderError naming a tensor.

    read_vector: returns a tensor of one dimension by its name, None if the file has none.
    """
    metadata = file.metadata
    architecture = metadata.text("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise LoaderError(
            f"{file.paths[0]}: architecture {architecture[:100]!r} is not supported in GGUF files; supported: "
            f"{', '.join(_ARCHITECTURES)}"
        )
    read = _KeyReader(file, architecture)
    heads, hidden = read.uniform("attention.head_count"), metadata.integer(f"{architecture}.embedding_length")
    head_size = metadata.integer(f"{architecture}.attention.key_length", max(1, hidden // heads))
    if architecture in (*LATENTS, KIMI):
        head_size = metadata.integer(f"{architecture}.rope.dimension_count")
    elif metadata.integer(f"{architecture}.attention.value_length", head_size) != head_size:
        raise metadata.error(f"{architecture}.attention.value_length", f"must be the key length, {head_size}")
    content = {
        "architectures": [_ARCHITECTURES[architecture]],
        "model_type": _MODEL_TYPES.get(architecture, architecture),
        "dtype": "bfloat16",
        "vocab_size": read.vocabulary(),
        "hidden_size": hidden,
        "intermediate_size": read.first("feed_forward_length"),
        "num_hidden_layers": metadata.integer(f"{architecture}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": read.first("attention.head_count_kv", heads),
        "head_dim": head_size,
        "max_position_embeddings": metadata.integer(f"{architecture}.context_length"),
        _LAYER_NORMS.get(architecture, "rms_norm_eps"): read.number(
            f"attention.layer_norm_{'' if architecture in _LAYER_NORMS else 'rms_'}epsilon"
        ),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": _has_bias(file, "attn_q", "attn_k", "attn_v", "attn_output"),
        "mlp_bias": _has_bias(file, "ffn_gate", "ffn_up", "ffn_down"),
    }
    content |= rope_content(file, architecture, head_size, read_vector)
    if architecture in RECURRENT:
        factors = _granite_content(read, content) if architecture == "granitehybrid" else {}
        return content | factors | recurrent_content(file, architecture, content)
    if metadata.integer(f"{architecture}.expert_count", 0, at_least=0):
        if architecture not in MIXTURES:
            raise metadata.error(f"{architecture}.expert_count", "mixtures of experts are not supported")
        if architecture != "llama":  # of Mistral: llama.cpp ignores its window
            content |= _family_content(read, content)
        return content | expert_content(file, architecture, content)
    if architecture in LATENTS:
        raise metadata.error(f"{architecture}.expert_count", "a model without experts is not supported")
    return content | _family_content(read, content)


def special_token_ids(file: GgufFile) -> tuple[list[int], int | None]:
    """Return the end-of-text ids, ascending, and the beginning-of-text id; raises GgufError.

    Tokens with the texts of ends are ends, whatever type the file states, as in llama.cpp.
    """
    metadata, prefix = file.metadata, "tokenizer.ggml"
    eos = {metadata.integer(key, at_least=0) for key in END_KEYS if key in metadata}
    texts, bos = metadata.texts(f"{prefix}.tokens", []), f"{prefix}.bos_token_id"
    eos |= {token for token, text in enumerate(texts) if text in END_TEXTS}
    is_sentencepiece = metadata.get(f"{prefix}.model") == "llama"
    if is_sentencepiece and f"{prefix}.eos_token_id" not in metadata:
        eos.add(_SENTENCEPIECE_EOS)
    if bos in metadata:
        return sorted(eos), metadata.integer(bos, at_least=0)
    return sorted(eos), _SENTENCEPIECE_BOS if is_sentencepiece else None


def _has_bias(file: GgufFile, *parts: str) -> bool:
    """Return whether one of these tensors has a bias in any layer; those that are missing are 0 then."""
    ends = tuple(f".{part}.bias" for part in parts)
    return any(name.endswith(ends) for name in file.tensors)


class _KeyReader:
    """Reads keys of one architecture."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture

    def number(self, name: str, default: float | None = None) -> float:
        return shortest(self.file.metadata.number(f"{self.architecture}.{name}", default))

    def has(self, name: str) -> bool:
        return f"{self.architecture}.{name}" in self.file.metadata

    def uniform(self, name: str, default: int | None = None) -> int:
        """Return an integer that may be given for each layer, if all are equal."""
        key, metadata = f"{self.architecture}.{name}", self.file.metadata
        if not isinstance(metadata.get(key), list):
            return metadata.integer(key, default)
        by_layer = set(metadata.integers(key))
        if len(by_layer) != 1 or min(by_layer) < 1:
            raise metadata.error(key, "must be one positive integer for all layers")
        return by_layer.pop()

    def first(self, name: str, default: int | None = None) -> int:
        """As `uniform`; of architectures whose layers differ that of the first layer, or the largest."""
        if self.architecture in RECURRENT and self.is_by_layer(name):
            return max(1, *self.file.metadata.integers(f"{self.architecture}.{name}"))
        return self.by_layer(name, 1, default)[0] if self.architecture == GEMMA4 else self.uniform(name, default)

    def is_by_layer(self, name: str) -> bool:
        """Return whether a key has a number for each layer."""
        return isinstance(self.file.metadata.get(f"{self.architecture}.{name}"), list)

    def by_layer(self, name: str, count: int, default: int | None = None) -> list[int]:
        """Return the positive integers of at least `count` layers, which may be given as one for all."""
        key, metadata = f"{self.architecture}.{name}", self.file.metadata
        if not isinstance(metadata.get(key), list):
            return [metadata.integer(key, default)] * count
        found = metadata.integers(key)
        if len(found) < count or min(found, default=0) < 1:
            raise metadata.error(key, f"must be positive integers for {count} layers")
        return found

    def vocabulary(self) -> int:
        """Return the number of rows of the table of embeddings: not all files have it in their metadata."""
        table = self.file.tensors.get(_TABLE)
        if table is None or len(table.shape) != 2:
            problem = "is missing" if table is None else f"has shape {list(table.shape)}, not two dimensions"
            raise LoaderError(f"{self.file.paths[0]}: tensor {_TABLE} {problem}")
        return table.shape[0]


def _family_content(read: _KeyReader, content: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of one family."""
    window = read.file.metadata.integer(f"{read.architecture}.attention.sliding_window", 0, at_least=0) or None
    match read.architecture:
        case "llama":
            # Converters store Mistral under this name; llama.cpp ignores its window.
            mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
            return {**mistral, "sliding_window": window} if window else {}
        case "gemma4":
            return gemma4_content(read, content, _layer_types(read, content))
        case "gemma2" | "gemma3":
            return _gemma_content(read, content, window)
        case "phi3":
            return {"sliding_window": window}
        case "cohere2":
            return {"sliding_window": window, "logit_scale": read.number("logit_scale")}
        case "exaone-moe":
            types = {"sliding_window_pattern": _EXAONE_EVERY} | _layer_types(read, content)
            return {"sliding_window": window or _EXAONE_MIXTURE_WINDOW} | types
        case "exaone4":
            window = window or (_EXAONE_WINDOW if content["num_hidden_layers"] == _EXAONE_32B else None)
            return {"sliding_window": window} | _layer_types(read, content)
        case "olmo2" if window:
            return {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "sliding_window": window} | (
                _layer_types(read, content)
            )
        case "mistral3":
            return _mistral3_content(read, content)
        case "starcoder2":
            return {"use_bias": content["attention_bias"] or content["mlp_bias"], "sliding_window": window}
        case "ernie4_5":
            return {"use_bias": content["attention_bias"] or content["mlp_bias"]}
        case "seed_oss":
            return {"attention_out_bias": _has_bias(read.file, "attn_output")}
        case "granite" | "granitemoe":
            return _granite_content(read, content)
        case "granite_swa":
            return _granite_swa_content(read, content, window)
        case "gptneox":
            is_parallel = read.file.metadata.flag("gptneox.use_parallel_residual", True)
            return {"use_parallel_residual": is_parallel, "attention_bias": _has_bias(read.file, "attn_qkv")}
        case "falcon":
            return _falcon_content(read, content)
        case "phi2":
            return {"has_fused_qkv": "blk.0.attn_qkv.weight" in read.file.tensors}
        case _:
            return {}


def _granite_content(read: _KeyReader, content: dict[str, Any]) -> dict[str, Any]:
    names = {
        "embedding_multiplier": "embedding_scale",
        "attention_multiplier": "attention.scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    stated = {field: read.number(name) for field, name in names.items() if read.has(name)}
    found = {field: number for field, number in stated.items() if number}  # llama.cpp: 0 is absent
    return {"attention_multiplier": 1 / math.sqrt(content["head_dim"])} | found


def _granite_swa_content(read: _KeyReader, content: dict[str, Any], window: int | None) -> dict[str, Any]:
    """Return the multipliers of Granite, the layers with a window, and those without a rotary embedding."""
    found = _granite_content(read, content) | {"sliding_window": window} | _layer_types(read, content)
    pattern = read.file.metadata.get(f"{read.architecture}.attention.rope_pattern")
    if isinstance(pattern, list):
        found["layer_rope_theta"] = [content["rope_theta"] if each else 0 for each in pattern]
    return found


def _falcon_content(read: _KeyReader, content: dict[str, Any]) -> dict[str, Any]:
    """Return which of its architectures a Falcon has: files do not name it. Theirs have attention beside the MLP."""
    has_two_norms = "blk.0.attn_norm_2.weight" in read.file.tensors
    kv_heads = content["num_key_value_heads"]
    return {
        "new_decoder_architecture": has_two_norms or kv_heads > 1,
        "num_kv_heads": kv_heads,
        "num_ln_in_parallel_attn": 2 if has_two_norms else 1,
        "bias": _has_bias(read.file, "attn_qkv", "attn_output", "ffn_up", "ffn_down"),
    }


def _gemma_content(read: _KeyReader, content: dict[str, Any], window: int | None) -> dict[str, Any]:
    result: dict[str, Any] = {"query_pre_attn_scalar": content["head_dim"]}
    if content["num_hidden_layers"] == _LARGEST_GEMMA[read.architecture]:
        result["query_pre_attn_scalar"] = content["hidden_size"] // content["num_attention_heads"]
    if window is not None:
        result["sliding_window"] = window
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if read.has(cap):
            result[cap] = read.number(cap)
    return result | _layer_types(read, content)


def _layer_types(read: _KeyReader, content: dict[str, Any]) -> dict[str, Any]:
    """Return `layer_types` of a pattern: a flag for each layer, or every how many layers one has no window."""
    key, metadata = f"{read.architecture}.attention.sliding_window_pattern", read.file.metadata
    pattern = metadata.get(key)
    if pattern is None:
        return {}
    if isinstance(pattern, list):
        return {"layer_types": ["sliding_attention" if each else "full_attention" for each in pattern]}
    every, count = metadata.integer(key), min(content["num_hidden_layers"], MAX_LAYERS)
    types = ["full_attention" if (layer + 1) % every == 0 else "sliding_attention" for layer in range(count)]
    return {"layer_types": types}


def _mistral3_content(read: _KeyReader, content: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary embedding with the scale of queries by position, which Mistral Small does not have."""
    if not read.has("attention.temperature_scale"):
        return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
    if not content.get("rope_scaling"):
        raise read.file.metadata.error("mistral3.attention.temperature_scale", "needs a rope.scaling.type")
    return {
        "rope_scaling": content["rope_scaling"] | {"llama_4_scaling_beta": read.number("attention.temperature_scale")}
    }
