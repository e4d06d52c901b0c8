"""KV events over ZeroMQ: bytes that vLLM's own classes read, numbers without holes, and replays."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from cadenza.v1 import admin_pb2
from cadenza_common.serving.slices import Work, run_at_once
from gateway_svc.config import GatewayConfig
from gateway_svc.kv_events import publisher
from scheduler_svc.convert.kv_events import kv_batch
from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.engine.kv_events.blocks import Block, Tier, first_block, next_block
from scheduler_svc.engine.kv_events.events import Cleared, Event, KvEventBatch, Removed, Stored, grouped
from scheduler_svc.engine.kv_events.hub import KvEvents
from tests.helpers.core.core_bench import Bench
from tests.helpers.core.kv_exchange import RECORDED as EXCHANGE
from tests.helpers.paths import ROOT
from tests.helpers.scheduler.fake_clock import FakeClock

msgpack = pytest.importorskip("msgpack", reason="the extra kv-events")
RECORDED = ROOT / "tests" / "data" / "kv_events" / "payloads.json"
"""Batches as vLLM 0.32.0 encodes them: made by tests/data/kv_events/record.py."""
VLLM = Path(os.environ.get("VLLM_PYTHON", "/tmp/vllm/bin/python"))
ADAPTERS = {b"content": "poet"}


def chain(root: tuple[str, bytes, bytes], *contents: tuple[int, ...]) -> list[Block]:
    """Blocks with these token ids, one after the other."""
    blocks: list[Block] = []
    for ids in contents:
        content = b"".join(each.to_bytes(4, "little") for each in ids)
        blocks.append(next_block(blocks[-1], content) if blocks else first_block(root, content))
    return blocks


def batches() -> list[KvEventBatch]:
    """One of each kind."""
    plain = chain(("", b"", b""), (1, 2, 3, 4), (5, 6, 7, 70_000), (9, 9, 9, 9))
    salted = chain(("team", b"salt", b"content"), (1, 2, 3, 4), (5, 6, 7, 8))
    kinds: list[list[Event]] = [
        [Cleared()],
        [Stored(plain[:2], Tier.DEVICE)],
        [Stored(plain[2:], Tier.HOST), Removed(plain[:2], Tier.DEVICE)],
        [Stored(salted, Tier.DEVICE)],
    ]
    return [KvEventBatch(number, 1_700_000_000_250_000_000 + number, events) for number, events in enumerate(kinds)]


def payloads() -> list[bytes]:
    from gateway_svc.kv_events.payload import kv_payload

    return [run_at_once(kv_payload(run_at_once(kv_batch(batch, ADAPTERS)))) for batch in batches()]


def test_payloads_are_those_that_vllm_makes() -> None:
    recorded = json.loads(RECORDED.read_text())
    assert [payload.hex() for payload in payloads()] == recorded["payloads"]


@pytest.mark.skipif(not VLLM.exists(), reason="no vLLM: VLLM_PYTHON names its interpreter")
@pytest.mark.slow
def test_vllm_s_own_classes_read_them() -> None:
    program = ROOT / "tests" / "data" / "kv_events" / "record.py"
    exchange = [step["zmq"] for step in json.loads(EXCHANGE.read_text())]
    given = json.dumps([payload.hex() for payload in payloads()] + exchange)
    done = subprocess.run([VLLM, program, given], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1])["payloads"] == json.loads(given)


def test_a_payload_of_many_events_is_made_in_slices() -> None:
    from gateway_svc.kv_events.payload import EVENTS_PER_SLICE, kv_payload

    blocks = [block for index in range(1024) for block in chain(("", b"", b""), (index,) * 16)]
    (events,) = grouped((block, Tier.DEVICE, True) for block in blocks)
    batch = run_at_once(kv_batch(KvEventBatch(1, 0, events), {}))
    assert len(list(kv_payload(batch))) + 1 == 1024 / EVENTS_PER_SLICE
    _, rows, _ = msgpack.unpackb(run_at_once(kv_payload(batch)))
    assert [row["block_hashes"][0] for row in rows] == [int.from_bytes(block.digest, "big") for block in blocks]


class Link:
    """A scheduler that is reached without gRPC."""

    def __init__(self, hub: KvEvents) -> None:
        self._hub = hub

    @property
    def own(self) -> Link:
        """The gateway's caller."""
        return self

    async def kv_events(self, start: int) -> AsyncGenerator[admin_pb2.SubscribeKvEventsResponse, None]:
        """As a caller's."""
        subscription = self._hub.subscribe(start)
        try:
            async for batch in subscription:
                yield run_at_once(kv_batch(batch, {}))
        finally:
            subscription.close()


