"""The Python programs in examples/, against a real server."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from cadenza import Client, SamplingParams
from tests.helpers.examples import EXAMPLES, PROMPT, REFUSED_TOP_P, run
from tests.helpers.paths import ROOT
from tests.helpers.services import connection

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


# The top-level packages each may use: which way of calling it shows.
PACKAGES = {
    "python_client.py": {"cadenza"},
    "python_asyncio.py": {"cadenza"},
    "python_stubs.py": {"cadenza.v1", "grpc", "grpc_status", "google.rpc"},
    "session_load.py": {"cadenza.v1", "grpc", "google.rpc"},
    "python_reflection.py": {
        *("google.protobuf", "google.protobuf.descriptor_pool", "google.rpc", "grpc", "grpc_status"),
        "grpc_reflection.v1alpha.proto_reflection_descriptor_database",
    },
}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_a_python_example_uses_the_packages_that_it_is_about(path: Path) -> None:
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            modules.add(node.module or "")
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
    third_party = {name for name in modules if name.partition(".")[0] not in sys.stdlib_module_names}
    assert third_party == PACKAGES[path.name]


async def left_free(target: str) -> None:
    """Waits until no request of an example runs on; fails if one does."""
    async with connection(target) as running:
        await running.wait_until_free()


REFUSED_TOKEN = "[invalid] sampling_params.logit_bias[1000000]: 1000000 is not below the vocabulary size 2048"


async def test_python_client(target: str, answers: dict[str, str]) -> None:
    lines = run(sys.executable, EXAMPLES / "python_client.py", "--target", target, PROMPT).splitlines()
    with Client(target) as client:
        raw = client.generate(["12+34=", "56+78="], SamplingParams(temperature=0, max_tokens=64))
    assert lines == [
        answers[PROMPT],
        "[stop]",
        *(f"{output.prompt}{output.outputs[0].text}" for output in raw),
        REFUSED_TOKEN,
        "[aborted]",
        "[abort]",
    ]
    await left_free(target)


def test_llm_gives_the_same_text(answers: dict[str, str]) -> None:
    model = str(ROOT / "models" / "cadenza-demo")
    assert run(sys.executable, EXAMPLES / "python_client.py", "--model", model, PROMPT) == answers[PROMPT] + "\n"


async def test_python_asyncio(target: str, answers: dict[str, str]) -> None:
    lines = run(sys.executable, EXAMPLES / "python_asyncio.py", "--target", target, *answers).splitlines()
    assert lines == [
        *(f"{prompt} {answer}" for prompt, answer in answers.items()),
        "[time limit]",
        "[cancelled]",
        REFUSED_TOKEN,
    ]
    await left_free(target)


async def test_python_reflection(target: str, answers: dict[str, str]) -> None:
    lines = run(sys.executable, EXAMPLES / "python_reflection.py", "--target", target, PROMPT).splitlines()
    assert lines == [
        "cadenza.v1.AdminService cadenza.v1.GenerationService grpc.health.v1.Health "
        "grpc.reflection.v1alpha.ServerReflection",
        "Generate Session Abort GetModelInfo GetServerInfo Tokenize Detokenize GetTokenizerFiles",
        answers[PROMPT],
        f"[INVALID_ARGUMENT] {REFUSED_TOP_P}",
        "[deadline] DEADLINE_EXCEEDED",
    ]
    await left_free(target)


async def test_python_stubs(target: str, answers: dict[str, str]) -> None:
    lines = run(sys.executable, EXAMPLES / "python_stubs.py", "--target", target, PROMPT).splitlines()
    r0, r1, r2 = answers.values()
    assert lines == [
        r0,
        "[FINISH_REASON_STOP]",
        f"[INVALID_ARGUMENT] {REFUSED_TOP_P}",
        "[cancelled] CANCELLED",
        "[deadline] DEADLINE_EXCEEDED",
        "[timeout_s] FINISH_DETAIL_DEADLINE",
        f"[r0] {r0}",
        f"[r1] {r1}",
        f"[r2] {r2}",
        r0,
    ]
    await left_free(target)
