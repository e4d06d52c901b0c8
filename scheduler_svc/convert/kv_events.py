"""KV events as messages."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

from cadenza.v1 import admin_pb2 as pb
from scheduler_svc.engine.kv_events.blocks import Block, Tier, owner_of
from scheduler_svc.engine.kv_events.events import Batch, Event, Removed, Stored

_TIERS = {Tier.DEVICE: pb.KV_TIER_DEVICE, Tier.HOST: pb.KV_TIER_HOST}


def kv_batch(batch: Batch, adapters: Mapping[bytes, str]) -> pb.SubscribeKvEventsResponse:
    """A batch; adapters: names by the hash of their content."""
    events = (_event(event, adapters) for event in batch.events)
    response = pb.SubscribeKvEventsResponse(sequence_number=batch.number, time_ns=batch.time_ns, events=events)
    if batch.part is not None:
        part = batch.part
        response.state.CopyFrom(pb.KvState(index=part.index, count=part.count, num_blocks=part.num_blocks))
    return response


def adapter_name(block: Block, adapters: Mapping[bytes, str]) -> str:
    """The name of the adapter that a block was computed with; empty: none."""
    content_hash = block.root[2]
    return adapters.get(content_hash, f"adapter:{content_hash.hex()}") if content_hash else ""


def _event(event: Event, adapters: Mapping[bytes, str]) -> pb.KvEvent:
    if isinstance(event, Stored):
        return pb.KvEvent(stored=_stored(event, adapters))
    if isinstance(event, Removed):
        hashes = [block.block_hash for block in event.blocks]
        return pb.KvEvent(removed=pb.KvBlocksRemoved(block_hashes=hashes, tier=_TIERS[event.tier]))
    return pb.KvEvent(cleared=pb.KvBlocksCleared())


def _stored(event: Stored, adapters: Mapping[bytes, str]) -> pb.KvBlocksStored:
    first = event.blocks[0]
    return pb.KvBlocksStored(
        block_hashes=[block.block_hash for block in event.blocks],
        parent_hash=None if first.parent is None else first.parent.block_hash,
        token_ids=chain.from_iterable(block.token_ids for block in event.blocks),
        block_size=len(first.content) // 4,
        tier=_TIERS[event.tier],
        adapter=adapter_name(first, adapters),
        cache_salt=first.root[1],
        owner=owner_of(first.root),
    )