class Rig:
    """A core, its events and their publisher over sockets of this machine."""

    def __init__(self, folder: Path, num_kept: int = 100, **options: object) -> None:
        self.num_requests = 0
        self.bench = Bench(Policies(prefix_caching=True))
        self.hub = KvEvents(self.bench.core, FakeClock())
        self.endpoint, self.replay = f"ipc://{folder}/pub", f"ipc://{folder}/replay"
        own = {"kv_events_endpoint": self.endpoint, "kv_events_replay_endpoint": self.replay}
        given = {**own, "kv_events_topic": "kv@pod@model", **options}
        self.publisher = publisher.KvPublisher(Link(self.hub), GatewayConfig(**given))  # type: ignore[arg-type]
        self.publisher._kept = publisher.KeptPayloads(num_kept)

    def serve(self, token_id: int) -> None:
        self.num_requests += 1
        self.bench.add(str(self.num_requests), [token_id] * 17, max_tokens=1)
        self.bench.run()
        self.hub.on_change()


async def frames(socket) -> list[bytes]:
    async with asyncio.timeout(10):
        return await socket.recv_multipart()


def stored(message: list[bytes]) -> list[dict]:
    """A batch's stored blocks. Once the pool is full they come with removed ones."""
    return [event for event in msgpack.unpackb(message[2])[1] if event["type"] == "BlockStored"]


async def test_a_subscriber_reads_them_and_asks_for_what_it_has_missed(tmp_path: Path) -> None:
    zmq = pytest.importorskip("zmq", reason="the extra kv-events")
    sockets = pytest.importorskip("zmq.asyncio")
    rig = Rig(tmp_path, num_kept=2)
    for token_id in range(1, 41):  # the pool is full: blocks are removed for those to come
        rig.serve(token_id)
    rig.publisher.start()
    context = sockets.Context()
    subscriber, dealer = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    subscriber.setsockopt(zmq.SUBSCRIBE, b"kv@")
    subscriber.connect(rig.endpoint)
    dealer.connect(rig.replay)
    try:
        async with asyncio.timeout(10):
            while True:  # until the subscription has reached the publisher: the first ones may be missed
                rig.serve(rig.bench.lane.counts.num_steps % 40 + 1)
                if await subscriber.poll(50):
                    break
        seen = [await frames(subscriber)]
        rig.serve(49)
        while not any(event["token_ids"][0] == 49 for event in stored(seen[-1])):
            seen.append(await frames(subscriber))
        numbers = [int.from_bytes(each[1], "big") for each in seen]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert {each[0] for each in seen} == {b"kv@pod@model"}
        (event,) = (event for event in stored(seen[-1]) if event["token_ids"][0] == 49)  # others may come with it
        assert (event["medium"], event["block_size"]) == ("GPU", 4)
        assert event["token_ids"] == [49] * 16
        await dealer.send_multipart((b"", (0).to_bytes(8, "big")))
        answers = []
        while not answers or answers[-1][2] != (-1).to_bytes(8, "big", signed=True):
            answers.append(await frames(dealer))
        kept = [(each[1], each[2], each[3]) for each in answers[:-1]]
        assert len(kept) == 2, "as many as are kept"
        assert kept[-1] == tuple(seen[-1])
    finally:
        await rig.publisher.stop()
        rig.hub.stop()
        for socket in (subscriber, dealer):
            socket.close(linger=0)
        context.term()


async def test_after_a_failure_it_goes_on_with_the_present_state_and_logs_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    zmq = pytest.importorskip("zmq", reason="the extra kv-events")
    sockets = pytest.importorskip("zmq.asyncio")
    monkeypatch.setattr(publisher, "_RETRY_S", 0.0)
    rig = Rig(tmp_path)
    rig.publisher.start()
    context = sockets.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.setsockopt(zmq.SUBSCRIBE, b"")
    subscriber.connect(rig.endpoint)
    try:
        async with asyncio.timeout(10):
            while not await subscriber.poll(50):
                rig.serve(rig.num_requests % 40 + 1)
        while await subscriber.poll(50):
            last = await frames(subscriber)
        sends = rig.publisher._payload

        def fails_once(*given: object) -> Work[bytes]:
            rig.publisher._payload = sends
            raise ValueError("no such batch")

        rig.publisher._payload = fails_once
        rig.serve(49)
        after = await frames(subscriber)
        assert int.from_bytes(after[1], "big") == int.from_bytes(last[1], "big") + 1
        events = msgpack.unpackb(after[2])[1]
        assert events[0] == {"type": "AllBlocksCleared"}
        assert any(event["token_ids"] == [49] * 16 for event in events[1:])
        (record,) = [record for record in caplog.records if record.name == publisher.__name__]
        assert rig.endpoint in record.message
        assert record.exc_info is not None
        assert "no such batch" in str(record.exc_info[1])
    finally:
        await rig.publisher.stop()
        rig.hub.stop()
        subscriber.close(linger=0)
        context.term()


