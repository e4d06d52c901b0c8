"""One server for all clients, and what gRPC gives of it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cadenza import Client, LocalServices, SamplingParams
from tests.clients import environments
from tests.helpers.paths import ROOT

MODEL = ROOT / "models" / "cadenza-demo"
PROGRAMS = Path(__file__).with_name("programs")
MAX_TOKENS = 16
QUESTION = "What is 27 + 48?"
PROMPTS = ("12+34=", "5+5=", "90-45=", "The number after 7 is")


@dataclass(frozen=True, slots=True)
class Server:
    """`cadenza up --http 0` on the demo model."""

    url: str
    """Without /v1."""
    target: str
    """Of the scheduler."""
    name: str
    """Of the model."""


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    options = {"http": "0", "device": "cpu", "max_num_seqs": 16, "served_model_name": "demo"}
    with LocalServices(str(MODEL), port=0, **options) as running:
        yield Server(f"http://{running.http}", running.target, "demo")


@dataclass(frozen=True, slots=True)
class Answers:
    """Greedy answers over gRPC."""

    chat: str
    """To QUESTION."""
    texts: dict[str, str]
    """To each of PROMPTS."""


@pytest.fixture(scope="session")
def answers(server: Server) -> Answers:
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    with Client(server.target) as client:
        (chat,) = client.chat([{"role": "user", "content": QUESTION}], params)
        outputs = client.generate(list(PROMPTS), params)
    return Answers(
        chat.outputs[0].text, {each: found.outputs[0].text for each, found in zip(PROMPTS, outputs, strict=True)}
    )


def python_of(name: str) -> Path:
    """The interpreter of a client's environment; skips the test without one."""
    try:
        return environments.python_of(name)
    except environments.MissingEnvironmentError as missing:
        pytest.skip(str(missing))


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """What a client prints; it must end well. It reaches no hub, and no other server than ours."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", **variables}
    for name in ("PYTHONPATH", "OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        if name not in variables:
            environment.pop(name, None)
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=280
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def run_program(python: Path, name: str, server: Server, cwd: Path) -> dict[str, Any]:
    """The JSON object in the last line of a program of ours that uses a client's library."""
    return json.loads(run(python, PROGRAMS / name, json.dumps(asked(server)), cwd=cwd).splitlines()[-1])


def asked(server: Server) -> dict[str, Any]:
    """What programs are to ask."""
    return {
        "url": server.url,
        "model": server.name,
        "question": QUESTION,
        "prompt": PROMPTS[0],
        "max_tokens": MAX_TOKENS,
    }
