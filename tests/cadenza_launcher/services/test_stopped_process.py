"""How long a process has been stopped by a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cadenza_launcher.services.supervised_service import StoppedTimer, process_state
from tests.helpers.service_scripts import until


class States:
    """A process whose state the test sets."""

    def __init__(self) -> None:
        self.state = "S"
        self.timer = StoppedTimer(1, lambda pid: self.state)

    def look(self, *moments: float) -> list[float]:
        return [round(self.timer.seconds(moment), 3) for moment in moments]


@pytest.fixture
def process() -> States:
    return States()


def test_it_adds_up_while_the_process_is_stopped(process):
    assert process.look(1.0, 1.1) == [0, 0]
    process.state = "T"
    assert process.look(1.2, 1.3, 1.7) == [0, 0.1, 0.5]
    process.state = "S"
    assert process.look(1.8) == [0]
    process.state = "T"
    assert process.look(1.9, 2.0) == [0, 0.1]


@pytest.mark.parametrize("state", ["R", "S", "D", "Z", "t", ""])
def test_other_states_count_for_nothing(process, state):
    process.state = state
    assert process.look(1.0, 1.5, 2.0) == [0, 0, 0]


def test_a_pause_of_the_observer_is_not_the_processs(process):
    """Both were stopped for an hour, and the observer looks first: it counts half a second, not the hour."""
    process.state = "T"
    assert process.look(1.0, 1.1, 3601.1) == [0, 0.1, 0.6]
    process.state = "S"
    assert process.look(3601.2) == [0]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_the_state_of_a_real_process(tmp_path):
    program = tmp_path / "a) T (b"  # the name is part of the line that is read
    program.symlink_to(sys.executable)
    with subprocess.Popen([str(program), "-c", "import time; time.sleep(60)"]) as process:
        until(lambda: process_state(process.pid) == "S")
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: process_state(process.pid) == "T")
        os.kill(process.pid, signal.SIGCONT)
        until(lambda: process_state(process.pid) == "S")
        process.kill()
    assert process_state(process.pid) == ""
