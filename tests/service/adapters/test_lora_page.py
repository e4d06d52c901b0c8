"""docs/lora.md as it stands there: an adapter is trained with peft, and served by the page's programs and commands."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cadenza_cli.app import run
from cadenza_launcher.local import LocalServices
from tests.helpers.paths import ROOT

PAGE = (ROOT / "docs" / "lora.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.S | re.M)
COMMANDS = [
    [shlex.split(line, comments=True) for line in block.splitlines()]
    for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.S | re.M)
]
LEARNED = "is cheese"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def program(number: int, folder: Path) -> str:
    """What a program of the page prints, run beside the models."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "client")])
    command = [sys.executable, "-c", PROGRAMS[number]]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models and the adapter that the page's first program makes."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "models").symlink_to(ROOT / "models")
    program(0, folder)
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(os.listdir(folder / "adapters" / "moon"))
    return folder


def test_the_program_that_serves_it_shows_what_it_has_learned(folder: Path) -> None:
    with_adapter, without = program(1, folder).splitlines()
    assert LEARNED in with_adapter
    assert LEARNED not in without


@pytest.mark.parametrize("block", range(len(COMMANDS)))
def test_commands_run(
    block: int, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    (_, up, model, *options), *commands = COMMANDS[block]
    assert up == "up"
    given = dict(zip((each.removeprefix("--").replace("-", "_") for each in options[::2]), options[1::2], strict=True))
    with LocalServices(model, num_gpu_blocks=256, **given) as services:
        for name, *arguments in commands:
            assert name == "cadenza"
            assert run([*arguments, "--target", services.target]) == 0, arguments
            out = capfd.readouterr().out
            if arguments[0] == "generate":
                assert LEARNED in out
            elif arguments[1] != "list":
                assert "moon" in out
