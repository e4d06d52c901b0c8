"""The names of the formats, as options have them; tests hold them to the tables."""

from __future__ import annotations

from typing import Literal

ToolFormat = Literal[
    "hermes", "llama3_json", "pythonic", "mistral", "qwen3_coder", "apertus", "apriel", "cohere", "command_r",
    "deepseek_v3", "deepseek_v31", "deepseek_v32", "firefunction", "functiongemma", "functionary_v31",
    "functionary_v32", "gemma4", "gigachat3", "glm45", "granite", "hunyuan", "internlm", "kimi_k2", "kimi_k3", "lfm2",
    "longcat", "minicpm5", "minimax", "minimax_m2", "minimax_m3", "muse", "nemotron", "olmo3", "openai",
    "phi4_mini_json", "seed_oss", "solar",
]  # fmt: skip
ReasoningFormat = Literal[
    "deepseek_r1", "qwen3", "mistral", "apertus", "apriel", "cohere", "gemma4", "granite", "hunyuan", "hunyuan_a13b",
    "kimi_k3", "minimax_m3", "muse", "openai_gptoss", "seed_oss", "solar",
]  # fmt: skip
ToolOption = Literal["auto", "none"] | ToolFormat
ReasoningOption = Literal["auto", "none"] | ReasoningFormat
