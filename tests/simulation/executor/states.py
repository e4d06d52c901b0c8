"""Recurrent states of the plan runner: where each stands, the identity of the tokens before, and of those behind it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from cadenza_common.plan.plan import StateSaves, StepPlan
from scheduler_svc.plan_loop.ports import ModelDescription
from tests.simulation.executor.pools import PlanError, require
from tests.simulation.executor.slot import Slot


@dataclass(frozen=True)
class StatePage:
    """What a page of a state holds."""

    part: int
    """Which of the state's pages it is."""
    stands: int
    content: int
    """Identity of all tokens before that position; 0: there are none."""
    tail: dict[int, int] = field(default_factory=dict)
    """By position behind it, the identity of all tokens up to there."""


class KnownStates:
    """The states in the pages of both pools, and the copies that are armed."""

    def __init__(self, model: ModelDescription) -> None:
        self._size = model.pages_per_state
        self._tail = 1 + model.max_drafts
        self._device: dict[int, StatePage] = {}
        self._host: dict[int, StatePage] = {}
        self._armed: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
        self.saved: list[tuple[int, int]] = []
        """Slots and positions of the copies that the last step made."""

    def clear(self) -> None:
        """Drop all that is armed."""
        self._armed.clear()

    def prepare(self, plan: StepPlan, slots: dict[int, Slot]) -> None:
        """Do what a plan releases, moves and arms; admitted states must stand where their tail reaches."""
        if not self._size:
            return
        self.saved = []
        for number in plan.released_slots:
            self._armed.pop(number, None)
        for pairs, source, target in (
            (plan.swap_out, self._device, self._host),
            (plan.copies, self._device, self._device),
            (plan.swap_in, self._host, self._device),
        ):
            contents = [(to, source.get(page)) for page, to in pairs]
            for to, content in contents:
                target.pop(to, None)
                if content is not None:
                    target[to] = content
        for admitted in plan.admitted:
            slot = slots[admitted.slot]
            require(len(slot.state_pages) == self._size, f"slot {slot.number}: {slot.state_pages} as state pages")
            if admitted.slot not in plan.fork_slots and admitted.num_computed_tokens:
                self._read(slot)
        self._arm(plan.state_saves)

    def _arm(self, saves: StateSaves) -> None:
        pages = [
            tuple(saves.page_ids[first : first + self._size]) for first in range(0, len(saves.page_ids), self._size)
        ]
        for slot, position, own in zip(saves.slots, saves.positions, pages, strict=True):
            armed = self._armed.setdefault(slot, [])
            require(not armed or armed[-1][0] < position, f"slot {slot}: copies are not armed in order")
            armed.append((position, own))

    def _read(self, slot: Slot) -> int:
        """Where a slot's state stands, if it is that of its own tokens; raises PlanError."""
        context = slot.num_computed
        if not context:
            return 0
        found = [self._device.get(page) for page in slot.state_pages]
        first = found[0]
        if first is None or not first.stands <= context <= first.stands + self._tail:
            raise PlanError(f"slot {slot.number}: no state for position {context} in pages {slot.state_pages}: {first}")
        stands = first.stands
        content = slot.kv[stands - 1] if stands else 0
        for part, page in enumerate(found):
            is_right = page is not None and (page.part, page.stands, page.content) == (part, stands, content)
            tail = {} if page is None else page.tail
            if not is_right or any(tail.get(each) != slot.kv[each] for each in range(stands, context)):
                raise PlanError(f"slot {slot.number}: another state than that of its tokens: {found}")
        return stands

    def step(self, slot: Slot, count: int) -> None:
        """Compute the next positions of a slot."""
        if not self._size:
            return
        first, context = self._read(slot), slot.num_computed
        end = context + max(0, count - self._tail)
        armed, self._armed[slot.number] = self._armed.get(slot.number, []), []
        for position, pages in armed:
            if position > end:
                self._armed[slot.number].append((position, pages))
            elif position >= first:
                self._write(pages, slot, position, {})
                self.saved.append((slot.number, position))
        self._write(slot.state_pages, slot, end, {each: slot.kv[each] for each in range(end, context + count)})

    def spoil(self, slots: Iterable[Slot], plan: StepPlan) -> None:
        """A plan failed in the middle: what it would have written or moved is nothing."""
        for page in (*plan.copies.destinations, *plan.swap_in.destinations, *plan.state_saves.page_ids):
            self._device.pop(page, None)
        for page in plan.swap_out.destinations:
            self._host.pop(page, None)
        for slot in slots:
            self.spoil_pages(slot.state_pages)

    def spoil_pages(self, pages: Iterable[int]) -> None:
        """Device pages hold something else now."""
        for page in pages if self._device else ():
            self._device.pop(page, None)

    def _write(self, pages: Iterable[int], slot: Slot, stands: int, tail: dict[int, int]) -> None:
        for part, page in enumerate(pages):
            self._device[page] = StatePage(part, stands, slot.kv[stands - 1] if stands else 0, tail)
