"""KV events as vLLM publishes them: one msgpack array for a batch, [seconds, events, rank], with a map for each event.

The fields are those of vllm.distributed.kv_events in vLLM 0.32 and later (github.com/vllm-project/vllm, Apache-2.0);
hashes have no sign, as vLLM writes the last 8 bytes of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgpack

from cadenza.v1 import admin_pb2 as pb
from cadenza_common.serving.slices import Work
from gateway_svc.vllm.kv_events import MEDIUMS

EVENTS_PER_SLICE = 64
"""Events that are written before the event loop runs other callbacks. An event costs as much as tens of blocks."""
_RANK = 0
"""The blocks of all executors count as one cache."""
_UNSIGNED = 2**64 - 1


def kv_payload(batch: pb.SubscribeKvEventsResponse) -> Work[bytes]:
    """The payload of a batch."""
    packer = msgpack.Packer(autoreset=False)
    packer.pack_array_header(3)
    packer.pack(batch.time_ns / 1e9)
    packer.pack_array_header(len(batch.events))
    for index, event in enumerate(batch.events):
        if index and index % EVENTS_PER_SLICE == 0:
            yield
        packer.pack(_event(event))
    packer.pack(_RANK)
    packed: bytes = packer.bytes()
    return packed


def _event(event: pb.KvEvent) -> dict[str, Any]:
    match event.WhichOneof("event"):
        case "stored":
            return _stored(event.stored)
        case "removed":
            hashes = _unsigned(event.removed.block_hashes)
            return {"type": "BlockRemoved", "block_hashes": hashes, "medium": MEDIUMS[event.removed.tier]}
        case _:
            return {"type": "AllBlocksCleared"}


def _stored(stored: pb.KvBlocksStored) -> dict[str, Any]:
    begins = not stored.HasField("parent_hash")
    name = stored.adapter
    keys = _extra_keys(stored, begins=begins)
    message: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": _unsigned(stored.block_hashes),
        "parent_block_hash": None if begins else stored.parent_hash & _UNSIGNED,
        "token_ids": list(stored.token_ids),
        "block_size": stored.block_size,
        "lora_id": None,
        "medium": MEDIUMS[stored.tier],
        "lora_name": name or None,
    }
    if keys:
        message["extra_keys"] = [keys, *[[name] if name else None] * (len(stored.block_hashes) - 1)]
    return message


def _extra_keys(stored: pb.KvBlocksStored, *, begins: bool) -> list[str] | None:
    """What a block's hash is made of beside tokens: the adapter in every block, salt and owner in a text's first."""
    keys = [stored.adapter] if stored.adapter else []
    if begins:
        salt = stored.cache_salt.decode(errors="backslashreplace")
        keys += [key for key in (salt, stored.owner) if key]
    return keys or None


def _unsigned(hashes: Iterable[int]) -> list[int]:
    return [each & _UNSIGNED for each in hashes]
