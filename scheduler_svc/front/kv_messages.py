"""KV events as messages of SubscribeKvEvents, each made once for all subscribers that are about as far."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from cadenza.v1 import admin_pb2 as pb
from cadenza_common.serving.slices import run_in_slices
from scheduler_svc.convert.kv_events import kv_batch
from scheduler_svc.engine.kv_events.events import KvEventBatch

_MAX_KEPT = 16
"""Messages that are kept for other subscribers: with MAX_BATCH_TOKENS in each, a few MB."""


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
