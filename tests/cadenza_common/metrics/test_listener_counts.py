"""What a listener has refused: counted always, logged rarely."""

from __future__ import annotations

import asyncio
import logging

import pytest

from cadenza_common.metrics import listener_counts
from cadenza_common.metrics.listener_counts import EXECUTOR_REFUSALS, SCHEDULER_REFUSALS, ListenerCounts, RefusalReason


class Peer:
    def peer(self) -> str:
        return "ipv6:[::1]:50123"


class Lines(logging.Handler):
    """Collects log lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: asyncio.Queue[str] = asyncio.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.put_nowait(record.getMessage())


@pytest.mark.parametrize(
    ("peer", "shown"),
    [("", "an address that is gone"), ("unix:", "unix"), ("odd", "odd"), ("ipv4:1.2.3.4:5", "ipv4:1.2.3.4")],
)
async def test_a_line_always_says_who_it_was(caplog: pytest.LogCaptureFixture, peer: str, shown: str) -> None:
    gone = Peer()
    gone.peer = lambda: peer  # type: ignore[method-assign]
    ListenerCounts().refuse(RefusalReason.NO_MESSAGE, gone)
    assert caplog.messages == [f"refused a call of {shown}: no_message"]


async def test_a_reason_has_one_line_in_its_interval_however_many_calls_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listener_counts, "LOG_INTERVAL_S", 0.2)
    counts, handler = ListenerCounts([RefusalReason.NO_TOKEN, RefusalReason.LATE_MESSAGE]), Lines()
    logger = logging.getLogger(listener_counts.__name__)
    logger.addHandler(handler)
    try:
        for _ in range(1000):
            counts.refuse(RefusalReason.NO_TOKEN, Peer())
        counts.refuse(RefusalReason.UNKNOWN_TOKEN, Peer())
        assert handler.lines.get_nowait() == "refused a call of ipv6:[::1]: no_token"
        assert handler.lines.get_nowait() == "refused a call of ipv6:[::1]: unknown_token"
        assert handler.lines.empty()
        async with asyncio.timeout(10):
            more = await handler.lines.get()
        assert more == "refused 999 more calls within 0.2 s: no_token; the last of ipv6:[::1]"
    finally:
        logger.removeHandler(handler)
    assert counts.refused == {"no_token": 1000, "unknown_token": 1, "late_message": 0}
    copy = counts.copy()
    counts.refuse(RefusalReason.NO_TOKEN, Peer())
    assert copy.refused["no_token"] == 1000


def test_each_reason_belongs_to_a_service() -> None:
    assert {*SCHEDULER_REFUSALS, *EXECUTOR_REFUSALS} == set(RefusalReason)
