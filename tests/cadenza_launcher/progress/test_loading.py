"""What LLM() shows on stderr while it starts, with small scripts in place of the two services."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from cadenza import LLM, OptionError
from tests.helpers.machine.terminal import Terminal
from tests.helpers.service_scripts import SERVICE, Fakes

pytestmark = pytest.mark.slow

PROGRAM = "from cadenza import LLM\nLLM('some/model'{options}).close()\n"
STARTING = "cadenza: starting executor and scheduler, loading some/model"


@pytest.fixture
def fakes(tmp_path) -> Fakes:
    return Fakes(tmp_path)


def script(fakes: Fakes, options: str = "") -> list[str]:
    return [sys.executable, "-c", fakes.prelude + PROGRAM.format(options=options)]


def run(fakes: Fakes, options: str = "") -> subprocess.CompletedProcess:
    return subprocess.run(script(fakes, options), capture_output=True, text=True, timeout=60, check=False)


def test_two_plain_lines_without_a_terminal(fakes):
    result = run(fakes)
    starting, ready = result.stderr.splitlines()
    assert starting == STARTING
    assert re.fullmatch(r"cadenza: some/model is ready in \d+\.\d s", ready)
    assert (result.stdout, result.returncode) == ("", 0)


def test_several_executors_are_counted(fakes):
    starting, _ = run(fakes, ", executors=3").stderr.splitlines()
    assert starting == "cadenza: starting 3 executors and scheduler, loading some/model"


def test_nothing_is_shown_with_the_keyword_of_vllm(fakes):
    result = run(fakes, ", use_tqdm_on_load=False")
    assert (result.stdout, result.stderr, result.returncode) == ("", "", 0)


def test_wrong_options_are_refused_before_anything_is_shown(fakes, capsys):
    assert "starting" not in run(fakes, ", block_size=3").stderr
    with pytest.raises(OptionError, match="option model: must be a folder, a GGUF file or a hub id, not 5"):
        LLM(5)
    assert capsys.readouterr().err == ""


def slow_executor(fakes: Fakes, message: str):
    """Let the executor log a message and get ready only when the file is there that is returned."""
    go_on = fakes.folder / "go_on"
    wait = (
        f"print('2026 INFO executor_svc.x: ' + {message!r}, file=sys.stderr, flush=True)\n"
        f"while not pathlib.Path({str(go_on)!r}).exists():\n    time.sleep(0.01)\n"
    )
    (fakes.folder / "executor.py").write_text(SERVICE.replace("host, _, port", f"{wait}host, _, port"))
    return go_on


def test_a_live_line_in_a_terminal(fakes):
    """It shows for how long and the executor's last message, is cut at the width, and the last state stays."""
    go_on = slow_executor(fakes, "read 3 of 4\x1b[2J files" + 80 * ".")
    terminal = Terminal(*script(fakes), kind="xterm", size=(110, 10))
    try:
        lines = terminal.wait_for_screen("read 3 of 4")
        assert re.fullmatch(rf"{STARTING}, \d+ s; read 3 of 4\[2J files\.+", lines[0])
        assert (len(lines[0]), lines[1]) == (109, "")
        go_on.touch()
        terminal.rest()
        assert re.fullmatch(r"cadenza: some/model is ready in \d+\.\d s", terminal.screen[0])
        assert terminal.screen[1:] == [""] * 9
    finally:
        terminal.close()


def test_a_live_line_of_wide_characters(fakes):
    go_on = slow_executor(fakes, 60 * "读取")
    terminal = Terminal(*script(fakes), kind="xterm", size=(110, 10))
    try:
        assert terminal.wait_for_screen("读取")[1:] == [""] * 9
        go_on.touch()
        terminal.rest()
        assert re.fullmatch(r"cadenza: some/model is ready in \d+\.\d s", terminal.screen[0])
    finally:
        terminal.close()


def test_the_line_ends_before_an_error(fakes):
    (fakes.folder / "executor.fail").touch()
    terminal = Terminal(*script(fakes), size=(200, 50))
    try:
        shown = terminal.rest()
    finally:
        terminal.close()
    assert re.search(rf"{STARTING}, \d+ s.*\nTraceback", shown)
    assert "LocalServiceError: the executor did not start: exit code 3: executor: no such model" in shown
