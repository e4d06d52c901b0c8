"""The architectures that Cadenza has its own code for, by the name in config.json."""

from __future__ import annotations

from executor_svc.models.base import Architecture
from executor_svc.models.llama import LlamaArchitecture

ARCHITECTURES: dict[str, Architecture] = {"LlamaForCausalLM": LlamaArchitecture()}
