"""A real server for the examples, and what our client gets from it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cadenza import Client, LocalServices, SamplingParams
from tests.helpers.examples import PROMPT
from tests.helpers.paths import ROOT

GREEDY = SamplingParams(temperature=0, max_tokens=64)


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    with LocalServices(str(ROOT / "models" / "cadenza-demo"), port=0) as services:
        yield services.target


@pytest.fixture(scope="module")
def answers(target: str) -> dict[str, str]:
    """Our client's greedy answers."""
    prompts = [PROMPT, "Hello!", "Count from 3 to 9."]
    with Client(target) as client:
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        outputs = client.chat(chats, GREEDY)
    return {prompt: output.outputs[0].text for prompt, output in zip(prompts, outputs, strict=True)}
