"""tritonclient, unmodified, with what clients of Triton's vLLM backend send."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cadenza import Client, LocalServices, SamplingParams
from tests.clients.asking import MAX_TOKENS, MODEL, PROGRAMS, PROMPTS, python_of, run

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]


_SAMPLE = os.environ.get("TRITON_SAMPLE_CLIENT", "")


@pytest.fixture(scope="module")
def services() -> Iterator[LocalServices]:
    options = {"kserve": "0", "device": "cpu", "served_model_name": "vllm_model"}
    with LocalServices(str(MODEL), port=0, **options) as running:
        yield running


def test_tritonclient(services, tmp_path):
    python = python_of("triton")
    with Client(services.target) as client:
        outputs = client.generate(list(PROMPTS), SamplingParams(temperature=0, max_tokens=MAX_TOKENS))
    texts = {prompt: each.outputs[0].text for prompt, each in zip(PROMPTS, outputs, strict=True)}
    asked = {"url": services.gateway["kserve"], "model": "vllm_model", "prompts": PROMPTS, "max_tokens": MAX_TOKENS}
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


@pytest.mark.parametrize("streams", [False, True])
def test_the_sample_client_of_tritons_vllm_backend(services, tmp_path, streams):
    """It draws its tokens without a seed: what is known is that each prompt has an answer, after the prompt or alone.

    Streams want --exclude-inputs-in-outputs of it, as before Triton.
    """
    if not _SAMPLE:
        pytest.skip("TRITON_SAMPLE_CLIENT names samples/client.py of github.com/triton-inference-server/vllm_backend")
    (tmp_path / "prompts.txt").write_text("".join(f"{prompt}\n" for prompt in PROMPTS))
    options = ["-u", services.gateway["kserve"], *(["-s", "--exclude-inputs-in-outputs"] if streams else [])]
    printed = run(python_of("triton"), Path(_SAMPLE).resolve(), *options, cwd=tmp_path)
    assert "PASS" in printed
    assert "Encountered" not in printed
    answers = (tmp_path / "results.txt").read_text().split("\n=========\n\n")[:-1]
    assert len(answers) == len(PROMPTS)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer.startswith(f"{prompt}\n") is not streams
        assert answer.removeprefix(f"{prompt}\n").strip()
