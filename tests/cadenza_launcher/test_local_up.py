"""`cadenza up` with small scripts in place of the two services."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cadenza_launcher.services.supervised_service import process_state
from tests.helpers.service_scripts import SERVICE, Fakes, alive, children, until

pytestmark = pytest.mark.slow


@pytest.fixture
def fakes(tmp_path) -> Fakes:
    return Fakes(tmp_path)


UP = """
import sys
from cadenza_cli import up
from cadenza_cli.app import run
up._print_settings = lambda services, places: None  # the scripts speak no gRPC
from cadenza_launcher.services.supervised_service import RestartPolicy
RestartPolicy.__init__.__defaults__ = (0.02, *RestartPolicy.__init__.__defaults__[1:])  # first_delay_s
sys.exit(run(sys.argv[1:]))
"""


def run_up(fakes, *arguments: str, **options) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", fakes.prelude + UP, "up", "--model", "model", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        **{"stderr": subprocess.PIPE, **options},
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_says_ready_and_stops_at_a_signal(fakes, number):
    adapters = ["--lora", "a=/x", "--lora-root", "/r", "--lora", "b=/y,c=/z", "--lora-dir", "/d"]
    with run_up(fakes, "--port", "0", "--max-num-seqs", "3", "--no-enable-prefix-caching", *adapters) as up:
        ready = up.stdout.readline()
        assert ready.startswith("ready 127.0.0.1:")
        pids = children(fakes)
        up.send_signal(number)
        out, err = up.communicate(timeout=20)
        assert up.returncode == 0
    assert out == ""
    assert "executor  │ loading" in err
    assert "scheduler │ loading" in err
    assert not any(map(alive, pids))
    arguments = fakes.starts("scheduler")[0]["arguments"]
    assert {"--max-num-seqs=3", "--no-enable-prefix-caching", "--lora-root=/r", "--lora-dir=/d"} <= set(arguments)
    assert [each for each in arguments if each.startswith("--lora=")] == ["--lora=a=/x", "--lora=b=/y", "--lora=c=/z"]


def test_up_names_each_executor_in_its_log(fakes):
    with run_up(fakes, "--port", "0", "--executors", "2") as up:
        up.stdout.readline()
        (scheduler,) = fakes.starts("scheduler")
        assert scheduler["arguments"].count("--executor") == 2
        up.send_signal(signal.SIGTERM)
        _, err = up.communicate(timeout=20)
        assert up.returncode == 0
    for name in ("executor 0", "executor 1", "scheduler "):
        assert f"{name} │ loading\n" in err


@pytest.mark.parametrize(
    ("sent", "received"),
    [
        ([signal.SIGINT], ["scheduler SIGINT", "executor SIGINT"]),
        ([signal.SIGTERM], ["scheduler SIGTERM", "executor SIGINT"]),
        ([signal.SIGTERM, signal.SIGTERM], ["scheduler SIGTERM", "scheduler SIGINT", "executor SIGINT"]),
    ],
)
def test_up_lets_the_scheduler_finish_at_sigterm_and_stops_it_at_once_at_ctrl_c(fakes, sent, received):
    """The scheduler first, so that the executor computes its requests."""
    log = fakes.folder / "signals"
    last = signal.SIGTERM if len(sent) == 1 else signal.SIGINT
    for name in ("executor", "scheduler"):
        handler = (
            "def take(number, frame):\n"
            f"    with open({str(log)!r}, 'a') as log:\n"
            "        print(name, signal.Signals(number).name, file=log)\n"
            f"    if number in ({int(last)}, signal.SIGINT):\n"
            "        os._exit(0)\n"
            "for number in (signal.SIGINT, signal.SIGTERM):\n    signal.signal(number, take)\n"
        )
        (fakes.folder / f"{name}.py").write_text(SERVICE.replace("host, _, port", f"{handler}host, _, port", 1))
    with run_up(fakes, "--port", "0") as up:
        up.stdout.readline()
        for number in sent:
            up.send_signal(number)
            until(log.exists)
        assert up.wait(timeout=20) == 0
        assert "died" not in up.stderr.read()
    assert log.read_text().splitlines() == received


def test_up_stops_while_it_starts(fakes):
    started = fakes.folder / "started"
    (fakes.folder / "executor.py").write_text(f"import time; open({str(started)!r}, 'w').close(); time.sleep(60)")
    with run_up(fakes, "--port", "0") as up:
        until(started.exists)
        up.send_signal(signal.SIGTERM)
        assert up.wait(timeout=20) == 0


def test_up_restarts_visibly_and_does_not_give_up(fakes):
    """Six failures, once more than `LLM` would accept."""
    with run_up(fakes, "--port", "0") as up:
        up.stdout.readline()
        (fakes.folder / "scheduler.fail").touch()
        os.kill(fakes.starts("scheduler")[0]["pid"], signal.SIGKILL)
        until(lambda: len(fakes.starts("scheduler")) == 6)
        (fakes.folder / "scheduler.fail").unlink()
        lines = [up.stderr.readline()]
        while "the scheduler is back" not in lines[-1]:
            lines.append(up.stderr.readline())
        up.send_signal(signal.SIGTERM)
        _, err = up.communicate(timeout=20)
        assert up.returncode == 0
    reported = [line for line in lines if line.startswith("cadenza ")]
    assert reported[0] == "cadenza   │ the scheduler died (killed by signal 9); starting it again in 0.02 s\n"
    assert reported[5] == (
        "cadenza   │ the scheduler did not start (exit code 3: scheduler: no such model); "
        "it has died 6 times without progress; starting it again in 0.64 s\n"
    )
    assert len(reported) == 7
    assert "Traceback" not in "".join(lines) + err


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_ctrl_z_stops_up_alone(fakes):
    """The terminal stops the whole process group. The services, in sessions of their own, run on."""
    with run_up(fakes, "--port", "0", process_group=0) as up:
        up.stdout.readline()
        os.killpg(up.pid, signal.SIGSTOP)
        until(lambda: process_state(up.pid) == "T")
        states = [process_state(pid) for pid in children(fakes)]
        os.killpg(up.pid, signal.SIGCONT)
        up.send_signal(signal.SIGTERM)
        _, err = up.communicate(timeout=20)
        assert up.returncode == 0
    assert not {"T", ""} & set(states)
    assert "died" not in err


@pytest.fixture(params=["full disk", "closed pipe"])
def unwritable(request) -> Iterator[int]:
    """A file descriptor to which nothing can be written."""
    if request.param == "full disk":
        descriptor = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, descriptor = os.pipe()
        os.close(reader)
    yield descriptor
    os.close(descriptor)


@pytest.mark.sampled(1)
def test_up_serves_on_when_its_log_cannot_be_written(fakes, unwritable):
    """The executor logs more than a pipe holds: it would be stuck if its log were read no more."""
    lines = 'for _ in range(3000):\n    print("a long line of the log " * 3, file=sys.stderr)\n'
    (fakes.folder / "executor.py").write_text(SERVICE.replace("host, _, port", f"{lines}host, _, port", 1))
    with run_up(fakes, "--port", "0", stderr=unwritable) as up:
        assert up.stdout.readline().startswith("ready ")
        os.kill(fakes.starts("executor")[0]["pid"], signal.SIGKILL)
        until(lambda: len(fakes.starts("executor")) == 2)
        up.send_signal(signal.SIGTERM)
        assert up.wait(timeout=20) == 0


@pytest.mark.parametrize("name", ["executor", "scheduler"])
def test_up_ends_when_the_first_start_fails(fakes, name):
    """With the service's own error, once."""
    script = fakes.folder / f"{name}.py"
    script.write_text("import sys; print('error: no such model', file=sys.stderr); sys.exit(1)")
    with run_up(fakes, "--port", "0") as up:
        out, err = up.communicate(timeout=20)
    assert (up.returncode, out) == (1, "")
    assert [line for line in err.splitlines() if "model" in line] == [
        f"cadenza: the {name} did not start: exit code 1: no such model"
    ]
    assert "starting it again" not in err


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--block-size", "7"], "cadenza: option block_size: must be 8, 16, 32 or 64"),
        (["--dtype", "int3"], "cadenza: option dtype: input should be"),
        (["--model", "/no/such"], "cadenza: option model: there is no folder '/no/such'"),
        (["--blok-size", "8"], "cadenza: there is no option --blok-size; did you mean --block-size"),
    ],
)
def test_up_reports_errors_in_one_line(fakes, arguments, message):
    with run_up(fakes, *arguments) as up:
        out, err = up.communicate(timeout=20)
    assert (up.returncode != 0, out) == (True, "")
    assert err.startswith(message)
    assert len(err.splitlines()) == 1
    assert fakes.starts("executor") == []
