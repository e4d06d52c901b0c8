"""The field's own templates: each is found, reads its own calls and thoughts, or is said not to be known."""

from __future__ import annotations

import pytest

from cadenza_common.call_formats.examples import EXAMPLE_CALLS
from gateway_svc.parsing.detection import shown_calls
from gateway_svc.parsing.formats import find_formats
from tests.helpers import real_files
from tests.helpers.models.shown_models import shown_model

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]
FOUND = {
    "Apertus-8B-Instruct": ("apertus", "apertus"),
    "Apriel-1.6-15b-Thinker-fixed": ("apriel", "apriel"),
    "Bielik-11B-v3.0-Instruct": ("hermes", "qwen3"),
    "ByteDance-Seed-OSS": ("seed_oss", "seed_oss"),
    "Cohere2MoE": ("cohere", "cohere"),
    "CohereForAI-c4ai-command-r-plus-tool_use": ("command_r", None),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": ("cohere", "cohere"),
    "GLM-4.6": ("glm45", "qwen3"),
    "GLM-4.7-Flash": ("glm45", "qwen3"),
    "GigaChat3-10B-A1.8B": ("gigachat3", None),
    "GigaChat3.1-10B-A1.8B": ("gigachat3", None),
    "HuggingFaceTB-SmolLM3-3B": (None, "qwen3"),
    "Kimi-K2-Instruct": ("kimi_k2", None),
    "Kimi-K2-Thinking": ("kimi_k2", "qwen3"),
    "Kimi-K3": ("kimi_k3", "kimi_k3"),
    "LFM2-8B-A1B": ("lfm2", None),
    "LFM2.5-8B-A1B": ("lfm2", "qwen3"),
    "LFM2.5-Instruct": ("lfm2", None),
    "MiMo-VL": ("hermes", None),
    "MiniMax-M1": ("minimax", None),
    "MiniMax-M2": ("minimax_m2", "qwen3"),
    "MiniMax-M3": ("minimax_m3", "minimax_m3"),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral", None),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("qwen3_coder", "qwen3"),
    "NVIDIA-Nemotron-Nano-v2": ("nemotron", "qwen3"),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": ("hermes", None),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("hermes", None),
    "Qwen-QwQ-32B": ("hermes", "qwen3"),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", None),
    "Qwen-Qwen3-0.6B": ("hermes", "qwen3"),
    "Qwen3-Coder": ("qwen3_coder", None),
    "Qwen3.5-4B": ("qwen3_coder", "qwen3"),
    "Reka-Edge": ("hermes", "qwen3"),
    "Spark2.5": ("glm45", "qwen3"),
    "StepFun3.5-Flash": ("qwen3_coder", "qwen3"),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": (None, "qwen3"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": (None, "qwen3"),
    "deepseek-ai-DeepSeek-V3.1": (None, "qwen3"),
    "deepseek-ai-DeepSeek-V3.2": ("deepseek_v32", "qwen3"),
    "deepseek-ai-DeepSeek-V4": ("deepseek_v32", "qwen3"),
    "deepseek-ai-DeepSeek-V4-Flash-0731": ("deepseek_v32", "qwen3"),
    "fireworks-ai-llama-3-firefunction-v2": ("firefunction", None),
    "google-gemma-2-2b-it": (None, None),
    "google-gemma-4-31B-it": ("gemma4", "gemma4"),
    "google-gemma-4-31B-it-interleaved": ("gemma4", "gemma4"),
    "ibm-granite-granite-3.3-2B-Instruct": ("granite", "granite"),
    "ibm-granite-granite-4.0": ("hermes", None),
    "ibm-granite-granite-4.1": ("hermes", None),
    "inclusionai-ling-3.0-flash": ("glm45", "qwen3"),
    "llama-cpp-deepseek-r1": ("deepseek_v3", "qwen3"),
    "llama-cpp-rwkv-world": (None, "qwen3"),
    "meetkai-functionary-medium-v3.1": ("functionary_v31", None),
    "meetkai-functionary-medium-v3.2": ("functionary_v32", None),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama3_json", None),
    "meta-llama-Llama-3.2-3B-Instruct": ("llama3_json", None),
    "meta-llama-Llama-3.3-70B-Instruct": ("llama3_json", None),
    "microsoft-Phi-3.5-mini-instruct": (None, None),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral", "mistral"),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", None),
    "moonshotai-Kimi-K2": ("kimi_k2", None),
    "muse-glimmer": ("muse", "muse"),
    "openai-gpt-oss-120b": ("openai", "openai_gptoss"),
    "openbmb-MiniCPM5-1B": ("minicpm5", "qwen3"),
    "poolside-Laguna-S-2.1": ("glm45", "qwen3"),
    "poolside-Laguna-XS-2.1": ("glm45", "qwen3"),
    "poolside-Laguna-XS.2": ("glm45", "qwen3"),
    "tencent-Hy3": ("hunyuan", "hunyuan"),
    "unsloth-Apriel-1.5": ("apriel", None),
    "unsloth-mistral-Devstral-Small-2507": ("mistral", None),
    "upstage-Solar-Open-100B": ("solar", "solar"),
}
"""Calls and thoughts of the 70."""


def test_each_template_is_found_and_its_calls_are_read():
    found, num_read = {}, 0
    for name, text in real_files.templates().items():
        info = shown_model(text)
        formats = find_formats(info)
        found[name] = formats.tools, formats.reasoning
        if formats.tools is None:
            continue
        assert info.chat_examples is not None
        assert shown_calls(info.chat_examples.call, info.chat_examples, formats.tools) == [EXAMPLE_CALLS[0]], name
        num_read += 1
    assert found == FOUND
    assert num_read == sum(tools is not None for tools, _ in FOUND.values())
