"""Loads and unloads of adapters: converts between the core and the wire."""

from __future__ import annotations

from collections.abc import Iterator

from google.rpc import status_pb2

from cadenza.v1 import execution_pb2 as pb
from scheduler_svc.core.adapters.events import (
    AdapterCommands,
    AdapterFailure,
    AdapterLoaded,
    AdapterRegistered,
    AdapterUnloaded,
)

_MAX_HASH_BYTES = 64
_MAX_MESSAGE = 2000
"""Characters of an error that are kept."""


def command_messages(commands: AdapterCommands) -> Iterator[pb.ExecuteRequest]:
    """Yield the messages of commands, in order."""
    for index in commands.unloads:
        yield pb.ExecuteRequest(unload_adapter=pb.UnloadAdapter(adapter_index=index))
    for registered in commands.loads:
        yield pb.ExecuteRequest(load_adapter=load_message(registered))


def load_message(registered: AdapterRegistered) -> pb.LoadAdapter:
    """Return the message that loads an adapter."""
    return pb.LoadAdapter(adapter_index=registered.index, name=registered.name, path=registered.path)


def registered_adapter(message: pb.LoadAdapter) -> AdapterRegistered:
    """Reverse `load_message`."""
    return AdapterRegistered(message.adapter_index, message.name, message.path)


def loaded_adapter(message: pb.AdapterLoaded) -> AdapterLoaded:
    """Return an executor's answer to a load, or an entry of SessionOpened."""
    error = None
    if message.HasField("error"):
        error = AdapterFailure(message.error.code, message.error.message[:_MAX_MESSAGE])
    elif not 0 < len(message.content_hash) <= _MAX_HASH_BYTES:
        error = AdapterFailure(_INTERNAL, f"the executor's content hash has {len(message.content_hash)} bytes")
    content_hash = message.content_hash if error is None else b""
    return AdapterLoaded(message.adapter_index, content_hash, message.num_bytes, message.rank, error)


_INTERNAL = 13


def loaded_message(answer: AdapterLoaded) -> pb.AdapterLoaded:
    """Reverse `loaded_adapter`."""
    error = None if answer.error is None else status_pb2.Status(code=answer.error.code, message=answer.error.message)
    return pb.AdapterLoaded(
        adapter_index=answer.index,
        content_hash=answer.content_hash,
        num_bytes=answer.num_bytes,
        rank=answer.rank,
        error=error,
    )


def unloaded_adapter(message: pb.AdapterUnloaded) -> AdapterUnloaded:
    """Return an executor's answer to an unload."""
    return AdapterUnloaded(message.adapter_index)