async def test_who_comes_later_gets_the_present_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zmq = pytest.importorskip("zmq", reason="the extra kv-events")
    sockets = pytest.importorskip("zmq.asyncio")
    monkeypatch.setattr(publisher, "_STATE_S", 0.0)
    rig = Rig(tmp_path)
    rig.publisher.start()
    context = sockets.Context()
    subscribers = []
    try:
        async with asyncio.timeout(20):
            for token_id in (48, 49):
                while not rig.publisher._kept.since(0):  # noqa: ASYNC110
                    await asyncio.sleep(0)
                rig.serve(token_id)
                subscribers.append(subscriber := context.socket(zmq.SUB))
                subscriber.setsockopt(zmq.SUBSCRIBE, b"kv@")
                subscriber.connect(rig.endpoint)
                ids: set[int] = set()
                while token_id not in ids:
                    events = msgpack.unpackb((await frames(subscriber))[2])[1]
                    if events[0]["type"] == "AllBlocksCleared":
                        ids = {event["token_ids"][0] for event in events[1:]}
        assert ids == {48, 49}
    finally:
        await rig.publisher.stop()
        rig.hub.stop()
        for subscriber in subscribers:
            subscriber.close(linger=0)
        context.term()


async def test_a_replay_lets_other_callbacks_run_and_waits_once_for_a_peer_that_does_not_read(tmp_path: Path) -> None:
    zmq = pytest.importorskip("zmq", reason="the extra kv-events")
    sockets = pytest.importorskip("zmq.asyncio")
    rig = Rig(tmp_path, num_kept=200)
    rig.publisher.start()
    router = rig.publisher._sockets[1]
    sends, in_a_row, most, num_sent = router.send_multipart, 0, 0, 0

    def send(*given: object, **options: object) -> object:
        nonlocal in_a_row, most, num_sent
        in_a_row, num_sent = in_a_row + 1, num_sent + 1
        most = max(most, in_a_row)
        return sends(*given, **options)

    router.send_multipart = send
    async with asyncio.timeout(10):
        while not rig.publisher._kept.since(0):  # noqa: ASYNC110  # turns of the loop are what is counted
            await asyncio.sleep(0)
    for number in range(1, 200):
        rig.publisher._kept.add(number, number.to_bytes(2, "big") * 50_000)

    async def turns() -> None:
        nonlocal in_a_row
        while True:
            in_a_row = 0
            await asyncio.sleep(0)

    turning = asyncio.create_task(turns())
    context = sockets.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.set_hwm(1)
    dealer.connect(rig.replay)
    try:
        async with asyncio.timeout(20):
            for _ in range(5):
                await dealer.send_multipart((b"", bytes(8)))
            while num_sent < 5 * 201:  # noqa: ASYNC110
                await asyncio.sleep(0)
        turning.cancel()
        assert most <= 64
        answers = []
        while await dealer.poll(200):
            answers.append(await frames(dealer))
        assert [int.from_bytes(each[2], "big") for each in answers[:200]] == list(range(200))
        assert len(answers) < 2.5 * 201, "of five answers of 20 MB"
    finally:
        await rig.publisher.stop()
        rig.hub.stop()
        dealer.close(linger=0)
        context.term()


def test_what_is_kept_is_bounded_in_number_and_bytes() -> None:
    kept = publisher.KeptPayloads(3, max_bytes=100)
    for number in range(5):
        kept.add(number, b"x" * 20)
    assert [number for number, _ in kept.since(0)] == [2, 3, 4]
    kept.add(5, b"x" * 70)
    assert [number for number, _ in kept.since(0)] == [4, 5]
    assert kept.since(5) == [(5, b"x" * 70)]
    kept.add(6, b"x" * 101)
    kept.add(7, b"x" * 100)
    assert [number for number, _ in kept.since(0)] == [7]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_events_endpoint": "tcp://*:5557"}, "token ids of prompts"),
        ({"kv_events_replay_endpoint": "tcp://*:5558"}, "token ids of prompts"),
        ({"kv_events_replay_endpoint": "tcp://0.0.0.0:5558"}, "token ids of prompts"),
        ({"kv_events_endpoint": "tcp://[::]:5557"}, "token ids of prompts"),
        ({"kv_events_endpoint": "tcp://10.1.2.3:5557"}, "token ids of prompts"),
        ({"kv_events_endpoint": "tcp://router.example:5557"}, "token ids of prompts"),
        ({"kv_events_endpoint": "tcp://127.0.0.1;10.1.2.3:5557"}, "token ids of prompts"),
        ({"kv_events_endpoint": "5557"}, "pattern"),
    ],
)
def test_endpoints_that_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GatewayConfig(**options)  # type: ignore[arg-type]
    if "pattern" not in message:
        GatewayConfig(insecure=True, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
def test_this_machine_needs_no_insecure(host: str) -> None:
    options = {f"kv_events_{name}": f"tcp://{host}:5557" for name in ("endpoint", "replay_endpoint")}
    GatewayConfig(**options)  # type: ignore[arg-type]


async def test_an_address_of_ipv6_can_be_listened_on(tmp_path: Path) -> None:
    pytest.importorskip("zmq", reason="the extra kv-events")
    rig = Rig(tmp_path, kv_events_replay_endpoint="tcp://[::1]:*")
    try:
        rig.publisher.start()
        assert rig.publisher.endpoints[1].startswith("tcp://[::1]:")
    finally:
        await rig.publisher.stop()
        rig.hub.stop()
