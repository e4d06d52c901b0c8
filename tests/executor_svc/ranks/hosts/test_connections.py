"""Connections between ranks: who is let in, who is dropped, and that strangers hold up nobody."""

from __future__ import annotations

import logging
import queue
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from executor_svc.config import ExecutorConfig
from executor_svc.errors import StartError
from executor_svc.ranks.hosts import listener as listener_module
from executor_svc.ranks.hosts.connecting import Connector
from executor_svc.ranks.hosts.credentials import CredentialsError, RankCredentials, read_credentials
from executor_svc.ranks.hosts.handshake import ConnectionPurpose, settle
from executor_svc.ranks.hosts.listener import Listener
from executor_svc.ranks.hosts.places import PlaceError, RankPlace
from executor_svc.ranks.links import Frame, Link, LinkClosed, watch
from tests.helpers.certificates import Certificates, certificates
from tests.helpers.machine.loopback import new_address

PORT, SECRET = 50053, RankCredentials(b"sixteen bytes or more")


@contextmanager
def listening(credentials: RankCredentials = SECRET, size: int = 2) -> Iterator[tuple[Listener, RankPlace]]:
    place = RankPlace(0, size, 0, size, new_address(), PORT)
    listener = Listener(place, credentials, time.monotonic())
    try:
        yield listener, place
    finally:
        listener.close()


OPENED: list[Link] = []


def connect(
    place: RankPlace,
    credentials: RankCredentials = SECRET,
    purpose: ConnectionPurpose = ConnectionPurpose.STEPS,
    timeout_s: float = 5,
    **changes: int,
) -> Link:
    OPENED.append(Connector(replace(place, **{"rank": 1, **changes}), credentials).connect(purpose, timeout_s))
    return OPENED[-1]


def take(listener: Listener, purpose: ConnectionPurpose = ConnectionPurpose.STEPS, rank: int = 1) -> Link:
    link, peer = listener.take(rank, purpose, time.monotonic() + 5)
    assert peer.startswith("127.")
    OPENED.append(link)
    return link


def tls(certs: Certificates, party: str = "executor") -> RankCredentials:
    return read_credentials(ExecutorConfig(model="any", **certs.listener(party)))


