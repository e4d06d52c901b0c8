"""Models that also take images, of which the text part is run: Gemma3ForConditionalGeneration (Gemma 3, 4B to 27B),
Gemma4ForConditionalGeneration, KimiK25ForConditionalGeneration (Kimi K2.5), Llama4ForConditionalGeneration,
Mistral3ForConditionalGeneration (Mistral Small 3.1, 3.2 and 4, Ministral 3), Qwen3_5ForConditionalGeneration and
Qwen3_5MoeForConditionalGeneration.

The decoder's fields are those of `text_config`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cadenza_common.brief import brief
from executor_svc.models.base import ModelConfigError
from executor_svc.models.config.config_fields import Fields
from executor_svc.models.families.deepseek import read_deepseek_v3, read_mistral4
from executor_svc.models.families.gemma import read_gemma3
from executor_svc.models.families.gemma4 import read_gemma4
from executor_svc.models.families.llama4 import read_llama4
from executor_svc.models.families.mistral import read_ministral3, read_mistral
from executor_svc.models.families.qwen3_5 import read_qwen3_5, read_qwen3_5_moe
from executor_svc.models.specs.spec import DecoderSpec

_READERS: dict[str, Callable[[dict[str, Any]], DecoderSpec]] = {
    "deepseek_v3": read_deepseek_v3,
    "gemma3_text": read_gemma3,
    "gemma4_text": read_gemma4,
    "kimi_k2": read_deepseek_v3,
    "llama4_text": read_llama4,
    "ministral3": read_ministral3,
    "mistral": read_mistral,
    "mistral4": read_mistral4,
    "qwen3_5_moe_text": read_qwen3_5_moe,
    "qwen3_5_text": read_qwen3_5,
}
_GEMMA3: dict[str, Any] = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
"""What transformers takes for fields that older files leave out."""
_GEMMA4: dict[str, Any] = {**_GEMMA3, "vocab_size": 262_144, "num_hidden_layers": 30}
_FILE = "config.json: "
_OTHERS = (
    "vision_tower.", "vision_model.", "visual.", "multi_modal_projector.", "audio_tower.", "embed_vision.",
    "embed_audio.", "mm_projector.",
)  # fmt: skip


def read_gemma3_wrapped(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    return _read(config, "gemma3_text", _GEMMA3)


def read_gemma4_wrapped(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    return _read(config, "gemma4_text", _GEMMA4)


def read_llama4_wrapped(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    return _read(config, "llama4_text", {})


def read_mistral3_wrapped(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    return _read(config, "mistral", {})


def read_kimi_wrapped(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    return _read(config, "kimi_k2", {})


def read_qwen3_5_wrapped(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    return _read(config, "qwen3_5_text", {})


def read_qwen3_5_moe_wrapped(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    return _read(config, "qwen3_5_moe_text", {})


def _read(config: dict[str, Any], kind: str, defaults: dict[str, Any]) -> DecoderSpec:
    """Return the decoder; kind: model_type of the text part where it is not named."""
    fields = Fields(config)
    text = fields.section("text_config")
    kind = text.text("model_type") or kind
    if kind not in _READERS:
        raise text.error("model_type", f"{brief(kind)} is not supported; supported: {', '.join(_READERS)}")
    content = defaults | {
        name: value for name in text.names() if (value := text.get(name)) is not None or name not in defaults
    }
    if fields.get("tie_word_embeddings") is not None:
        content["tie_word_embeddings"] = fields.flag("tie_word_embeddings", False)
    try:
        spec = _READERS[kind](content)
    except ModelConfigError as error:
        raise ModelConfigError(f"{_FILE}text_config.{str(error).removeprefix(_FILE)}") from None
    return replace(spec, ignored=(*spec.ignored, *_OTHERS, *(f"model.{each}" for each in _OTHERS)))
