"""Reads the tables of docs/errors.md: each row as a request and what comes of it.

A row's input is what it changes in a request that is right, as keyword arguments of the message: `timeout_s=nan`;
`None` takes a field away. Bytes, as in `b"\\xff"`, are sent as they are. `@name` before it names the server that the
row needs; see tests/helpers/errors/error_servers.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from cadenza.v1 import admin_pb2
from cadenza.v1 import generation_pb2 as pb
from tests.helpers.paths import ROOT

PAGE = ROOT / "docs" / "errors.md"
_COLUMNS = ["call", "input", "status", "field", "message"]
_GENERATE = {
    "prompt": [{"tokens": {"ids": [5, 6, 7]}}],
    "sampling_params": {"max_tokens": 4, "temperature": 0.0, "seed": 1, "ignore_eos": True},
}
_NOWHERE = {"target": "nowhere:1"}
HEALTHY = pb.GenerateRequest(**{**_GENERATE, "request_id": "healthy"})
"""Runs in a session beside each row."""


@dataclass(frozen=True)
class Call:
    """A call and a request that it takes."""

    service: str
    request: type[Message]
    base: dict[str, Any]
    answer: type[Message]
    streams: bool = False

    def make(self, changes: dict[str, Any]) -> Any:
        """The right request with these changes."""
        return self.request(**_merge(self.base, changes))


CALLS = {
    "Generate": Call("GenerationService", pb.GenerateRequest, _GENERATE, pb.GenerateResponse, True),
    "Session": Call("GenerationService", pb.SessionRequest, {}, pb.SessionResponse, True),
    "Abort": Call("GenerationService", pb.AbortRequest, {"request_id": "none"}, pb.AbortResponse),
    "GetModelInfo": Call("GenerationService", pb.GetModelInfoRequest, {}, pb.GetModelInfoResponse),
    "GetServerInfo": Call("GenerationService", pb.GetServerInfoRequest, {}, pb.GetServerInfoResponse),
    "Tokenize": Call("GenerationService", pb.TokenizeRequest, {"prompt": [{"text": "Hi"}]}, pb.TokenizeResponse),
    "Detokenize": Call("GenerationService", pb.DetokenizeRequest, {"token_ids": [77, 110]}, pb.DetokenizeResponse),
    "GetTokenizerFiles": Call("GenerationService", pb.GetTokenizerFilesRequest, {}, pb.GetTokenizerFilesResponse, True),
    "WatchSteps": Call("AdminService", admin_pb2.WatchStepsRequest, {}, admin_pb2.WatchStepsResponse, True),
    "GetBlockTable": Call(
        "AdminService", admin_pb2.GetBlockTableRequest, {"request_id": "none"}, admin_pb2.GetBlockTableResponse
    ),
    "Drain": Call("AdminService", admin_pb2.DrainRequest, {}, admin_pb2.DrainResponse),
    "Resume": Call("AdminService", admin_pb2.ResumeRequest, {}, admin_pb2.ResumeResponse),
    "AddExecutor": Call("AdminService", admin_pb2.AddExecutorRequest, _NOWHERE, admin_pb2.AddExecutorResponse),
    "DrainExecutor": Call("AdminService", admin_pb2.DrainExecutorRequest, _NOWHERE, admin_pb2.DrainExecutorResponse),
    "ResumeExecutor": Call("AdminService", admin_pb2.ResumeExecutorRequest, _NOWHERE, admin_pb2.ResumeExecutorResponse),
    "RemoveExecutor": Call("AdminService", admin_pb2.RemoveExecutorRequest, _NOWHERE, admin_pb2.RemoveExecutorResponse),
    "LoadAdapter": Call(
        "AdminService", admin_pb2.LoadAdapterRequest, {"name": "a", "path": "/nowhere"}, admin_pb2.LoadAdapterResponse
    ),
    "UnloadAdapter": Call(
        "AdminService", admin_pb2.UnloadAdapterRequest, {"name": "none"}, admin_pb2.UnloadAdapterResponse
    ),
    "ListAdapters": Call("AdminService", admin_pb2.ListAdaptersRequest, {}, admin_pb2.ListAdaptersResponse),
    "SubscribeKvEvents": Call(
        "AdminService", admin_pb2.SubscribeKvEventsRequest, {}, admin_pb2.SubscribeKvEventsResponse, True
    ),
    "FlushPrefixCache": Call("AdminService", admin_pb2.FlushPrefixCacheRequest, {}, admin_pb2.FlushPrefixCacheResponse),
    "Profile": Call("ExecutorAdminService", admin_pb2.ProfileRequest, {}, admin_pb2.ProfileResponse),
}


@dataclass(frozen=True)
class Row:
    """One row: what is sent, and what comes of it."""

    line: int
    call: str
    server: str
    input: str
    status: str
    field: str
    message: str

    @property
    def changes(self) -> dict[str, Any] | bytes:
        """What the row is about, or the bytes that it sends."""
        names = {"nan": math.nan, "inf": math.inf, "dict": dict, "range": range}
        source = self.input if self.input.startswith("b") else f"dict({self.input})"
        value: Any = eval(source, {"__builtins__": {}}, names)
        return value

    @property
    def whole_call(self) -> Call:
        """What is called; a session's stream is no call of its own."""
        return CALLS[self.call.removesuffix(" stream")]

    @property
    def holds_in_session(self) -> bool:
        """Does a session say the same of this Generate? What ends its stream, and a missing id, are its own matters."""
        return self.call == "Generate" and self.status != "RESOURCE_EXHAUSTED" and self.input != 'b""'

    def subject(self) -> Message | None:
        """The changes alone, as a message; None for bytes."""
        changes = self.changes
        return None if isinstance(changes, bytes) else self.whole_call.request(**_without_none(changes))

    def payload(self, request_id: str = "") -> bytes:
        """The request on the wire; a Generate without an id gets this one."""
        changes = self.changes
        if isinstance(changes, bytes):
            return changes
        if "generate" in changes:
            changes = {**changes, "generate": _merge({**_GENERATE, "request_id": "row"}, changes["generate"])}
        message = self.whole_call.make(changes)
        if request_id and not message.request_id:
            message.request_id = request_id
        return message.SerializeToString()


def read_rows() -> list[Row]:
    """Every row of every table that has our columns."""
    rows, inside = [], False
    for number, line in enumerate(PAGE.read_text(encoding="utf-8").splitlines(), start=1):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            inside = False
        elif cells == _COLUMNS:
            inside = True
        elif inside and not set(line) <= set("|-: "):
            call, given, status, field, message = cells
            server, code = re.fullmatch(r"(?:@(\w+) ?)?(?:`(.+)`)?", given).groups(default="")
            rows.append(Row(number, call, server, code, status, field.strip("`"), message))
    return rows


def matches(pattern: str, text: str) -> bool:
    """Is the text what the table says, where … stands for anything?"""
    return re.fullmatch(".*".join(map(re.escape, pattern.split("…"))), text, re.DOTALL) is not None


def _merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in changes.items():
        below = merged.get(name)
        merged[name] = _merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return _without_none(merged)


def _without_none(value: dict[str, Any]) -> dict[str, Any]:
    return {name: item for name, item in value.items() if item is not None}


def fields_of(message: Message, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path without indexes, value) of every field that is set, those within others too."""
    for field, value in message.ListFields():
        spot = path + field.name
        yield spot, value
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for item in value if field.is_repeated else [value]:
                yield from fields_of(item, f"{spot}.")
