"""Work of a simulated stream ends in order, when its time is past."""

from __future__ import annotations

import pytest

from benchmarks.gpu import simulated_stream
from benchmarks.gpu.simulated_stream import SimulatedStream


class Clock:
    """A clock that moves when it is waited for."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_work_queues_and_events_mark_its_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(simulated_stream, "time", clock)
    stream = SimulatedStream()
    events = [stream.event(enable_timing=True) for _ in range(4)]
    assert events[3].query(), "it was never recorded"
    events[0].record()
    stream.run(2.0)
    events[1].record()
    stream.run(3.0)
    events[2].record()
    assert [event.query() for event in events] == [True, False, False, True]
    events[1].synchronize()
    assert clock.now == 102.0
    assert [event.query() for event in events] == [True, True, False, True]
    assert events[1].elapsed_time(events[2]) == pytest.approx(3000.0)
    clock.now = 110.0
    stream.run(1.0)
    events[3].record()
    assert events[2].elapsed_time(events[3]) == pytest.approx(6000.0), "an idle stream begins at once"
