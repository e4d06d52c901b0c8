"""The AI SDK of npm, unmodified: its providers for OpenAI-compatible servers and for Anthropic's API."""

from __future__ import annotations

import json
import shutil

import pytest

from cadenza import Client, SamplingParams
from tests.clients import environments
from tests.clients.asking import MAX_TOKENS, PROMPTS, asked, run

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]


def as_completion(server) -> str:
    """What gRPC gives for a prompt as the SDK writes it for models without chats."""
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, stop=["\nuser:"])
    with Client(server.target) as client:
        (output,) = client.generate([f"user:\n{PROMPTS[0]}\n\nassistant:\n"], params)
    return output.outputs[0].text


def test_ai_sdk(server, answers):
    try:
        folder = environments.node_folder("ai")
    except environments.MissingEnvironmentError as missing:
        pytest.skip(str(missing))
    shutil.copy(environments.NODE_SOURCES / "ai" / "with_ai.js", folder)
    found = json.loads(run("node", "with_ai.js", json.dumps(asked(server)), cwd=folder).splitlines()[-1])
    for api in ("chat", "messages"):
        seen = found[api]
        assert (seen["text"], seen["streamed"]) == (answers.chat, answers.chat), api
        assert seen["tokens"] == seen["streamed_tokens"] > 0, api
        assert seen["finish"] in ("stop", "length"), api
    assert found["completion"] == as_completion(server)
    assert found["object"] in ("even", "odd"), found
