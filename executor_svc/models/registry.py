"""The architectures that Cadenza has its own code for, by the name in config.json. docs/models.md describes each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from executor_svc.models.families.gemma import read_gemma2, read_gemma3
from executor_svc.models.families.granite import read_granite
from executor_svc.models.families.llama import read_llama
from executor_svc.models.families.mistral import read_mistral
from executor_svc.models.families.phi3 import read_phi3
from executor_svc.models.families.qwen import read_qwen2, read_qwen3
from executor_svc.models.spec import DecoderSpec

ARCHITECTURES: dict[str, Callable[[dict[str, Any]], DecoderSpec]] = {
    "Gemma2ForCausalLM": read_gemma2,
    "Gemma3ForCausalLM": read_gemma3,
    "GraniteForCausalLM": read_granite,
    "LlamaForCausalLM": read_llama,
    "MistralForCausalLM": read_mistral,
    "Phi3ForCausalLM": read_phi3,
    "Qwen2ForCausalLM": read_qwen2,
    "Qwen3ForCausalLM": read_qwen3,
}
