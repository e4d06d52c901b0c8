"""litellm, langchain-openai and pydantic-ai, unmodified, in environments of their own."""

from __future__ import annotations

import re

import pytest

from tests.clients.asking import CALLS, MAX_TOKENS, PROMPTS, python_of, run, run_program
from tests.helpers.paths import ROOT

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


def test_the_langchain_lines_of_the_page_on_questions(server, tmp_path):
    page = (ROOT / "docs" / "questions.md").read_text()
    (program,) = re.findall(r"^```python\n(from langchain.*?)^```$", page, re.S | re.M)
    program = program.replace("http://127.0.0.1:8000", server.url).replace("cadenza-demo", server.name)
    assert len(run(python_of("langchain"), "-c", program, cwd=tmp_path)) > 10


def test_pydantic_ai(server, answers, tmp_path):
    """What it makes has passed its own checks: of a tagged union, a dict of known keys, and a format of its own."""
    found = run_program(python_of("pydantic-ai"), "with_pydantic_ai.py", server, tmp_path)
    assert len(found["made"]) == 5
    for owner in found["made"]:
        assert set(owner) == {"pet", "rooms", "secret"}
        assert set(owner["pet"]) in ({"kind", "lives"}, {"kind", "is_good"})
    assert found["text"] == answers.chat
    assert 0 < found["tokens"] <= MAX_TOKENS