class LoggedLines(logging.Handler):
    """Warnings as they come: a listener's thread logs after the other side knows that it was dropped."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: list[str] = []
        self._changed = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self._changed:
            self._lines.append(record.getMessage())
            self._changed.notify_all()

    def wait(self, text: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: any(text in line for line in self._lines), 20), self._lines


@pytest.fixture
def lines() -> Iterator[LoggedLines]:
    found = LoggedLines()
    logging.getLogger().addHandler(found)
    yield found
    logging.getLogger().removeHandler(found)


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while OPENED:
        OPENED.pop().close()


def is_dropped(end: socket.socket) -> bool:
    end.settimeout(5)
    try:
        while end.recv(1000):
            pass
    except ConnectionResetError:
        pass
    end.close()
    return True


def check_link(listener: Listener, theirs: Link) -> None:
    """What one side sends comes to the other, also more than a buffer holds."""
    ours, content = take(listener), bytes(range(256)) * 4000
    sending = threading.Thread(target=theirs.send, args=(Frame.PLAN, content))
    sending.start()
    assert ours.receive() == (Frame.PLAN, content)
    sending.join()
    ours.send(Frame.STATUS, b"k")
    assert theirs.receive() == (Frame.STATUS, b"k")
    ours.close()
    with pytest.raises(LinkClosed):
        theirs.receive()


def test_a_rank_with_the_secret_is_let_in() -> None:
    with listening() as (listener, place):
        check_link(listener, connect(place))


@pytest.mark.parametrize("secret", [b"", b"sixteen other bytes"])
def test_another_secret_is_refused_on_both_sides(secret: bytes, lines: LoggedLines) -> None:
    with listening() as (listener, place):
        with pytest.raises(PlaceError, match="it does not know the secret of --rank-secret-file here"):
            connect(place, RankCredentials(secret))
        check_link(listener, connect(place))
    lines.wait("as rank 1 it does not accept the secret of --rank-secret-file here")


def test_a_proof_of_one_connection_is_of_no_use_in_another(lines: LoggedLines) -> None:
    """What a stranger has read and says again."""
    with listening() as (_, place):
        read, ended = record(place)
        assert len(read) == 13 + 37 + 32
        assert ended
        with socket.create_connection((place.host, PORT)) as stranger:
            stranger.sendall(read)
            assert is_dropped(stranger)
    lines.wait("as rank 1 it does not know the secret of --rank-secret-file")


def record(place: RankPlace) -> tuple[bytes, bool]:
    """What a rank sends before its first frame, as a machine in between reads it."""
    between, found = socket.create_server(("127.0.0.1", 0)), bytearray()
    connecting = replace(place, host="127.0.0.1", port=between.getsockname()[1])

    def relay() -> None:
        theirs, _ = between.accept()
        with theirs, socket.create_connection((place.host, PORT)) as ours:
            for _ in range(2):
                part = theirs.recv(1000)
                found.extend(part)
                ours.sendall(part)
                theirs.sendall(ours.recv(1000))

    running = threading.Thread(target=relay)
    running.start()
    with between:
        connect(connecting).close()
        running.join()
    return bytes(found), not running.is_alive()


STRANGERS = {
    "garbage": b"\0\1\2\3" * 100,
    "a web browser": b"GET / HTTP/1.1\r\nHost: cadenza\r\n\r\n" * 4,
    "a frame": struct.pack("<BQ", Frame.CONFIG, 1 << 60) + b"x" * 100,
    "another version": b"cadenza rank" + b"\xff" + b"x" * 100,
    "a purpose that there is not": b"cadenza rank" + struct.pack("<BBHH32s", 1, 99, 1, 2, b"") + b"x" * 32,
}


@pytest.mark.parametrize("name", STRANGERS)
def test_strangers_are_dropped(name: str, lines: LoggedLines) -> None:
    with listening() as (listener, place):
        with socket.create_connection((place.host, PORT)) as stranger:
            stranger.sendall(STRANGERS[name])
            assert is_dropped(stranger)
        check_link(listener, connect(place))
    lines.wait("dropped a connection from 127.")


def test_silent_strangers_hold_up_nobody() -> None:
    """Hundreds of connections that say nothing: the oldest are dropped for others."""
    with listening() as (listener, place):
        silent = [socket.create_connection((place.host, PORT)) for _ in range(200)]
        check_link(listener, connect(place))
        assert is_dropped(silent[0])
        for each in silent[1:]:
            each.close()


def test_a_frame_that_is_too_long_ends_its_link() -> None:
    with listening() as (listener, place):
        theirs = connect(place)
        ours = take(listener)
        theirs.end.sendall(struct.pack("<BQ", Frame.STATUS, 1 << 40))
        with pytest.raises(LinkClosed, match="a frame of 1099511627776 bytes"):
            ours.receive()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": 3}, "there WORLD_SIZE is 3, and at rank 0 2"),
        ({"rank": 0}, "there RANK is 0, and ranks 1 to 1 are awaited"),
        ({"rank": 2}, "there RANK is 2, and ranks 1 to 1 are awaited"),
    ],
)
def test_a_wrong_place_is_refused_on_both_sides(changes: dict[str, int], message: str, lines: LoggedLines) -> None:
    with listening() as (_, place), pytest.raises(PlaceError, match=f"it refuses this rank: {message}"):
        connect(place, **changes)
    lines.wait(message)


def test_a_rank_that_is_there_twice_is_refused(lines: LoggedLines) -> None:
    again = re.escape("RANK=1 is there already, from 127.0.0.1")
    with listening() as (listener, place):
        first = connect(place)
        with pytest.raises(PlaceError, match=again):
            connect(place)
        check_link(listener, first)
        with pytest.raises(PlaceError, match=again):
            connect(place)
        connect(place, purpose=ConnectionPurpose.EXCHANGES)
        check_newest(listener, connect(place, purpose=ConnectionPurpose.EXCHANGES))
    lines.wait("refused rank 1 at 127.0.0.1: RANK=1 is there already")


def check_newest(listener: Listener, theirs: Link) -> None:
    """Connections for exchanges are made anew for each session."""
    theirs.send(Frame.PART, b"new")
    assert take(listener, ConnectionPurpose.EXCHANGES).receive() == (Frame.PART, b"new")
    with pytest.raises(TimeoutError):
        listener.take(1, ConnectionPurpose.EXCHANGES, time.monotonic())


def test_a_rank_that_comes_while_the_port_closes_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has proved who it is, and nobody would close its connection."""
    comes, closed = threading.Event(), threading.Event()

    def held(end: socket.socket) -> None:
        comes.set()
        assert closed.wait(20)
        settle(end)

    monkeypatch.setattr(listener_module, "settle", held)
    with listening() as (listener, place), ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(connect, place, timeout_s=0.5)
        assert comes.wait(20)
        listener.close()
        closed.set()
        with pytest.raises(PlaceError):
            connecting.result(20)
        assert not listener._arrived


