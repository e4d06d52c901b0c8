"""The gateway before the demo model: the SDKs of OpenAI and Anthropic for Node, unmodified."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from cadenza import Client, LocalServices, SamplingParams
from tests.helpers.examples import run
from tests.helpers.machine.node_packages import need_node, with_packages
from tests.helpers.paths import ROOT

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]
ASKED = {"model": "demo", "question": "What is 27 + 48?", "prompt": "12+34=", "max_tokens": 16}
GREEDY = SamplingParams(temperature=0, max_tokens=16)


@pytest.fixture(scope="module")
def services() -> Iterator[LocalServices]:
    options = {"http": "0", "device": "cpu", "num_threads": 1, "max_num_seqs": 16, "served_model_name": "demo"}
    with LocalServices(str(ROOT / "models" / "cadenza-demo"), port=0, **options) as running:
        yield running


@pytest.fixture(scope="module")
def expected(services: LocalServices) -> tuple[str, str]:
    """The answer to the question, and the continuation of the prompt, over gRPC."""
    with Client(services.target) as client:
        (chat,) = client.chat([{"role": "user", "content": ASKED["question"]}], GREEDY)
        (text,) = client.generate([ASKED["prompt"]], GREEDY)
    return chat.outputs[0].text, text.outputs[0].text


@pytest.fixture(scope="module")
def sdks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_node()
    folder = tmp_path_factory.mktemp("node") / "sdks"
    shutil.copytree(ROOT / "tests" / "clients" / "node" / "sdks", folder)
    return with_packages(folder)


def ask(program: str, services: LocalServices, folder: Path) -> dict:
    return json.loads(run("node", program, json.dumps({**ASKED, "url": f"http://{services.http}"}), cwd=folder))


def test_openais_sdk_for_node(services, expected, sdks):
    chat, text = expected
    found = ask("with_openai.js", services, sdks)
    assert found["models"] == ["demo"]
    answers = ("chat", "streamed", "helper", "response", "response_streamed", "response_helper")
    assert {name: found[name] for name in answers} == dict.fromkeys(answers, chat)
    assert found["completion"] == text
    assert found["tokens"] == found["streamed_tokens"] > 0
    assert found["metadata"] == {"name": "value"}
    assert found["error"] == [True, 404, "model_not_found", "model"]


def test_anthropics_sdk_for_node(services, expected, sdks):
    chat, _ = expected
    found = ask("with_anthropic.js", services, sdks)
    assert (found["text"], found["streamed"], found["final"]) == (chat,) * 3
    assert found["usage"] == [found["counted"], found["streamed_tokens"]]
    assert found["stop"] in ("end_turn", "max_tokens")
    assert found["error"] == [True, 400, "invalid_request_error"]
