"""`python -m cadenza.healthcheck`: exit codes and reasons, against grpc.health.v1 as its own package serves it."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from cadenza.healthcheck import check, main
from tests.helpers.machine.loopback import new_address

STATES = health_pb2.HealthCheckResponse


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    """A server that is serving, with one service that is not and one whose state is unknown."""
    server = grpc.server(ThreadPoolExecutor(2))
    states = health.HealthServicer()
    states.set("", STATES.SERVING)
    states.set("down", STATES.NOT_SERVING)
    states.set("odd", STATES.UNKNOWN)
    health_pb2_grpc.add_HealthServicer_to_server(states, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.mark.parametrize(
    ("service", "reason"), [("", None), ("down", "NOT_SERVING"), ("odd", "UNKNOWN"), ("none", "NOT_FOUND: ")]
)
def test_it_prints_what_the_service_answers(target: str, service: str, reason: str | None) -> None:
    answer = check(target, service)
    assert answer == reason if reason is None else (answer or "").startswith(reason)


def test_a_proxy_in_the_environment_has_no_part(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    assert check(target) is None


def test_no_server_is_a_reason() -> None:
    assert (check(f"{new_address()}:50051") or "").startswith("UNAVAILABLE: ")


def test_a_server_that_says_nothing_is_a_reason_in_time() -> None:
    """It takes the connection and no more, as a process does that hangs."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        answers: list[str | None] = []
        asking = threading.Thread(target=lambda: answers.append(check(address, timeout_s=0.3)), daemon=True)
        asking.start()
        asking.join(20)
    assert (answers[0] or "").startswith("DEADLINE_EXCEEDED: ")


def test_exit_codes(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([target]) == 0
    assert main([target, "--service", "down"]) == 1
    said = capsys.readouterr()
    assert (said.out, said.err) == (f"{target}: SERVING\n", f"{target}: NOT_SERVING\n")


@pytest.mark.parametrize("arguments", [["127.0.0.1:port"], ["127.0.0.1:1", "--timeout-s", "0"], []])
def test_wrong_usage_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_it_needs_the_light_client_only() -> None:
    """A scheduler's or a client's image has no torch, and a client's no grpcio-health-checking either."""
    code = (
        "import sys, cadenza.healthcheck\n"
        "heavy = ('grpc_health.v1', 'torch', 'transformers', 'numpy', 'typer', 'pydantic', 'cadenza.client')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert loaded.strip() == "[]"
