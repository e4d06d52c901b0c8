"""Connections that the other side resets before TLS begins: no socket stays open."""

from __future__ import annotations

import gc
import socket
import struct
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from cadenza_common.wire import tls_reason
from cadenza_common.wire.tls.files import PemFile
from executor_svc.ranks.hosts.credentials import RankTls
from scheduler_svc.executors.kubernetes import KubernetesApi
from tests.helpers.certificates import certificates


def _reset() -> socket.socket:
    """A socket whose other side has reset it."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        end = socket.create_connection(listening.getsockname())
        other, _ = listening.accept()
    other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    other.close()
    return end


def _ranks(folder: Path) -> RankTls:
    own = certificates(folder).folder / "scheduler"
    files = (("--tls-cert", "scheduler.pem"), ("--tls-key", "scheduler-key.pem"), ("--tls-client-ca", "ca.pem"))
    return RankTls(*(PemFile(option, str(own / name)) for option, name in files), name="localhost")


def _rank_connects(folder: Path) -> None:
    _ranks(folder).connect(_reset())


def _rank_accepts(folder: Path) -> None:
    _ranks(folder).accept(_reset())


def _asks_kubernetes(folder: Path) -> None:
    own = certificates(folder).folder / "scheduler"
    (folder / "ca.crt").write_bytes((own / "ca.pem").read_bytes())
    connection = KubernetesApi("localhost", 1, folder)._connection(1.0)
    connection._create_connection = lambda *_: _reset()  # type: ignore[attr-defined]
    connection.connect()


def _probes(_: Path) -> None:
    tls_reason._speaks_tls(_reset())


@pytest.mark.parametrize("connect", [_rank_connects, _rank_accepts, _asks_kubernetes, _probes])
def test_a_socket_that_was_reset_does_not_stay_open(connect: Callable[[Path], None], tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with pytest.raises(ConnectionResetError):
            connect(tmp_path)
        gc.collect()
    assert [str(warning.message) for warning in found if issubclass(warning.category, ResourceWarning)] == []
