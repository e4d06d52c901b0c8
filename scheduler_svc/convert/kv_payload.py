"""KV events as vLLM publishes them: one msgpack array for a batch, [seconds, events, rank], with a map for each event.

The fields are those of vllm.distributed.kv_events in vLLM 0.32 and later (github.com/vllm-project/vllm, Apache-2.0);
hashes have no sign, as vLLM writes the last 8 bytes of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgpack

from cadenza_common.serving.slices import Work
from scheduler_svc.convert.kv_events import EVENTS_PER_SLICE, adapter_name
from scheduler_svc.engine.kv_events.blocks import Block, Tier, owner_of, token_ids_of, unsigned_hashes
from scheduler_svc.engine.kv_events.events import Batch, Event, Removed, Stored

_MEDIUMS = {Tier.DEVICE: "GPU", Tier.HOST: "CPU"}
_RANK = 0
"""The blocks of all executors count as one cache."""


def kv_payload(batch: Batch, adapters: Mapping[bytes, str]) -> Work[bytes]:
    """The payload of a batch; adapters: names by the hash of their content."""
    packer = msgpack.Packer(autoreset=False)
    packer.pack_array_header(3)
    packer.pack(batch.time_ns / 1e9)
    packer.pack_array_header(len(batch.events))
    for index, event in enumerate(batch.events):
        if index and index % EVENTS_PER_SLICE == 0:
            yield
        packer.pack(_event(event, adapters))
    packer.pack(_RANK)
    packed: bytes = packer.bytes()
    return packed


def _event(event: Event, adapters: Mapping[bytes, str]) -> dict[str, Any]:
    if isinstance(event, Stored):
        return _stored(event, adapters)
    if isinstance(event, Removed):
        hashes = unsigned_hashes(event.blocks)
        return {"type": "BlockRemoved", "block_hashes": hashes, "medium": _MEDIUMS[event.tier]}
    return {"type": "AllBlocksCleared"}


def _stored(event: Stored, adapters: Mapping[bytes, str]) -> dict[str, Any]:
    first = event.blocks[0]
    name = adapter_name(first, adapters)
    keys = _extra_keys(first, name)
    message: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": unsigned_hashes(event.blocks),
        "parent_block_hash": None if first.parent is None else unsigned_hashes((first.parent,))[0],
        "token_ids": token_ids_of(event.blocks),
        "block_size": first.num_tokens,
        "lora_id": None,
        "medium": _MEDIUMS[event.tier],
        "lora_name": name or None,
    }
    if keys:
        message["extra_keys"] = [keys, *[[name] if name else None] * (len(event.blocks) - 1)]
    return message


def _extra_keys(block: Block, adapter: str) -> list[str] | None:
    """What a block's hash is made of beside tokens: the adapter in every block, salt and owner in a text's first."""
    keys = [adapter] if adapter else []
    if block.parent is None:
        salt = block.root[1].decode(errors="backslashreplace")
        keys += [key for key in (salt, owner_of(block.root)) if key]
    return keys or None
