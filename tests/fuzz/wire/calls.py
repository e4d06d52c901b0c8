"""Sends bytes to a call of a service and says how it ended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, FileDescriptor
from grpc_health.v1 import health_pb2

BUGS = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS)
"""Statuses that only a bug of the server gives."""
DEADLINE_S = 20.0


@dataclass(frozen=True)
class Method:
    """One call of a service."""

    path: str
    request: Descriptor
    client_streams: bool
    server_streams: bool


@dataclass(frozen=True)
class Ended:
    """How a call ended, and what it answered."""

    status: grpc.StatusCode
    message: str
    answers: list[bytes]


def methods(file: FileDescriptor, service: str) -> list[Method]:
    """All calls of a service."""
    found = file.services_by_name[service]
    return [
        Method(f"/{found.full_name}/{each.name}", each.input_type, each.client_streaming, each.server_streaming)
        for each in found.methods
    ]


def send(channel: grpc.Channel, method: Method, messages: list[bytes], deadline_s: float = DEADLINE_S) -> Ended:
    """Send messages, one unless the call takes a stream of them, and read all answers until it ends."""
    answers: list[bytes] = []
    try:
        # Those before an error are kept.
        answers.extend(_answers(channel, method, messages, deadline_s))
    except grpc.RpcError as error:
        call: Any = error
        return Ended(call.code(), call.details() or "", answers)
    return Ended(grpc.StatusCode.OK, "", answers)


def _answers(channel: grpc.Channel, method: Method, messages: list[bytes], deadline_s: float) -> Iterator[bytes]:
    match method.client_streams, method.server_streams:
        case True, True:
            yield from channel.stream_stream(method.path)(iter(messages), timeout=deadline_s)
        case False, True:
            yield from channel.unary_stream(method.path)(messages[0], timeout=deadline_s)
        case _:
            yield channel.unary_unary(method.path)(messages[0], timeout=deadline_s)


HEALTH = methods(health_pb2.DESCRIPTOR, "Health")


def check(method: Method, ended: Ended, *, endless: bool = False) -> None:
    """No bug, and no call that did not end in time, unless it ends only with its deadline."""
    refused = BUGS if endless else (*BUGS, grpc.StatusCode.DEADLINE_EXCEEDED)
    assert ended.status not in refused, (method.path, ended.status, ended.message)
