"""KV events of the scheduler as those of the engine protocol."""

from __future__ import annotations

from collections.abc import Iterator

from cadenza.v1 import admin_pb2
from gateway_svc.dialects import smg_common_pb2 as pb

MEDIUMS = {admin_pb2.KV_TIER_DEVICE: "GPU", admin_pb2.KV_TIER_HOST: "CPU"}
"""vLLM's words for tiers."""
_TIERS = {
    admin_pb2.KV_TIER_DEVICE: (pb.KV_CACHE_TIER_DEVICE, 0),
    admin_pb2.KV_TIER_HOST: (pb.KV_CACHE_TIER_HOST, 1),
}
"""(tier, cache level)"""


def kv_batch(batch: admin_pb2.SubscribeKvEventsResponse) -> pb.KvEventBatch:
    """A batch, of one rank: the blocks of all executors count as one cache."""
    response = pb.KvEventBatch(
        sequence_number=batch.sequence_number,
        timestamp=batch.time_ns / 1e9,
        events=(_event(event, 0 if batch.HasField("state") else batch.sequence_number) for event in batch.events),
        dp_rank=0,
    )
    if batch.HasField("state"):
        state = batch.state
        response.snapshot.CopyFrom(pb.KvSnapshotChunk(index=state.index, count=state.count, blocks=state.num_blocks))
    return response


def _event(event: admin_pb2.KvEvent, event_id: int) -> pb.KvCacheEvent:
    match event.WhichOneof("event"):
        case "stored":
            return pb.KvCacheEvent(event_id=event_id, stored=_stored(event.stored))
        case "removed":
            gone = event.removed
            tier, level = _TIERS[gone.tier]
            removed = pb.KvBlocksRemoved(
                block_hashes=gone.block_hashes, cache_level=level, tier=tier, medium=MEDIUMS[gone.tier]
            )
            return pb.KvCacheEvent(event_id=event_id, removed=removed)
        case _:
            return pb.KvCacheEvent(event_id=event_id, cleared=pb.KvCacheCleared())


def _stored(stored: admin_pb2.KvBlocksStored) -> pb.KvBlocksStored:
    message = pb.KvBlocksStored(blocks=_blocks(stored), tier=_TIERS[stored.tier][0], medium=MEDIUMS[stored.tier])
    if stored.HasField("parent_hash"):
        message.parent_block_hash = stored.parent_hash
    if stored.adapter:
        message.lora_name = stored.adapter
    if stored.cache_salt:
        message.cache_salt = stored.cache_salt.decode(errors="backslashreplace")
    return message


def _blocks(stored: admin_pb2.KvBlocksStored) -> Iterator[pb.KvBlock]:
    size, level = stored.block_size, _TIERS[stored.tier][1]
    ids = list(stored.token_ids)
    owner = [pb.KvBlockExtraKey(text=stored.owner)] if stored.owner else []
    for index, block_hash in enumerate(stored.block_hashes):
        yield pb.KvBlock(
            block_hash=block_hash,
            token_ids=ids[index * size : (index + 1) * size],
            block_size=size,
            cache_level=level,
            extra_keys=owner,
        )
