"""The architectures with code in Cadenza, by their names in config.json. docs/models.md describes each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from executor_svc.models.families.gemma import read_gemma2, read_gemma3
from executor_svc.models.families.granite import read_granite
from executor_svc.models.families.llama import read_llama
from executor_svc.models.families.mimo import read_mimo
from executor_svc.models.families.mistral import read_mistral
from executor_svc.models.families.phi3 import read_phi3
from executor_svc.models.families.qwen import read_qwen2, read_qwen3
from executor_svc.models.spec import DecoderSpec

ARCHITECTURES: dict[str, Callable[[dict[str, Any]], DecoderSpec]] = {
    "Gemma2ForCausalLM": read_gemma2,
    "Gemma3ForCausalLM": read_gemma3,
    "GraniteForCausalLM": read_granite,
    "LlamaForCausalLM": read_llama,
    "MiMoForCausalLM": read_mimo,
    "MistralForCausalLM": read_mistral,
    "Phi3ForCausalLM": read_phi3,
    "Qwen2ForCausalLM": read_qwen2,
    "Qwen3ForCausalLM": read_qwen3,
}


def own_architecture(names: Sequence[str]) -> str | None:
    """Return the first of the names in config.json with code in Cadenza."""
    return next((name for name in names if name in ARCHITECTURES), None)


def unknown_architecture(names: Sequence[str], model_type: object) -> str:
    """Return the error message for architectures that neither Cadenza nor transformers supports."""
    given, supported = ", ".join(names) or "none", ", ".join(sorted(ARCHITECTURES))
    return (
        f"architecture {given} in config.json, with model_type {model_type!r}, is not supported; "
        f"supported: {supported}, and most causal LMs of transformers, such as "
        "GPTNeoXForCausalLM (docs/models.md)"
    )
