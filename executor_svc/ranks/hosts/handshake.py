"""How a connection between two ranks begins: each proves to the other that it knows the secret, which never travels.

    member: HELLO     which rank, for what, and a nonce
    rank 0: ANSWER    its nonce, and HMAC-SHA256 of HELLO and both nonces
    member: PROOF     the same, of the other side
    rank 0: WELCOME, or REFUSED with the reason: the first frame

All before the frame has fixed sizes. The proof keeps strangers out; it does not protect what follows from a machine in
between, which takes TLS.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import time
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from executor_svc.ranks.hosts.places import PlaceError

PROTOCOL = 1
"""Of frames between ranks."""
_MAGIC = b"cadenza rank"
_HEAD = struct.Struct("<12sB")
"""What every version begins with, and its number."""
_HELLO = struct.Struct("<BHH32s")
_ANSWER = struct.Struct("<32s32s")
_NONCE_BYTES = _PROOF_BYTES = 32
_TLS_HANDSHAKE, _TLS_ALERT = 0x16, 0x15
"""First bytes of TLS records."""
_RETRY_S = 0.2
_Address = tuple[int, Any]
"""A family, and what `connect` and `bind` take."""


class ConnectionPurpose(IntEnum):
    """What a connection is for; a rank has one for each."""

    STEPS = 1
    ADAPTERS = 2
    WATCH = 3
    """Whether the other process is there."""
    EXCHANGES = 4
    """Made anew for each session."""


class HandshakeError(Exception):
    """The other side is no rank of this replica; the message says why."""


@dataclass(frozen=True, slots=True)
class Hello:
    """Who connects."""

    purpose: ConnectionPurpose
    rank: int
    size: int


class Timed:
    """A socket whose reads and writes end at a deadline, all together."""

    def __init__(self, end: socket.socket, timeout_s: float) -> None:
        self._end = end
        self._deadline = time.monotonic() + timeout_s

    def read(self, count: int) -> bytes:
        """Read so many bytes; raises OSError."""
        found = b""
        while len(found) < count:
            self._end.settimeout(max(0.001, self._deadline - time.monotonic()))
            part = self._end.recv(count - len(found))
            if not part:
                raise ConnectionResetError("it closed the connection")
            found += part
            if time.monotonic() > self._deadline:
                raise TimeoutError("timed out")
        return found

    def write(self, content: bytes) -> None:
        """Write; raises OSError."""
        self._end.settimeout(max(0.001, self._deadline - time.monotonic()))
        self._end.sendall(content)


def answer(stream: Timed, secret: bytes) -> Hello:
    """Rank 0's side; returns who has proved to know the secret. Raises OSError or HandshakeError."""
    hello = stream.read(_HEAD.size)
    magic, protocol = _HEAD.unpack(hello)
    if hello[0] == _TLS_HANDSHAKE:
        raise HandshakeError("it speaks TLS: rank 0 has no --tls-cert, --tls-key and --tls-client-ca")
    if magic != _MAGIC:
        raise HandshakeError("it is no rank of Cadenza")
    if protocol != PROTOCOL:
        stream.write(_HEAD.pack(_MAGIC, PROTOCOL))
        raise HandshakeError(f"it is of another version of Cadenza: its links have version {protocol}")
    hello += stream.read(_HELLO.size)
    purpose, rank, size, _ = _HELLO.unpack_from(hello, _HEAD.size)
    if purpose not in list(ConnectionPurpose):
        raise HandshakeError(f"rank {rank} asks for purpose {purpose}")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    stream.write(_HEAD.pack(_MAGIC, PROTOCOL) + _ANSWER.pack(nonce, _proof(secret, b"rank 0", hello, nonce)))
    try:
        proof = stream.read(_PROOF_BYTES)
    except ConnectionError:
        raise HandshakeError(f"as rank {rank} it does not accept the secret of --rank-secret-file here") from None
    if not hmac.compare_digest(proof, _proof(secret, b"member", hello, nonce)):
        raise HandshakeError(f"as rank {rank} it does not know the secret of --rank-secret-file")
    return Hello(ConnectionPurpose(purpose), rank, size)


def offer(stream: Timed, secret: bytes, hello: Hello) -> None:
    """Another rank's side, until the first frame. Raises OSError or HandshakeError."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    sent = _HEAD.pack(_MAGIC, PROTOCOL) + _HELLO.pack(hello.purpose, hello.rank, hello.size, nonce)
    stream.write(sent)
    first = stream.read(1)
    if first[0] == _TLS_ALERT:
        raise HandshakeError("it speaks TLS: this rank has no --tls-cert, --tls-key and --tls-client-ca")
    magic, protocol = _HEAD.unpack(first + stream.read(_HEAD.size - 1))
    if magic != _MAGIC:
        raise HandshakeError("it is no rank 0 of Cadenza: --rank-port chooses another port")
    if protocol != PROTOCOL:
        raise HandshakeError(f"it is of another version of Cadenza: its links have version {protocol}")
    their_nonce, proof = _ANSWER.unpack(stream.read(_ANSWER.size))
    if not hmac.compare_digest(proof, _proof(secret, b"rank 0", sent, their_nonce)):
        raise HandshakeError("it does not know the secret of --rank-secret-file here")
    stream.write(_proof(secret, b"member", sent, their_nonce))


def _proof(secret: bytes, side: bytes, hello: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, side + b"\0" + hello + nonce, hashlib.sha256)


def find_address(host: str, port: int, deadline: float) -> _Address:
    """Return the first address of a name, which may become known only later; raises PlaceError at the deadline."""
    while True:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            return int(found[0][0]), found[0][4]
        except OSError as error:
            if time.monotonic() > deadline:
                raise PlaceError(f"the address of rank 0, {host}, is not known: {error.strerror or error}") from None
        pause()


def pause() -> None:
    """Wait before the next try."""
    time.sleep(_RETRY_S)


def settle(end: socket.socket) -> None:
    """Let a connection wait as long as it takes, and send at once."""
    end.settimeout(None)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
