"""Channel and server options, addresses and error details: one place for every Cadenza process.

Each option was tested with grpcio (docs/callers.md, "Channel settings"): options that are often copied but have no
effect are left out on purpose.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from cadenza_common.wire.tls import TLS
from cadenza_common.wire.tls.channel import tls_channel
from cadenza_common.wire.tls.connection import ChannelFiles

PROTOCOL_VERSION = 1
SCHEDULER_PORT = 50051
EXECUTOR_PORT = 50052
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
MAX_REQUEST_BYTES = 1536 * 1024
"""Limit of a client's message to a scheduler, which refuses a longer one by itself, before it parses it."""
MAX_RECEIVED_BYTES = 2 * 1024 * 1024
"""Limit of what gRPC accepts from a client: a longer message ends its stream. Copying it would hold the event loop."""
MAX_PLAN_BYTES = 2 * 1024 * 1024
"""Limit of what gRPC accepts on an executor, where only plans are long. The largest plan that a scheduler sends has 1.7
MB: 256 Ki numbers of 4 bytes in its admissions, and changes of 4,096 slots and 32,768 blocks."""
MAX_STEP_LOGPROBS = 128 * 1024
"""Top logprobs of the tokens that one step samples, over all sequences, and of the prompt tokens that it computes: the
message of a result with both has 1.9 MB, which is parsed in 1.5 ms and serialized in 2.1 ms."""
MAX_SHORT_BYTES = 64 * 1024
"""Limit of all other messages to an executor."""
MAX_METADATA_BYTES = 16 * 1024
"""Limit of a call's metadata, as HTTP/2 counts them (RFC 9113, section 6.5.2): names, values and 32 bytes for each."""
MAX_STREAMS = 4096
"""Calls that a connection may have open at a time; further ones of a gRPC client wait in the client."""
MAX_EXECUTOR_STREAMS = 256
"""The same at an executor, whose scheduler needs two: room for streams that another scheduler left half open."""
MAX_CONNECTIONS = 2000
STATUS_DETAILS_KEY = "grpc-status-details-bin"
"""The key of a serialized google.rpc.Status in the trailing metadata of a call."""
HEALTH_REASON_KEY = "cadenza-health-reason-bin"
"""The key of the text why a service does not serve, in the trailing metadata of grpc.health.v1's Check."""

