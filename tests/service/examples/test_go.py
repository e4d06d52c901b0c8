"""The Go program in examples/go, compiled with Debian's gRPC and run against a real server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.examples import REFUSED_TOP_P, build, run
from tests.helpers.services import connection

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the compiled program."""
    folder = tmp_path_factory.mktemp("go")
    build("go", folder)
    return folder


async def test_go_gets_the_same_texts(built: Path, target: str, answers: dict[str, str]) -> None:
    for prompt, answer in answers.items():
        lines = run(built / "generate", target, prompt).splitlines()
        assert lines == [answer, f"[InvalidArgument] {REFUSED_TOP_P}", "[Canceled]", "[DeadlineExceeded]"]
    async with connection(target) as running:
        await running.wait_until_free()
