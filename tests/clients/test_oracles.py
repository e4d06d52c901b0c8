"""Parsers of SGLang's and vLLM's packages read what our formats write. Where they differ, the template decides."""

from __future__ import annotations

import json
import re
import subprocess
from typing import Any

import pytest

from cadenza_common.call_formats.catalog import BY_NAME
from cadenza_common.call_formats.writing import written_calls
from tests.clients.asking import python_of
from tests.helpers.paths import ROOT

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]
SGLANG = {
    ("apertus", 0): ("apertus2509_detector", "Apertus2509Detector"),
    ("cohere", 0): ("cohere_command4_detector", "CohereCommand4Detector"),
    ("deepseek_v3", 0): ("deepseekv3_detector", "DeepSeekV3Detector"),
    ("deepseek_v31", 0): ("deepseekv31_detector", "DeepSeekV31Detector"),
    ("deepseek_v32", 0): ("deepseekv32_detector", "DeepSeekV32Detector"),
    ("deepseek_v32", 1): ("deepseekv4_detector", "DeepSeekV4Detector"),
    ("gemma4", 0): ("gemma4_detector", "Gemma4Detector"),
    ("gigachat3", 0): ("gigachat3_detector", "GigaChat3Detector"),
    ("glm45", 0): ("glm4_moe_detector", "Glm4MoeDetector"),
    ("glm45", 1): ("glm47_moe_detector", "Glm47MoeDetector"),
    ("hermes", 0): ("hermes_detector", "HermesDetector"),
    ("kimi_k2", 0): ("kimik2_detector", "KimiK2Detector"),
    ("lfm2", 0): ("lfm2_detector", "Lfm2Detector"),
    ("llama3_json", 0): ("llama32_detector", "Llama32Detector"),
    ("minicpm5", 0): ("minicpm5_detector", "MiniCPM5Detector"),
    ("minimax_m2", 0): ("minimax_m2", "MinimaxM2Detector"),
    ("minimax_m3", 0): ("minimax_m3", "MinimaxM3Detector"),
    ("mistral", 0): ("mistral_detector", "MistralDetector"),
    ("mistral", 2): ("mistral_detector", "MistralDetector"),
    ("muse", 0): ("muse_glimmer_detector", "MuseGlimmerDetector"),
    ("pythonic", 0): ("pythonic_detector", "PythonicDetector"),
    ("qwen3_coder", 0): ("qwen3_coder_detector", "Qwen3CoderDetector"),
}
VLLM = {
    ("apertus", 0): "apertus",
    ("deepseek_v3", 0): "deepseek_v3",
    ("deepseek_v31", 0): "deepseek_v31",
    ("deepseek_v32", 0): "deepseek_v32",
    ("deepseek_v32", 1): "deepseek_v4",
    ("firefunction", 0): "phi4_mini_json",
    ("functiongemma", 0): "functiongemma",
    ("gemma4", 0): "gemma4",
    ("gigachat3", 0): "gigachat3",
    ("glm45", 0): "glm45",
    ("glm45", 1): "glm47",
    ("glm45", 2): "ling3",
    ("granite", 0): "granite",
    ("hermes", 0): "hermes",
    ("internlm", 0): "internlm",
    ("kimi_k2", 0): "kimi_k2",
    ("kimi_k3", 0): "kimi_k3",
    ("lfm2", 0): "lfm2",
    ("llama3_json", 0): "llama3_json",
    ("longcat", 0): "longcat",
    ("minicpm5", 0): "minicpm5",
    ("minimax_m2", 0): "minimax_m2",
    ("minimax_m3", 0): "minimax_m3",
    ("mistral", 0): "mistral",
    ("mistral", 1): "mistral",
    ("mistral", 2): "mistral",
    ("mistral", 3): "mistral",
    ("muse", 0): "muse_glimmer",
    ("muse", 1): "muse",
    ("olmo3", 0): "olmo3",
    ("pythonic", 0): "llama4_pythonic",
    ("qwen3_coder", 0): "qwen3_coder",
    ("seed_oss", 0): "seed_oss",
}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "names": {"type": "array", "items": {"type": "string"}},
        "more": {"type": "object", "properties": {"exact": {"type": "boolean"}}},
    },
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("get_weather", "f")]
CASES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "all kinds": [("get_weather", {"city": "Oslo", "days": 2, "names": ["a", "b"], "more": {"exact": True}})],
    "two calls": [("get_weather", {"city": 'Oslo "x" é'}), ("f", {"days": 1})],
    "no arguments": [("f", {})],
    "marks": [("f", {"city": "a < b & c"}), ("f", {"city": "<tool_call>"}), ("get_weather", {"city": "two\nlines"})],
}
HOWS = ("whole", "streamed")
_SAME_INDEX = "their stream numbers two calls of one tool alike, and clients join them: ours is right"
_ONE_CALL = "the template shows one call of several, and they read one alone: nothing is lost with ours"
_NO_SPACE = "they want a space behind [TOOL_CALLS], which Nemo's template does not write: ours is right"
_STRINGS_ALONE = "they read arguments that are strings alone: ours is right"
_NO_CALLS = "they take several calls for one, or fail: nothing is lost with ours"
_ID_IN_NAME = "they take [CALL_ID] for a part of the name: ours is right"
_NO_LIST = "they read a list of calls with Mistral's own tokenizer alone: ours reads both forms"
_NESTED = "their pattern ends at the first ]: ours is right"
_NO_STREAM = "they do not stream this form: ours does"
SGLANG_DIFFERS: dict[tuple[str, int, str, str], str] = {
    ("cohere", 0, "marks", "streamed"): _SAME_INDEX,
    ("gemma4", 0, "marks", "streamed"): _SAME_INDEX,
    **{("gigachat3", 0, case, how): _ONE_CALL for case in ("two calls", "marks") for how in HOWS},
    **{("mistral", 2, case, how): _NO_SPACE for case in CASES for how in HOWS},
}
"""Format, way, case and how: where they read something else, and who is right by the template."""
VLLM_DIFFERS: dict[tuple[str, int, str, str], str] = {
    ("firefunction", 0, "all kinds", "whole"): _NESTED,
    **{("firefunction", 0, case, "streamed"): _NO_STREAM for case in CASES},
    **{("functiongemma", 0, case, how): _STRINGS_ALONE for case in ("all kinds", "two calls") for how in HOWS},
    **{("gigachat3", 0, case, how): _NO_CALLS for case in ("two calls", "marks") for how in HOWS},
    **{("internlm", 0, case, how): _NO_CALLS for case in ("two calls", "marks") for how in HOWS},
    **{("mistral", 1, case, how): _ID_IN_NAME for case in CASES for how in HOWS},
    **{("mistral", 2, case, how): _NO_LIST for case in CASES for how in HOWS},
}


