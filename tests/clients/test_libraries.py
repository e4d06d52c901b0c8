"""litellm and langchain-openai, unmodified, in environments of their own."""

from __future__ import annotations

import pytest

from tests.clients.asking import CALLS, PROMPTS, python_of, run_program

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]


def test_litellm(server, answers, tmp_path):
    found = run_program(python_of("litellm"), "with_litellm.py", server, tmp_path)
    for provider in ("openai", "hosted_vllm"):
        seen = found[provider]
        assert (seen["text"], seen["streamed"]) == (answers.chat, answers.chat), provider
        assert seen["tokens"] == seen["streamed_tokens"] > 0
        assert seen["finish"] in ("stop", "length")
    assert len(found["calls"]) == 2
    assert all(call in CALLS for call in found["calls"])
    assert set(found["ends"]) <= {"stop", "length", "tool_calls"}
    assert len(found["ends"]) == 2
    assert found["completion"] == answers.texts[PROMPTS[0]]
    assert found["is_too_long"]


def test_langchain(server, answers, tmp_path):
    found = run_program(python_of("langchain"), "with_langchain.py", server, tmp_path)
    assert (found["text"], found["streamed"], found["responses"]) == (answers.chat,) * 3
    assert found["tokens"] == found["streamed_tokens"] > 0
    assert found["finish"] in ("stop", "length")
    assert len(found["calls"]) == 2
    assert all(call in CALLS for call in found["calls"])
    assert found["num_ends"] == 2
    assert found["completion"] == answers.texts[PROMPTS[0]]
    assert found["is_too_long"]
