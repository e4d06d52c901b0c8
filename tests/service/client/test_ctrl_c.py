"""Ctrl-C in a user's script: real processes in a terminal, whose foreground group gets SIGINT."""

from __future__ import annotations

import signal
import sys

import pytest

from cadenza.calls.loop_thread import LoopThread
from tests.helpers.client.scripted_server import Script, start
from tests.helpers.machine.terminal import CTRL_C, Terminal
from tests.helpers.marks import short_and_long
from tests.helpers.paths import ROOT
from tests.helpers.service_scripts import SERVICE, Fakes, alive, until

pytestmark = pytest.mark.slow

SCRIPT = """
from cadenza import LLM, Client, SamplingParams

def main():
    {call}

{before}
main()
"""


def interrupt(folder, call: str, wait, *, before: str = "", prelude: str = "") -> None:
    """Run a script in a terminal, press Ctrl-C after `wait(terminal)`, and check its end and Python's report.

    It ends by SIGINT, as Python does, and the report has its two frames and nothing besides.
    """
    script = folder / "mine.py"
    script.write_text(prelude + SCRIPT.format(call=call, before=before))
    terminal = Terminal(sys.executable, str(script), size=(200, 50))
    try:
        wait(terminal)
        terminal.type(CTRL_C)
        shown = terminal.rest()
    finally:
        terminal.close()
    assert terminal.process.returncode == -signal.SIGINT, shown
    _, _, report = shown.partition("Traceback (most recent call last):\n")
    lines = [line.strip() for line in report.splitlines() if line.strip(" ^~")]
    code = script.read_text().splitlines()
    assert lines == [
        f'File "{script}", line {len(code)}, in <module>',
        "main()",
        f'File "{script}", line {code.index("def main():") + 2}, in main',
        call,
        "KeyboardInterrupt",
    ], shown


@pytest.fixture
def fakes(tmp_path) -> Fakes:
    return Fakes(tmp_path)


def any_alive(fakes: Fakes) -> bool:
    return any(alive(each["pid"]) for name in ("executor", "scheduler") for each in fakes.starts(name))


def test_while_the_services_load(fakes):
    """The executor never gets ready, and heeds no signal while it loads."""
    (fakes.folder / "executor.deaf").touch()
    loads = "print('2026 INFO x: reading', file=sys.stderr, flush=True)\ntime.sleep(600)\n"
    (fakes.folder / "executor.py").write_text(SERVICE.replace("host, _, port", f"{loads}host, _, port", 1))
    interrupt(fakes.folder, "LLM('some/model')", lambda terminal: terminal.wait_for("reading"), prelude=fakes.prelude)
    until(lambda: not any_alive(fakes))


def test_twice_while_the_services_stop(fakes):
    """The first interrupts the program, the second its exit, which waits for a service that does not heed SIGINT."""
    stopping, scheduler = fakes.folder / "stopping", fakes.folder / "scheduler.py"
    deaf = f"signal.signal(signal.SIGINT, lambda *_: pathlib.Path({str(stopping)!r}).touch())\n"
    scheduler.write_text(SERVICE.replace("host, _, port", f"{deaf}host, _, port", 1))
    script = fakes.folder / "mine.py"
    script.write_text(
        f"{fakes.prelude}\nimport time\nfrom cadenza import LLM\n"
        "llm = LLM('some/model')\nprint('running', flush=True)\nwhile True: time.sleep(0.01)\n"
    )
    terminal = Terminal(sys.executable, str(script), size=(200, 50))
    try:
        terminal.wait_for("running", timeout_s=60)
        terminal.type(CTRL_C)
        terminal.wait_for("KeyboardInterrupt")
        until(stopping.exists)
        terminal.type(CTRL_C)
        assert terminal.rest().strip() == ""
    finally:
        terminal.close()
    assert terminal.process.returncode == -signal.SIGINT
    until(lambda: not any_alive(fakes))


LLM_CALLS = (
    "llm.generate(['Hello'] * 3, SamplingParams(max_tokens=2000, ignore_eos=True))",
    "llm.chat([{'role': 'user', 'content': 'Hello'}], SamplingParams(max_tokens=2000, ignore_eos=True))",
)


@pytest.mark.long
@pytest.mark.parametrize("call", short_and_long(LLM_CALLS, LLM_CALLS[:1]))
def test_while_llm_works(tmp_path, call):
    before = f"llm = LLM({str(ROOT / 'models' / 'cadenza-demo')!r}, num_threads=1, use_tqdm_on_load=False)"
    interrupt(tmp_path, call, lambda terminal: terminal.wait_for("Processed prompts", 60), before=before)


@pytest.mark.parametrize(
    "call",
    [
        "client.generate(['hang', 'a'])",
        "client.chat([{'role': 'user', 'content': 'hang'}])",
        "for delta in client.stream('hang on'): pass",
        "list(client.stream('hang on'))",
    ],
)
def test_while_a_client_waits(tmp_path, call):
    script, loop = Script(), LoopThread.shared()
    server, address = loop.run(start(script))
    try:
        before = f"client = Client({address!r})"
        interrupt(tmp_path, call, lambda terminal: script.hanging.wait(30), before=before)
    finally:
        loop.run(server.stop(0))


@pytest.mark.parametrize(("prompts", "shown"), [(["hang on"], "hang "), (["hang on", "hang"], "on\r\nhang ")])
def test_generate_ends_the_line_of_an_answer(prompts, shown):
    """What the shell writes next begins on a line of its own."""
    script, loop = Script(), LoopThread.shared()
    server, address = loop.run(start(script))
    terminal = Terminal(sys.executable, "-m", "cadenza", "generate", "--raw", "--target", address, *prompts)
    try:
        terminal.wait_for(shown, 30)
        terminal.type(CTRL_C)
        assert terminal.rest() == "\n"
        assert terminal.process.returncode == 130
    finally:
        terminal.close()
        loop.run(server.stop(0))
