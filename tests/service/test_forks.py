"""Programs that fork after they have used a client: the child gets an error, the parent goes on, nothing hangs."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from cadenza.calls.loop_thread import LoopThread
from tests.helpers.client.scripted_server import Script, start

TIMEOUT_S = 60


@pytest.fixture
def target():
    loop = LoopThread.shared()
    server, address = loop.run(start(Script()))
    yield address
    loop.run(server.stop(0))


def run_program(program: str, *arguments: str) -> str:
    """Its stdout; it must end well and in time."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_child_that_uses_a_client_gets_an_error(target):
    out = run_program(
        """
        import os, sys
        from cadenza import Client

        def words(client):
            try:
                return client.generate("a")[0].outputs[0].text
            except RuntimeError as error:
                return str(error)

        client = Client(sys.argv[1])
        stream = client.stream("a b c d")
        next(stream)  # says what the request is, and has no text yet
        if (child := os.fork()) == 0:
            for one in (client, Client(sys.argv[1])):
                assert f"forked from process {os.getppid()}" in words(one), words(one)
            del stream, one
            client.close()
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        print(words(client), *(delta.outputs[0].text for delta in stream if delta.outputs))
        """,
        target,
    )
    assert out.split() == ["a", "a", "b", "c", "d"]


def test_a_fork_before_the_first_call_is_no_matter(target):
    out = run_program(
        """
        import os, sys
        from cadenza import Client
        if (child := os.fork()) == 0:
            sys.exit(0 if Client(sys.argv[1]).generate("a")[0].finished else 1)
        client = Client(sys.argv[1])
        assert os.waitpid(child, 0)[1] == 0
        print(client.generate("b")[0].outputs[0].text)
        """,
        target,
    )
    assert out == "b \n"


def test_a_child_that_ends_leaves_the_services_alone(tmp_path):
    (tmp_path / "service.py").write_text(
        textwrap.dedent(
            """
            import socket, sys, time
            listener = socket.create_server(("127.0.0.1", 0))
            print(f"ready 127.0.0.1:{listener.getsockname()[1]}", flush=True)
            time.sleep(600)
            """
        )
    )
    run_program(
        """
        import os, sys
        from cadenza_launcher.local import LocalServices
        from cadenza_launcher.services.family import Programs
        services = LocalServices("model", programs=Programs(sys.argv[1:], sys.argv[1:]))
        pids = services.pids()
        if (child := os.fork()) == 0:
            services.close()
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        for pid in pids.values():
            os.kill(pid, 0)
        assert services.pids() == pids and services.failure is None
        services.close()
        """,
        str(tmp_path / "service.py"),
    )
