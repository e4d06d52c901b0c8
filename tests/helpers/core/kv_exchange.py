"""An exchange of KV events, from the steps of a core to the messages of each protocol, on a clock that stands still.

`python -m tests.helpers.core.kv_exchange` records it, for a change of the messages that is meant.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from google.protobuf.json_format import MessageToDict

from cadenza_common.serving.slices import run_at_once
from gateway_svc.vllm import kv_events as engine
from scheduler_svc.convert.kv_events import kv_batch
from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.engine.kv_events.hub import KvEvents, Subscription
from tests.helpers.core.core_bench import Bench
from tests.helpers.paths import ROOT
from tests.helpers.scheduler.fake_clock import FakeClock

RECORDED = ROOT / "tests" / "data" / "kv_events" / "exchange.json"
_ADAPTERS: dict[bytes, str] = {}


class Exchange:
    """What happens, and what a subscriber is sent because of it."""

    def __init__(self) -> None:
        self.bench = Bench(Policies(prefix_caching=True), num_blocks=12)
        self.clock = FakeClock()
        self.hub = KvEvents(self.bench.core, self.clock)
        self.steps: list[dict[str, Any]] = []

    def serve(self, ids: list[int], salt: bytes = b"") -> None:
        """Run a request."""
        self.bench.add(f"r{len(self.bench.specs)}", ids, max_tokens=1, salt=salt)
        self.bench.run()
        self.hub.on_change()

    async def note(self, what: str, subscription: Subscription) -> int:
        """Note the next message, which is to be the only one; returns its number."""
        from gateway_svc.kv_events.payload import kv_payload

        async with asyncio.timeout(10):
            batch = await anext(subscription)
        await self.clock.advance(0)
        assert not subscription._pending, "one message for each step of the exchange"
        ours = run_at_once(kv_batch(batch, _ADAPTERS))
        self.steps.append(
            {
                "what": what,
                "ours": MessageToDict(ours, preserving_proto_field_name=True),
                "engine": MessageToDict(engine.kv_batch(ours), preserving_proto_field_name=True),
                "zmq": run_at_once(kv_payload(ours)).hex(),
            }
        )
        return batch.number


async def exchange() -> list[dict[str, Any]]:
    """The whole of it."""
    it = Exchange()
    text = [1] * 8
    it.serve([*text, 1])
    first = it.hub.subscribe()
    await it.note("the first subscriber gets what is cached", first)
    it.serve([2] * 5)
    await it.note("a block is stored", first)
    it.serve([*text, *[3] * 5])
    await it.note("a block is stored that follows one of before", first)
    it.serve([2] * 9, salt=b"salt")
    await it.note("a text with a salt has other hashes", first)
    it.serve([4] * 33)
    number = await it.note("blocks are removed for others", first)
    first.close()
    it.serve([5] * 5)
    again = it.hub.subscribe(number + 1)
    number = await it.note("who comes back soon goes on where it was", again)
    again.close()
    await it.clock.advance(100)
    it.serve([6] * 9)
    late = it.hub.subscribe(number + 1)
    await it.note("who comes back late has a gap, and gets what is cached anew", late)
    await it.hub.flush()
    await it.note("the cache is emptied", late)
    old = it.hub.subscribe(7)
    await it.note("the number of another process gets what is cached: nothing", old)
    it.hub.stop()
    return it.steps


if __name__ == "__main__":
    lines = ",\n".join(json.dumps(step) for step in asyncio.run(exchange()))
    RECORDED.write_text(f"[\n{lines}\n]\n")
