"""KV events as vLLM publishes them: one msgpack array for a batch, [seconds, events, rank], with a map for each event.

The fields are those of vllm.distributed.kv_events in vLLM 0.32 and later (github.com/vllm-project/vllm, Apache-2.0).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import msgpack

from scheduler_svc.convert.kv_events import adapter_name
from scheduler_svc.engine.kv_events.blocks import Block, Tier, owner_of
from scheduler_svc.engine.kv_events.events import Batch, Event, Removed, Stored

_MEDIUMS = {Tier.DEVICE: "GPU", Tier.HOST: "CPU"}
_RANK = 0
"""The blocks of all executors count as one cache."""


def kv_payload(batch: Batch, adapters: Mapping[bytes, str]) -> bytes:
    """The payload of a batch; adapters: names by the hash of their content."""
    events = [_event(event, adapters) for event in batch.events]
    packed: bytes = msgpack.packb([batch.time_ns / 1e9, events, _RANK])
    return packed


def _event(event: Event, adapters: Mapping[bytes, str]) -> dict[str, Any]:
    if isinstance(event, Stored):
        return _stored(event, adapters)
    if isinstance(event, Removed):
        hashes = [_hash(block) for block in event.blocks]
        return {"type": "BlockRemoved", "block_hashes": hashes, "medium": _MEDIUMS[event.tier]}
    return {"type": "AllBlocksCleared"}


def _stored(event: Stored, adapters: Mapping[bytes, str]) -> dict[str, Any]:
    first = event.blocks[0]
    name = adapter_name(first, adapters)
    keys = [_extra_keys(block, name) for block in event.blocks]
    message: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": [_hash(block) for block in event.blocks],
        "parent_block_hash": None if first.parent is None else _hash(first.parent),
        "token_ids": list(chain.from_iterable(block.token_ids for block in event.blocks)),
        "block_size": len(first.content) // 4,
        "lora_id": None,
        "medium": _MEDIUMS[event.tier],
        "lora_name": name or None,
    }
    if any(keys):
        message["extra_keys"] = keys
    return message


def _extra_keys(block: Block, adapter: str) -> list[str] | None:
    """What a block's hash is made of beside tokens: the adapter in every block, salt and owner in a text's first."""
    keys = [adapter] if adapter else []
    if block.parent is None:
        salt = block.root[1].decode(errors="backslashreplace")
        keys += [key for key in (salt, owner_of(block.root)) if key]
    return keys or None


def _hash(block: Block) -> int:
    """Without a sign, as vLLM writes the last 8 bytes of its hashes."""
    return int.from_bytes(block.digest, "big")
