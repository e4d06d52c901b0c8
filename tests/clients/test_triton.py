"""tritonclient, unmodified, with what clients of Triton's vLLM backend send."""

from __future__ import annotations

import json

import pytest

from cadenza import Client, LocalServices, SamplingParams
from tests.clients.asking import MAX_TOKENS, MODEL, PROGRAMS, PROMPTS, python_of, run

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]


def test_tritonclient(tmp_path):
    python = python_of("triton")
    options = {"kserve": "0", "device": "cpu", "served_model_name": "vllm_model"}
    with LocalServices(str(MODEL), port=0, **options) as services:
        with Client(services.target) as client:
            outputs = client.generate(list(PROMPTS), SamplingParams(temperature=0, max_tokens=MAX_TOKENS))
        texts = {prompt: each.outputs[0].text for prompt, each in zip(PROMPTS, outputs, strict=True)}
        asked = {
            "url": services.gateway["kserve"],
            "model": "vllm_model",
            "prompts": PROMPTS,
            "max_tokens": MAX_TOKENS,
        }
        found = json.loads(run(python, PROGRAMS / "with_tritonclient.py", json.dumps(asked), cwd=tmp_path))
    assert found["whole"] == {prompt: prompt + text for prompt, text in texts.items()}
    assert found["streamed"] == texts
    assert found["alone"] == texts[PROMPTS[0]]
    assert found["finals"] == [False] * (len(found["finals"]) - 1) + [True]
    assert "temperature must be a number" in found["errors"]["wrong"]
    assert found["live"]
    assert found["ready"]
    assert found["decoupled"]
    assert found["server"] == "cadenza"
    assert found["models"] == ["vllm_model"]
    assert found["inputs"][0] == "text_input"
    assert found["answered"] == 2 * len(PROMPTS) + 1
    assert "ModelStreamInfer" in found["refusal"]
