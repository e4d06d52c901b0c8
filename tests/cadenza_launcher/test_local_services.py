"""LocalServices with small scripts in place of the two services."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from cadenza.errors import LocalServiceError, OptionError, UnavailableError
from cadenza_launcher.local import log_line
from cadenza_launcher.services.ports import reserve_port
from cadenza_launcher.services.supervised_service import RestartPolicy
from tests.helpers.service_scripts import SERVICE, Fakes, alive, children, until

pytestmark = pytest.mark.slow


@pytest.fixture
def fakes(tmp_path) -> Fakes:
    return Fakes(tmp_path)


def test_both_start_with_their_arguments_and_stop(fakes):
    with fakes.start(block_size=8, max_num_seqs=2) as services:
        (executor,), (scheduler,) = fakes.starts("executor"), fakes.starts("scheduler")
        assert executor["arguments"][-2:] == ["--listen", services.addresses["executor"]]
        assert {"--model=model", "--block-size=8", "--max-num-seqs=2"} <= set(executor["arguments"])
        assert "--max-num-seqs=2" in scheduler["arguments"]
        target = scheduler["arguments"][scheduler["arguments"].index("--executor") + 1]
        assert target == services.addresses["executor"]
        for address in (services.target, target):
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port))).close()
        pids = services.pids()
        assert pids == {"executor": executor["pid"], "scheduler": scheduler["pid"]}
        # Each stream of each service has a reader of its own.
        until(lambda: {("executor", "chatter on stdout"), ("scheduler", "loading")} <= set(fakes.lines))
    assert not any(alive(pid) for pid in pids.values())  # gone and collected: a zombie would still be there
    assert fakes.events == []
    services.close()


def test_both_start_at_once(fakes):
    """Here the executor is ready only when the scheduler has begun."""
    script = fakes.folder / "executor.py"
    wait = "while not (folder / 'scheduler.log').exists():\n    time.sleep(0.01)\n"
    script.write_text(SERVICE.replace("host, _, port", f"{wait}host, _, port"))
    with fakes.start() as services:
        assert set(services.pids()) == {"executor", "scheduler"}


def test_several_executors_of_one_scheduler(fakes):
    """Each has a port and a name of its own, and the scheduler knows them all, also when it is started again."""
    started: list[list[str]] = []
    with fakes.start(executors=2, num_threads=1, num_gpu_blocks=8, on_start=started.append) as services:
        assert started == [["executor 0", "executor 1"]]
        assert services.executors == started[0]
        names = [*services.executors, "scheduler"]
        assert set(services.addresses) == set(names) == set(services.pids())
        addresses = [services.addresses[name] for name in services.executors]
        listening = [start["arguments"][-1] for start in fakes.starts("executor")]
        assert sorted(listening) == sorted(addresses)
        until(lambda: {(name, "chatter on stdout") for name in names} <= set(fakes.lines))
        os.kill(services.pids()["scheduler"], signal.SIGKILL)
        until(lambda: any("the scheduler is back" in text for text in fakes.events))
        pids = services.pids()
    assert not any(alive(pid) for pid in pids.values())
    for start in fakes.starts("scheduler"):
        arguments = start["arguments"]
        assert [arguments[place + 1] for place, each in enumerate(arguments) if each == "--executor"] == addresses


@pytest.mark.parametrize(
    ("service", "logger"), [("executor", "cadenza.executor"), ("executor 1", "cadenza.executor.1")]
)
def test_a_service_logs_to_a_logger_of_its_name(caplog, service, logger):
    """Those of several executors are below the logger of one: a handler there gets all."""
    caplog.set_level("INFO", "cadenza.executor")
    log_line(service, "loading")
    assert caplog.record_tuples == [(logger, 20, "loading")]


def test_each_of_several_executors_has_a_restart_state_of_its_own(fakes):
    """One is given up: the other serves on. When the last one is given up, all are stopped."""
    services = fakes.start(executors=2, restarts=RestartPolicy(first_delay_s=0.02, max_deaths=3))
    pids = services.pids()
    (fakes.folder / "executor.fail").touch()
    os.kill(pids["executor 1"], signal.SIGKILL)
    until(lambda: any("is given up" in text for text in fakes.events))
    assert fakes.events[0] == "executor 1 died (killed by signal 9); starting it again in 0.02 s"
    assert fakes.events[-1] == (
        "executor 1 did not start (exit code 3: executor: no such model); "
        "it has died 3 times without progress and is given up; 1 of 2 executors are left"
    )
    assert services.failure is None
    assert set(services.pids()) == {"executor 0", "scheduler"}
    assert alive(pids["executor 0"])
    os.kill(pids["executor 0"], signal.SIGKILL)
    assert services.wait_failure(30)
    assert str(services.failure) == (
        "executor 0 did not start (exit code 3: executor: no such model); "
        "it has died 3 times without progress and is given up"
    )
    until(lambda: not alive(pids["scheduler"]))
    services.close()


def test_one_of_several_executors_comes_back_at_its_port(fakes):
    back: list[str] = []
    with fakes.start(executors=3, on_back=back.append) as services:
        before, pids = services.addresses, services.pids()
        os.kill(pids["executor 2"], signal.SIGKILL)
        until(lambda: back == ["executor 2"])
        assert services.addresses == before
        assert {name for name, pid in services.pids().items() if pid != pids[name]} == {"executor 2"}
        assert fakes.events[-1] == f"executor 2 is back at {before['executor 2']}"


@pytest.mark.parametrize(("name", "other"), [("executor", "scheduler"), ("scheduler", "executor")])
def test_a_service_that_does_not_start(fakes, name, other):
    """It is reported at once, although the other service would take long."""
    (fakes.folder / f"{name}.fail").touch()
    (fakes.folder / f"{other}.py").write_text(SERVICE.replace("host, _, port", "time.sleep(600)\nhost, _, port"))
    with pytest.raises(LocalServiceError, match=rf"^the {name} did not start: exit code 3: {name}: no such model$"):
        fakes.start()
    assert not any(alive(start["pid"]) for start in fakes.starts(other))


def test_a_reserved_port_is_the_executors_alone():
    with contextlib.ExitStack() as kept:
        host, _, port = reserve_port("127.0.0.1", kept).rpartition(":")
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((host, int(port)))
        for _ in range(2):  # the executor, and the one after it
            with socket.create_server((host, int(port))) as listener:
                socket.create_connection(listener.getsockname()).close()
    with socket.socket() as other:
        other.bind((host, int(port)))


def test_nothing_starts_with_a_bad_option(fakes):
    with pytest.raises(OptionError, match="block_size"):
        fakes.start(block_size=3)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OptionError, match="port: cannot listen"):
        fakes.start(port=taken.getsockname()[1])
    for port in (-1, 70000, "http"):
        with pytest.raises(OptionError, match=f"^option port: must be an integer from 0 to 65535, not {port!r}$"):
            fakes.start(port=port)
    assert fakes.starts("executor") == []


def test_the_port_that_was_chosen_for_the_scheduler_stays_its_own_while_it_is_dead(fakes):
    with fakes.start(restarts=RestartPolicy(first_delay_s=60)) as services:
        host, _, port = services.target.rpartition(":")
        os.kill(services.pids()["scheduler"], signal.SIGKILL)
        until(lambda: fakes.events)
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((host, int(port)))


@pytest.mark.parametrize("name", ["executor", "scheduler"])
def test_a_dead_service_comes_back_at_its_port(fakes, name):
    back: list[str] = []
    with fakes.start(on_back=back.append) as services:
        target, pid = services.target, services.pids()[name]
        os.kill(pid, signal.SIGKILL)
        until(lambda: any("is back" in text for text in fakes.events))
        assert services.pids()[name] != pid
        assert services.target == target
        _, second = fakes.starts(name)
        assert second["arguments"][second["arguments"].index("--listen") + 1] in fakes.events[-1]
        assert f"the {name} died (killed by signal 9)" in fakes.events[0]
        until(lambda: back == [name])
        assert services.failure is None


def test_a_service_that_keeps_dying_is_given_up(fakes):
    services = fakes.start(restarts=RestartPolicy(first_delay_s=0.02, max_deaths=4))
    pids = services.pids()
    (fakes.folder / "executor.fail").touch()
    os.kill(pids["executor"], signal.SIGKILL)
    assert services.wait_failure(30)
    with pytest.raises(LocalServiceError) as caught, services.naming_failure():
        raise UnavailableError("the connection is lost")
    assert str(caught.value) == (
        "the executor did not start (exit code 3: executor: no such model); "
        "it has died 4 times without progress and is given up"
    )
    assert fakes.events[-1] == str(services.failure) == str(caught.value)
    until(lambda: not alive(pids["scheduler"]))
    services.close()


def test_an_error_of_services_that_live_is_left_as_it_is(fakes):
    with (
        fakes.start() as services,
        pytest.raises(UnavailableError, match=r"^draining$"),
        services.naming_failure(),
    ):
        raise UnavailableError("draining")


def test_a_gateway_is_a_third_service_without_which_the_others_go_on(fakes):
    services = fakes.start(http="0", restarts=RestartPolicy(first_delay_s=0.02, max_deaths=2))
    with services:
        assert set(services.pids()) == {"executor", "scheduler", "gateway"}
        (first,) = fakes.starts("gateway")
        assert first["arguments"] == [f"--target={services.target}", f"--http={services.http}"]
        os.kill(first["pid"], signal.SIGKILL)
        until(lambda: len(fakes.starts("gateway")) == 2)
        until(lambda: any("is back" in event for event in fakes.events))
        (fakes.folder / "gateway.fail").touch()
        os.kill(fakes.starts("gateway")[-1]["pid"], signal.SIGKILL)
        until(lambda: any("there is no gateway any more" in event for event in fakes.events))
        assert services.failure is None
        assert set(services.pids()) == {"executor", "scheduler"}
    assert not any(alive(start["pid"]) for name in ("executor", "scheduler", "gateway") for start in fakes.starts(name))


@pytest.mark.parametrize("http", ["99999", "a b", "0.0.0.0:8000", "x/y"])
def test_where_a_gateway_cannot_listen(fakes, http):
    with pytest.raises(OptionError, match="option http"):
        fakes.start(http=http)


def test_without_a_limit_it_is_never_given_up(fakes):
    """The other service is started again meanwhile, and both events are reported with what happened before."""
    policy = RestartPolicy(first_delay_s=0.01, max_delay_s=0.05, max_deaths=None)
    with fakes.start(restarts=policy) as services:
        (fakes.folder / "executor.fail").touch()
        os.kill(services.pids()["executor"], signal.SIGKILL)
        until(lambda: any("it has died 7 times" in text for text in fakes.events))
        os.kill(services.pids()["scheduler"], signal.SIGKILL)
        until(lambda: any("the scheduler is back" in text for text in fakes.events))
        assert not any("the executor is back" in text for text in fakes.events)
        (fakes.folder / "executor.fail").unlink()
        until(lambda: any("the executor is back" in text for text in fakes.events))
        assert services.failure is None
    assert (
        "the executor did not start (exit code 3: executor: no such model); it has died 7 times without progress; "
        "starting it again in 0.05 s"
    ) in fakes.events
    assert not any("\n" in text for text in fakes.events)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.parametrize("name", ["executor", "scheduler"])
def test_a_stopped_service_is_killed_and_started_again(fakes, name):
    with fakes.start(restarts=RestartPolicy(stopped_limit_s=0.5)) as services:
        pid = services.pids()[name]
        os.kill(pid, signal.SIGSTOP)
        until(lambda: any("is back" in text for text in fakes.events))
        assert services.pids()[name] != pid
        assert not alive(pid)
    assert re.fullmatch(
        rf"the {name} died \(killed because a signal had stopped it for \d+ s\); starting it again in 0.2 s",
        fakes.events[0],
    )


def test_a_callback_that_raises_ends_no_supervision(fakes):
    def fail(text: str) -> None:
        raise OSError(28, "No space left on device")

    with fakes.start(on_event=fail, on_back=fail) as services:
        for count in (2, 3):
            os.kill(services.pids()["executor"], signal.SIGKILL)
            until(lambda count=count: len(fakes.starts("executor")) == count)
            pid = fakes.starts("executor")[-1]["pid"]
            until(lambda pid=pid: services.pids()["executor"] == pid)


def test_a_deaf_service_is_killed(fakes):
    (fakes.folder / "executor.deaf").touch()
    services = fakes.start(stop_grace_s=0.3)
    pids = services.pids()
    services.close()
    assert not any(alive(pid) for pid in pids.values())


PARENT = """
import sys, time
from cadenza_launcher.local import LocalServices
from cadenza_launcher.services.family import Programs
services = LocalServices("model", programs=Programs((sys.argv[1] + "/executor.py",), (sys.argv[1] + "/scheduler.py",)))
print("up", flush=True)
{then}
"""


def run_parent(fakes, then: str) -> subprocess.Popen:
    code = PARENT.format(then=textwrap.dedent(then))
    return subprocess.Popen([sys.executable, "-c", code, str(fakes.folder)], stdout=subprocess.PIPE, text=True)


def test_children_end_when_the_parent_is_killed(fakes):
    with run_parent(fakes, "time.sleep(60)") as parent:
        assert parent.stdout.readline() == "up\n"
        parent.kill()
    until(lambda: not any(map(alive, children(fakes))))


def test_children_end_with_a_program_that_never_closes(fakes):
    with run_parent(fakes, "") as parent:
        assert parent.wait(timeout=20) == 0
    assert not any(map(alive, children(fakes)))


def test_a_service_that_is_never_ready(fakes):
    (fakes.folder / "scheduler.py").write_text("import time; time.sleep(60)")
    failure: list[BaseException] = []

    def start():
        try:
            fakes.start(start_timeout_s=0.5)
        except LocalServiceError as error:
            failure.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join(20)
    assert "was not ready after 0.5 s" in str(failure[0])
    assert not any(alive(start["pid"]) for start in fakes.starts("executor"))
