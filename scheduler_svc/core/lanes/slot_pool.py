"""Batch slots of one executor."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from scheduler_svc.core.errors import InvariantError


class SlotPool:
    """A pool of slot ids. A released slot is free again only after the results of all plans before its release."""

    def __init__(self, num_slots: int, held: Collection[int] = ()) -> None:
        """All slots are free, except those that are held."""
        self.num_slots = num_slots
        self._free = [slot for slot in range(num_slots - 1, -1, -1) if slot not in held]
        self._to_release: list[int] = []
        self._quarantine: deque[tuple[int, list[int]]] = deque()
        """Slots by the step that released them, the oldest first."""

    @property
    def num_free(self) -> int:
        """Slots that can be taken now."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Slots that are not free: held, or released and still quarantined."""
        return self.num_slots - len(self._free)

    def take(self) -> int:
        """Take a free slot; raises InvariantError if there is none."""
        if not self._free:
            raise InvariantError("no free slot")
        return self._free.pop()

    def take_all(self, count: int) -> list[int]:
        """Take free slots, as `take` one after the other; raises InvariantError if there are too few."""
        split = len(self._free) - count
        if split < 0:
            raise InvariantError(f"{count} slots needed, {len(self._free)} free")
        taken = self._free[split:][::-1]
        del self._free[split:]
        return taken

    def release(self, slot: int) -> None:
        """Release a slot: the next plan releases it on the executor."""
        self._to_release.append(slot)

    def release_all(self, slots: list[int]) -> None:
        """Release slots: the next plan releases them on the executor."""
        self._to_release += slots

    def free(self, slot: int) -> None:
        """Free a slot at once: the executor does not know it, and no result for it is pending."""
        self._free.append(slot)

    @property
    def to_release(self) -> list[int]:
        """Slots that the next plan must release."""
        return self._to_release

    def take_released(self, step_id: int) -> list[int]:
        """The slots that the plan of this step must release."""
        released, self._to_release = self._to_release, []
        if released:
            self._quarantine.append((step_id, released))
        return released

    def on_result(self, step_id: int) -> None:
        """Record a step's result: slots released by plans up to the next one are free."""
        while self._quarantine and self._quarantine[0][0] <= step_id + 1:
            self._free += self._quarantine.popleft()[1]

    def check_integrity(self, held: list[int]) -> None:
        """Check that every slot is exactly one of held, free, to be released or quarantined."""
        everywhere = held + self._free + self._to_release + [slot for _, slots in self._quarantine for slot in slots]
        if sorted(everywhere) != list(range(self.num_slots)):
            raise InvariantError(f"slots do not add up: {sorted(everywhere)}")
