"""What clients are to ask, and how they are run."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.clients import environments
from tests.helpers.paths import ROOT

MODEL = ROOT / "models" / "cadenza-demo"
PROGRAMS = Path(__file__).with_name("programs")
MAX_TOKENS = 16
QUESTION = "What is 27 + 48?"
TOOL = {
    "name": "turn",
    "description": "Turn a lamp.",
    "parameters": {
        "type": "object",
        "properties": {"to": {"enum": ["on", "off"]}},
        "required": ["to"],
        "additionalProperties": False,
    },
}
CALLS = [{"name": "turn", "arguments": {"to": to}} for to in ("on", "off")]
"""What a model that must call TOOL may answer."""
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


@dataclass(frozen=True, slots=True)
class Answers:
    """Greedy answers over gRPC."""

    chat: str
    """To QUESTION."""
    texts: dict[str, str]
    """To each of PROMPTS."""


def asked(server: Server) -> dict[str, Any]:
    """What programs are to ask."""
    return {
        "url": server.url,
        "model": server.name,
        "question": QUESTION,
        "prompt": PROMPTS[0],
        "tool": TOOL,
        "max_tokens": MAX_TOKENS,
    }


def python_of(name: str) -> Path:
    """The interpreter of a client's environment; skips the test without one."""
    try:
        return environments.python_of(name)
    except environments.MissingEnvironmentError as missing:
        pytest.skip(str(missing))


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """What a client prints; it must end well. It reaches no hub, and has no key of the caller's environment."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    for name in ("PYTHONPATH", "OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        environment.pop(name, None)
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=280,
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def run_program(python: Path, name: str, server: Server, cwd: Path) -> dict[str, Any]:
    """The JSON object in the last line of a program of ours that uses a client's library."""
    return json.loads(run(python, PROGRAMS / name, json.dumps(asked(server)), cwd=cwd).splitlines()[-1])