_MAX_RECEIVED = "grpc.max_receive_message_length"
_COMMON: list[tuple[str, Any]] = [
    (_MAX_RECEIVED, MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A dead connection is detected after 20 s of silence and 10 s without an answer to a ping: within the grace for
    # which a server keeps the requests of our clients. The second option sets the 10 s: with `keepalive_timeout_ms`
    # alone, whatever its value, gRPC waits for a minute.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
]


def health_reason(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Why a service does not serve, by the trailing metadata of Check; empty: it does not say."""
    found = next((value for key, value in metadata or () if key == HEALTH_REASON_KEY), b"")
    return found.decode(errors="replace") if isinstance(found, bytes) else found


def channel_options() -> list[tuple[str, Any]]:
    """Options for a client's channel. A silent one is pinged every 20 s: our servers take a ping every 10 s."""
    return [
        *_COMMON,
        # By default, silent streams send two pings and then at most one a minute.
        ("grpc.http2.max_pings_without_data", 0),
        # Retry a failed connection soon: a restarted executor should not have to wait for a long backoff.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        # Despite its name: the time limit of one connection attempt.
        ("grpc.min_reconnect_backoff_ms", 5_000),
        # Each channel has its own connection, so that closing one closes its streams and no others.
        ("grpc.use_local_subchannel_pool", 1),
        # `http_proxy` is meant for the web; without this option gRPC would use it even for 127.0.0.1.
        ("grpc.enable_http_proxy", 0),
    ]


def server_options(
    *,
    max_received_bytes: int = MAX_MESSAGE_BYTES,
    max_streams: int = MAX_STREAMS,
    max_connections: int = MAX_CONNECTIONS,
) -> list[tuple[str, Any]]:
    """Options for a server: bursts of new streams are accepted, frequent pings are tolerated.

    `max_streams`: calls of one connection at a time; it also bounds what calls that are begun and cancelled at once can
    take (CVE-2023-44487). `max_connections`: of all peers together.
    """
    return [
        ("grpc.max_concurrent_streams", max_streams),
        ("grpc.max_allowed_incoming_connections", max_connections),
        # A connection that sends nothing, or not the beginning of HTTP/2, is closed; by default after two minutes.
        ("grpc.server_handshake_timeout_ms", 10_000),
        # So is a connection that does not confirm the settings: until then the limit of metadata does not hold.
        ("grpc.http2.settings_timeout", 10_000),
        # One without calls is closed; our clients make another when they need it.
        ("grpc.max_connection_idle_ms", 300_000),
        # Metadata of a call, with 32 bytes for each entry: 16 KiB hold at most some 500 entries.
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        *(option for option in _COMMON if option[0] != _MAX_RECEIVED),
        (_MAX_RECEIVED, max_received_bytes),
        # By default a busy server refuses part of a burst of new streams; with these it accepts all of 10,000.
        ("grpc.server.max_pending_requests", 20_000),
        ("grpc.server.max_pending_requests_hard_limit", 20_000),
        # By default a call that a busy server has not begun to serve within 30 s ends with CANCELLED, as if the client
        # had left; its own deadline is for the caller to choose.
        ("grpc.server_max_unrequested_time_in_server", 3600),
        # This option works; `min_recv_ping_interval_without_data_ms` has no effect (measured).
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        # Two processes must not share a port unnoticed: a taken port is an error.
        ("grpc.so_reuseport", 0),
    ]


def parse_address(address: str, *, default_port: int) -> tuple[str, int]:
    """Split `HOST:PORT`, `HOST`, `:PORT` or `[V6]:PORT`; raises ValueError with the problem."""
    if not isinstance(address, str):
        raise ValueError(f"{address!r} is not HOST:PORT: it must be a str")
    text = address.strip()
    if "/" in text or len(text.split()) > 1:
        raise ValueError(f"{address!r} is not HOST:PORT: it must not have a scheme, path or space")
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and rest[0] != ":") or not _is_ipv6(host):
            raise ValueError(f"{address!r} is not HOST:PORT: brackets must enclose an IPv6 address, as in [::1]:50051")
        port_text = rest.removeprefix(":")
    elif text.count(":") > 1:
        host, port_text = text, ""
        if not _is_ipv6(host):
            raise ValueError(f"{address!r} is not HOST:PORT: it has more than one colon and is not an IPv6 address")
    else:
        host, _, port_text = text.partition(":")
    host = host or "127.0.0.1"
    if not port_text:
        return host, default_port
    if not (port_text.isascii() and port_text.isdigit()) or int(port_text) > 65535:
        raise ValueError(f"{address!r} is not HOST:PORT: the port must be 0 to 65535")
    return host, int(port_text)


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True


def format_address(host: str, port: int) -> str:
    """Join host and port; IPv6 hosts get brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def aio_channel(target: str, tls: TLS | ChannelFiles | None = None) -> grpc.aio.Channel:
    """A channel to `HOST:PORT` for asyncio, in plain text without `tls`. Each call uses a connection that was made with
    the files as they are then. Raises TlsError for files that cannot be used.
    """
    if tls is None:
        return grpc.aio.insecure_channel(target, options=channel_options())
    files = tls if isinstance(tls, ChannelFiles) else ChannelFiles(tls)
    return tls_channel(target, files, channel_options())


def sync_channel(target: str, tls: TLS | None = None) -> grpc.Channel:
    """A channel to `HOST:PORT` for threads, for a short time: it keeps the files as they are now. Raises TlsError."""
    if tls is None:
        return grpc.insecure_channel(target, options=channel_options())
    files = ChannelFiles(tls)
    return grpc.secure_channel(target, files.credentials(), options=[*channel_options(), *files.options()])


def bind(server: Any, address: str, *, default_port: int, credentials: grpc.ServerCredentials | None = None) -> str:
    """Bind a grpc(.aio) server to `HOST:PORT` (port 0: any free one), in plain text without `credentials`.

    Returns the bound address; raises OSError with a clear message if the port is taken or not permitted.
    """
    host, port = parse_address(address, default_port=default_port)
    try:
        if credentials is None:
            bound = server.add_insecure_port(format_address(host, port))
        else:
            bound = server.add_secure_port(format_address(host, port), credentials)
    except RuntimeError as exc:
        raise OSError(f"cannot listen on {format_address(host, port)}: the port is taken or not permitted") from exc
    if bound == 0:
        raise OSError(f"cannot listen on {format_address(host, port)}: the port is taken or not permitted")
    return format_address(host, bound)


def make_status(code: grpc.StatusCode, message: str, details: Sequence[Message] = ()) -> status_pb2.Status:
    """A google.rpc.Status with packed details."""
    status = status_pb2.Status(code=code_pb2.Code.Value(code.name), message=message)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def field_violation(field: str, description: str) -> error_details_pb2.BadRequest:
    """BadRequest with one field path."""
    return error_details_pb2.BadRequest(
        field_violations=[error_details_pb2.BadRequest.FieldViolation(field=field, description=description)]
    )


def retry_info(delay_s: float) -> error_details_pb2.RetryInfo:
    """RetryInfo: retry after this many seconds."""
    seconds = int(delay_s)
    return error_details_pb2.RetryInfo(
        retry_delay=duration_pb2.Duration(seconds=seconds, nanos=int((delay_s - seconds) * 1e9))
    )
