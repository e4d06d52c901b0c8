"""The actor without Ray: a process, its news, and its end."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cadenza_launcher.on_ray.actor import ProcessActor
from cadenza_launcher.on_ray.orders import News, Order
from tests.helpers.service_scripts import Fakes, alive, until

pytestmark = pytest.mark.slow


@pytest.fixture
def fakes(tmp_path: Path) -> Fakes:
    return Fakes(tmp_path)


@pytest.fixture
def actor() -> Iterator[ProcessActor]:
    made = ProcessActor()
    yield made
    made.stop(made._life, 0)


def order(fakes: Fakes, **fields: object) -> str:
    arguments = ["--tls-key={files}/key", "--listen", "127.0.0.1:0"]
    return Order("executor 3", fakes.programs.executor, arguments, **fields).to_json()


def until_news(actor: ProcessActor, life: int, wanted: str) -> tuple[list[str], News]:
    """The log, and the first news with this field."""
    lines: list[str] = []
    seen, knows = 0, 0
    while True:
        news = News.from_json(actor.news(life, seen, knows))
        seen, knows = news.seen, int(bool(news.address))
        lines += news.lines
        if getattr(news, wanted):
            return lines, news


@pytest.mark.interpreter
def test_a_process_says_where_it_is_and_how_it_ends(fakes: Fakes, actor: ProcessActor) -> None:
    actor.start(1, order(fakes, files={"key": "a secret"}, environment={"CADENZA_TOKEN_OF_RANKS": "x"}))
    actor.start(1, order(fakes))  # a call that Ray has made again
    _, news = until_news(actor, 1, "address")
    (start,) = fakes.starts("executor")
    (key,) = (each.removeprefix("--tls-key=") for each in start["arguments"] if each.startswith("--tls-key"))
    assert Path(key).read_text() == "a secret"
    assert Path(key).stat().st_mode & 0o077 == 0
    assert b"CADENZA_TOKEN_OF_RANKS=x" in Path(f"/proc/{start['pid']}/environ").read_bytes()
    assert news.address.startswith("127.0.0.1:")
    os.kill(start["pid"], signal.SIGKILL)
    lines, news = until_news(actor, 1, "code")
    assert (news.code, news.reason) == (-9, "killed by signal 9")
    assert {"loading", "chatter on stdout"} <= set(lines)
    actor.start(2, order(fakes))
    assert not Path(key).exists()
    assert until_news(actor, 2, "address")[1].address
    assert News.from_json(actor.news(1, 0, 0)).reason == "Ray has started its actor again"
    pid = fakes.starts("executor")[1]["pid"]
    actor.stop(1, 0)
    assert alive(pid), "another life is stopped"
    actor.stop(2, 5000)
    assert not alive(pid)


def test_a_process_that_does_not_start_says_why(fakes: Fakes, actor: ProcessActor) -> None:
    (fakes.folder / "executor.fail").touch()
    actor.start(1, order(fakes))
    lines, news = until_news(actor, 1, "code")
    assert (news.code, news.reason) == (3, "exit code 3: executor: no such model")
    assert lines == ["loading", "executor: no such model"]


_PARENT = """
import os, subprocess, sys, time
sys.path[:0] = {path!r}
child = subprocess.Popen([sys.executable, "-c", {program!r}])
print(child.pid, flush=True)
time.sleep(600)
"""
_ACTOR = """
import sys, time
sys.path[:0] = {path!r}
from cadenza_launcher.on_ray.actor import ProcessActor
actor = ProcessActor()
actor.start(1, {order!r})
time.sleep(600)
"""


def test_it_ends_with_the_raylet_that_has_started_it(fakes: Fakes, tmp_path: Path) -> None:
    """The raylet is another process here, the parent of the actor's."""
    import subprocess

    program = _ACTOR.format(path=sys.path, order=order(fakes))
    parent = _PARENT.format(path=[], program=program)
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as raylet:
        assert raylet.stdout is not None
        assert raylet.stderr is not None
        pid = int(raylet.stdout.readline())
        until(lambda: fakes.starts("executor"))
        executor = fakes.starts("executor")[0]["pid"]
        raylet.kill()
        until(lambda: not _runs(pid) and not _runs(executor))
        assert b"the raylet of this machine has ended" in raylet.stderr.read()


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_orders_and_news_are_text() -> None:
    made = Order("e", ["-m", "x"], ["--a"], {"A": "1"}, {"f": "t"})
    assert Order.from_json(made.to_json()) == made
    news = News(["a"], 1, "h:1", 0, "r")
    assert News.from_json(json.dumps(json.loads(news.to_json()))) == news
