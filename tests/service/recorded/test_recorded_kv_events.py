"""A recorded exchange of KV events: it is what we send, a router can follow it, and the protocols agree.

Its ZeroMQ payloads are read by vLLM's own classes in tests/gateway_svc/kv_events/test_publisher.py.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict

from cadenza.v1 import admin_pb2
from gateway_svc.dialects import smg_common_pb2
from tests.helpers.core.kv_exchange import RECORDED, exchange
from tests.helpers.core.kv_router import Router

msgpack = pytest.importorskip("msgpack", reason="the extra kv-events")
SIZE = 4


@pytest.fixture
def recorded() -> list[dict[str, Any]]:
    return json.loads(RECORDED.read_text())


async def test_what_we_send_is_what_is_recorded(recorded) -> None:
    assert await exchange() == recorded


def test_a_router_follows_it(recorded) -> None:
    batches = [ParseDict(step["ours"], admin_pb2.SubscribeKvEventsResponse()) for step in recorded]
    router, num_blocks, num_states = Router(), [], []
    for batch in batches:
        router.take(batch)
        num_blocks.append(len(router.blocks))
        num_states.append(router.num_states)
    assert num_blocks == [2, 3, 4, 6, 11, 11, 11, 0, 0]
    assert num_states == [1, 1, 1, 1, 1, 1, 2, 2, 3], "a gap is filled by the present state"


def test_salts_and_parents_tell_blocks_apart(recorded) -> None:
    router = Router()
    for step in recorded[:4]:
        router.take(ParseDict(step["ours"], admin_pb2.SubscribeKvEventsResponse()))
    assert router.num_cached([1] * 8 + [3] * 8, SIZE) == 12
    assert router.num_cached([3] * 8, SIZE) == 0
    assert len([ids for _, ids in router.blocks.values() if ids == (2,) * SIZE]) == 3, "without and with a salt"


def test_the_protocols_tell_the_same(recorded) -> None:
    for step in recorded:
        ours = ParseDict(step["ours"], admin_pb2.SubscribeKvEventsResponse())
        engine = ParseDict(step["engine"], smg_common_pb2.KvEventBatch())
        _, published, _ = msgpack.unpackb(bytes.fromhex(step["zmq"]))
        assert [each.WhichOneof("event") for each in ours.events] == [each.WhichOneof("data") for each in engine.events]
        for own, other, row in zip(ours.events, engine.events, published, strict=True):
            match own.WhichOneof("event"):
                case "cleared":
                    assert row == {"type": "AllBlocksCleared"}
                case "removed":
                    hashes = list(own.removed.block_hashes)
                    assert list(other.removed.block_hashes) == hashes
                    assert [_signed(each) for each in row["block_hashes"]] == hashes
                case "stored":
                    hashes, ids = list(own.stored.block_hashes), list(own.stored.token_ids)
                    assert [block.block_hash for block in other.stored.blocks] == hashes
                    assert [each for block in other.stored.blocks for each in block.token_ids] == ids
                    assert [_signed(each) for each in row["block_hashes"]] == hashes
                    assert row["token_ids"] == ids
                    parent = own.stored.parent_hash if own.stored.HasField("parent_hash") else None
                    assert (row["parent_block_hash"] is None) == (parent is None)
                    assert (
                        parent is None or _signed(row["parent_block_hash"]) == other.stored.parent_block_hash == parent
                    )
                    assert row.get("extra_keys", [None])[0] == (
                        [own.stored.cache_salt.decode()] if own.stored.cache_salt else None
                    )


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