def pieces_of(text: str, markers: tuple[str, ...]) -> list[str]:
    """A text as it comes: markers whole, since they are tokens."""
    parts = re.split(f"({'|'.join(map(re.escape, markers))})", text)
    return [
        piece
        for part in parts
        if part
        for piece in ([part] if part in markers else [part[at : at + 4] for at in range(0, len(part), 4)])
    ]


def test_sglang_reads_the_same_calls():
    parsers = {way: {"module": module, "parser": parser} for way, (module, parser) in SGLANG.items()}
    differing = differing_from("sglang", parsers)
    assert differing.keys() == SGLANG_DIFFERS.keys(), "\n".join(f"{key}: {text}" for key, text in differing.items())


def test_vllm_reads_the_same_calls():
    differing = differing_from("vllm-parsers", {way: {"parser": parser} for way, parser in VLLM.items()})
    assert differing.keys() == VLLM_DIFFERS.keys(), "\n".join(f"{key}: {text}" for key, text in differing.items())


def differing_from(environment: str, parsers: dict[tuple[str, int], dict[str, str]]) -> dict[Any, str]:
    """What the parsers of a package read otherwise, by format, way, case and how."""
    jobs, keys = [], []
    for (name, index), parser in parsers.items():
        markers = BY_NAME[name].markers
        for case, calls in CASES.items():
            pieces = pieces_of(written_calls(BY_NAME[name].ways[index], calls), markers)
            jobs.append(json.dumps({**parser, "pieces": pieces, "markers": markers, "tools": TOOLS}))
            keys.append((name, index, case))
    program = ROOT / "tests" / "clients" / "programs" / f"with_{environment.removesuffix('-parsers')}.py"
    command = [python_of(environment), program]
    ran = subprocess.run(command, input="\n".join(jobs), capture_output=True, text=True, check=True, timeout=240)
    differing = {}
    for key, line in zip(keys, ran.stdout.splitlines(), strict=True):
        found = json.loads(line)
        for how in HOWS:
            seen = found.get(how, found)
            if as_values(seen) != CASES[key[2]]:
                differing[*key, how] = str(seen)
    return differing


def as_values(calls: Any) -> Any:
    try:
        return [(name, json.loads(arguments or "{}")) for name, arguments in calls]
    except ValueError:
        return calls
