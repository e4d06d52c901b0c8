"""KV events become messages in slices, once for all subscribers."""

from __future__ import annotations

import asyncio

import pytest

from cadenza_common.serving.slices import run_at_once
from scheduler_svc.convert.kv_events import EVENTS_PER_SLICE, KvMessages, kv_batch
from scheduler_svc.engine.kv_events.blocks import Block, Tier, first_block, next_block
from scheduler_svc.engine.kv_events.events import MAX_BATCH_TOKENS, KvEventBatch, StatePart, Stored, grouped

PLAIN = ("", b"", b"")


def texts(count: int) -> list[Block]:
    """First blocks of different texts."""
    return [first_block(PLAIN, bytes([index % 256, index // 256, 0, 0]) * 16) for index in range(count)]


def batch(number: int, part: StatePart | None = None) -> KvEventBatch:
    """One with as many events as one may have."""
    (events,) = grouped((block, Tier.DEVICE, True) for block in texts(1024))
    return KvEventBatch(number, 0, events, part)


def test_a_batch_of_many_events_becomes_a_message_in_slices() -> None:
    assert len(list(kv_batch(batch(1), {}))) + 1 == 1024 / EVENTS_PER_SLICE
    message = run_at_once(kv_batch(batch(1), {}))
    assert [event.stored.token_ids[0] for event in message.events] == [
        int.from_bytes(block.content[:4], "little") for block in texts(1024)
    ]


def test_a_batch_of_large_blocks_has_no_more_tokens_than_one_of_small_ones() -> None:
    blocks = [first_block(PLAIN, bytes(1024))]
    for _ in range(199):
        blocks.append(next_block(blocks[-1], bytes(1024)))
    batches = list(grouped((block, Tier.DEVICE, True) for block in blocks))
    stored = [event for events in batches for event in events if isinstance(event, Stored)]
    assert [sum(block.num_tokens for block in event.blocks) for event in stored[:-1]] == [MAX_BATCH_TOKENS] * 3
    assert [block for event in stored for block in event.blocks] == blocks


@pytest.mark.slow
async def test_a_message_is_made_once_for_all_subscribers() -> None:
    messages, given = KvMessages(dict), batch(7)
    first, second = await asyncio.gather(messages.message(given), messages.message(given))
    assert first is second is await messages.message(given)
    assert (await messages.message(batch(8))).sequence_number == 8
    state = await messages.message(batch(7, StatePart(0, 1, 1024)))
    assert state.HasField("state"), "parts of a state may have the numbers of batches"
    for number in range(9, 40):
        await messages.message(batch(number))
    again = await messages.message(given)
    assert again is not first, "those of long ago are not kept"
    assert again == first
