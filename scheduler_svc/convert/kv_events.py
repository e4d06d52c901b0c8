"""KV events as messages, each made once for all subscribers that are about as far."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from cadenza.v1 import admin_pb2 as pb
from cadenza_common.serving.slices import Work, run_in_slices
from scheduler_svc.engine.kv_events.blocks import Block, Tier, block_hashes, owner_of, token_ids_of
from scheduler_svc.engine.kv_events.events import Event, KvEventBatch, Removed, Stored

EVENTS_PER_SLICE = 64
"""Events that are made before the event loop runs other callbacks. An event costs as much as tens of blocks."""
_TIERS = {Tier.DEVICE: pb.KV_TIER_DEVICE, Tier.HOST: pb.KV_TIER_HOST}
_MAX_KEPT = 16
"""Messages that are kept for other subscribers: with MAX_BATCH_TOKENS in each, a few MB."""


def kv_batch(batch: KvEventBatch, adapters: Mapping[bytes, str]) -> Work[pb.SubscribeKvEventsResponse]:
    """A batch; adapters: names by the hash of their content."""
    response = pb.SubscribeKvEventsResponse(sequence_number=batch.number, time_ns=batch.time_ns)
    for index, event in enumerate(batch.events):
        if index and index % EVENTS_PER_SLICE == 0:
            yield
        response.events.append(_event(event, adapters))
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
        hashes = block_hashes(event.blocks)
        return pb.KvEvent(removed=pb.KvBlocksRemoved(block_hashes=hashes, tier=_TIERS[event.tier]))
    return pb.KvEvent(cleared=pb.KvBlocksCleared())


def _stored(event: Stored, adapters: Mapping[bytes, str]) -> pb.KvBlocksStored:
    first = event.blocks[0]
    return pb.KvBlocksStored(
        block_hashes=block_hashes(event.blocks),
        parent_hash=None if first.parent is None else block_hashes((first.parent,))[0],
        token_ids=token_ids_of(event.blocks),
        block_size=first.num_tokens,
        tier=_TIERS[event.tier],
        adapter=adapter_name(first, adapters),
        cache_salt=first.root[1],
        owner=owner_of(first.root),
    )


class KvMessages:
    """Makes messages in slices, one at a time."""

    def __init__(self, adapter_names: Callable[[], Mapping[bytes, str]]) -> None:
        """adapter_names: by the hash of their content."""
        self._adapter_names = adapter_names
        self._making = asyncio.Lock()
        self._kept: dict[int, pb.SubscribeKvEventsResponse] = {}
        """By the number of the batch, the latest last."""

    async def message(self, batch: KvEventBatch) -> pb.SubscribeKvEventsResponse:
        """The message of a batch, not to be changed. Parts of a state are one subscriber's alone, and not kept."""
        if batch.part is not None:
            return await self._made(batch)
        async with self._making:
            message = self._kept.get(batch.number)
            if message is None:
                message = self._kept[batch.number] = await self._made(batch)
                if len(self._kept) > _MAX_KEPT:
                    del self._kept[next(iter(self._kept))]
        return message

    async def _made(self, batch: KvEventBatch) -> pb.SubscribeKvEventsResponse:
        return await run_in_slices(kv_batch(batch, self._adapter_names()))