def test_nobody_listens() -> None:
    place = RankPlace(1, 2, 0, 1, new_address(), PORT)
    with pytest.raises(PlaceError, match=r"no connection to rank 0 at 127.* within 0.1 s \(--rank-connect-timeout-s\)"):
        connect(place, timeout_s=0.1)
    with pytest.raises(PlaceError, match=r"the address of rank 0, rank\.invalid, is not known"):
        connect(replace(place, host="rank.invalid"), timeout_s=0.1)


def test_ports_and_addresses_that_rank_0_cannot_have() -> None:
    with listening() as (_, place), pytest.raises(PlaceError, match="the port is in use; --rank-port chooses another"):
        Listener(place, SECRET, time.monotonic())
    with pytest.raises(PlaceError, match="this machine does not have the address"):
        Listener(replace(place, host="192.0.2.1"), SECRET, time.monotonic())


def test_beyond_loopback_ranks_need_credentials(tmp_path: Path) -> None:
    there = RankPlace(1, 2, 0, 1, "192.0.2.1", PORT)
    needed = r"MASTER_ADDR 192.0.2.1 is 192.0.2.1, beyond loopback: ranks need --rank-secret-file, or --tls-cert"
    with pytest.raises(CredentialsError, match=needed):
        connect(there, RankCredentials())
    with pytest.raises(CredentialsError, match=needed):
        Listener(there, RankCredentials(), time.monotonic())
    SECRET.check("192.0.2.1", "")
    tls(certificates(tmp_path)).check("192.0.2.1", "")
    RankCredentials().check("127.9.9.9", "")
    RankCredentials().check("::1", "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank_secret_file": "/does/not/exist"}, "--rank-secret-file /does/not/exist: no such file"),
        ({"rank_secret_file": "short"}, "--rank-secret-file .*: 5 bytes are too few, it needs 16"),
        (
            {"tls_cert": "short", "tls_key": "short", "tls_client_ca": "short"},
            "--tls-cert .*: this is not a certificate",
        ),
    ],
)
def test_files_that_cannot_be_used_are_named(options: dict[str, str], message: str, tmp_path: Path) -> None:
    (tmp_path / "short").write_text("short\n")
    paths = {name: str(tmp_path / value) for name, value in options.items()}
    with pytest.raises(CredentialsError, match=message):
        read_credentials(ExecutorConfig(model="any", **paths))


def test_tls_with_certificates_of_one_name(tmp_path: Path, lines: LoggedLines) -> None:
    certs = certificates(tmp_path / "certs")
    with listening(tls(certs)) as (listener, place):
        check_link(listener, connect(place, tls(certs)))
        client = tls(certs, "client").tls
        assert client is not None
        with pytest.raises(StartError):
            connect(place, RankCredentials(tls=replace(client, name="cadenza-executor")), timeout_s=0.5)
    lines.wait("its certificate is for cadenza-client, not for cadenza-executor")


def test_tls_of_another_authority_and_plain_text(tmp_path: Path, lines: LoggedLines) -> None:
    certs, other = certificates(tmp_path / "certs"), certificates(tmp_path / "other")
    with listening(tls(certs)) as (_, place):
        with pytest.raises(PlaceError, match=r"local issuer certificate|self-signed certificate"):
            connect(place, tls(other))
        with pytest.raises(PlaceError, match=r"it speaks TLS|it closed the connection"):
            connect(place, SECRET, timeout_s=0.5)
    with listening() as (_, place), pytest.raises(PlaceError):
        connect(place, tls(certs), timeout_s=0.5)
    lines.wait("it speaks TLS: rank 0 has no --tls-cert, --tls-key and --tls-client-ca")


def test_the_end_of_a_process_is_seen_at_once() -> None:
    """By both sides, and not before: heartbeats go both ways."""
    caught: queue.Queue[str] = queue.Queue()
    with listening() as (listener, place):
        theirs = connect(place, purpose=ConnectionPurpose.WATCH)
        watch(take(listener, ConnectionPurpose.WATCH), caught.put)
        theirs.end.settimeout(20)
        theirs.end.sendall(b"\0")
        assert theirs.end.recv(1) == theirs.end.recv(1) == b"\0"
        assert caught.empty()
        theirs.close()
        assert caught.get(timeout=20) in ("its process ended", "connection reset by peer")
