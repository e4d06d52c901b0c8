"""Numbers about the adapters of one executor: loads, unloads and their times."""

from __future__ import annotations

from collections import Counter

from cadenza_common.metrics.histogram import Histogram
from scheduler_svc.core.adapters.events import AdapterCommands, AdapterLoaded, AdapterUnloaded
from scheduler_svc.core.adapters.lane_adapters import LaneAdapters
from scheduler_svc.core.adapters.table import AdapterTable
from scheduler_svc.metrics import buckets

LOADED, FAILED, CHANGED = LOADS = ("loaded", "failed", "changed")
"""How loads end; changed: the executor's content is not that of the other executors."""
EVICTED, REMOVED, REFUSED = UNLOADS = ("evicted", "removed", "refused")
"""Why adapters are unloaded; evicted: for another one; removed: it has no name any more; refused: it was changed."""

AdapterMessage = AdapterCommands | AdapterLoaded | AdapterUnloaded
"""What goes to an executor, and what it answers."""


class AdapterNumbers:
    """Counts since the executor was added."""

    def __init__(self) -> None:
        self.loads = Counter(dict.fromkeys(LOADS, 0))
        self.unloads = Counter(dict.fromkeys(UNLOADS, 0))
        self.load_s = Histogram(buckets.ADAPTER_LOAD_S)
        """From the load's message to its answer, of those that ended well."""
        self._sent: dict[int, float] = {}
        """When each load without an answer was sent, in seconds on the clock."""

    def on_message(self, message: AdapterMessage, lane: LaneAdapters, table: AdapterTable, now: float) -> None:
        """Count a message that was sent, or that the core has taken. lane: the executor's state after it."""
        if isinstance(message, AdapterCommands):
            self._sent.update((load.index, now) for load in message.loads)
            for index in message.unloads:
                self.unloads[_why_unloaded(index, lane, table)] += 1
        elif isinstance(message, AdapterLoaded) and message.index in self._sent:
            took_s = now - self._sent.pop(message.index)
            if message.error is not None:
                self.loads[FAILED] += 1
            else:
                self.loads[LOADED if lane.has(message.index) else CHANGED] += 1
                self.load_s.observe(took_s)

    def on_session_ended(self) -> None:
        """The loads without an answer get none."""
        self._sent.clear()

    def copied(self) -> AdapterNumbers:
        """The same numbers, which do not change any more."""
        result = AdapterNumbers()
        result.loads, result.unloads, result.load_s = self.loads.copy(), self.unloads.copy(), self.load_s.copy()
        return result

    def add(self, other: AdapterNumbers) -> None:
        """Add the numbers of an earlier lane of the same executor."""
        self.loads.update(other.loads)
        self.unloads.update(other.unloads)
        self.load_s.add(other.load_s)


def _why_unloaded(index: int, lane: LaneAdapters, table: AdapterTable) -> str:
    state, adapter = lane.state(index), table.adapters.get(index)
    if state is not None and state.error is not None:
        return REFUSED
    return REMOVED if adapter is None or not adapter.has_name else EVICTED
