"""What the pools of the simulated executors hold: an identity of all tokens up to a position in place of its KV."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cadenza_common.plan.plan import BlockMoves, StepPlan
from scheduler_svc.core.kv_groups import KVGroup
from scheduler_svc.plan_loop.ports import ModelDescription
from tests.simulation.executor.slot import Slot

_NOT_WRITTEN = 0
_SPOILT = -1


class PlanError(Exception):
    """A plan contradicts earlier plans or the executor's limits, or reads KV that is not there: a bug of the core."""


def require(condition: bool, message: str) -> None:
    """Raise PlanError unless the condition holds."""
    if not condition:
        raise PlanError(message)


class KnownPools:
    """The device's and the host's blocks of one process."""

    def __init__(self, model: ModelDescription, groups: Sequence[KVGroup]) -> None:
        self._model = model
        self._groups = groups
        self._size = model.block_size
        self._device = [_NOT_WRITTEN] * (model.num_device_blocks * model.block_size)
        self._host = [_NOT_WRITTEN] * (model.num_host_blocks * model.block_size)

    def move(self, plan: StepPlan) -> None:
        """Do what a plan swaps and copies."""
        freed = {source for source, _ in plan.swap_in}
        require(freed.isdisjoint(block for _, block in plan.swap_out), "a swap-out to a block that is swapped in")
        copied = {source for source, _ in plan.copies}
        require(copied.isdisjoint(block for _, block in plan.copies), "a block is source and destination of copies")
        self._copy(self._device, self._host, plan.swap_out)
        self._copy(self._device, self._device, plan.copies)
        self._copy(self._host, self._device, plan.swap_in)

    def _copy(self, source: list[int], target: list[int], pairs: BlockMoves) -> None:
        if not pairs:
            return
        size = self._size
        require(len({to for _, to in pairs}) == len(pairs), "two moves have one destination")
        contents = [source[block * size : (block + 1) * size] for block, _ in pairs]
        for (_, block), content in zip(pairs, contents, strict=True):
            require(len(content) == size and (block + 1) * size <= len(target), "a move outside of the pools")
            target[block * size : (block + 1) * size] = content

    def write(self, slot: Slot, count: int) -> set[int]:
        """Compute the next positions of a slot; returns the pages that it writes to."""
        start, pages = slot.num_computed, set[int]()
        require(start + count <= self._model.max_model_len, f"slot {slot.number} exceeds max_model_len")
        for group, strip, places in self._places(slot, start, count):
            for position, place in enumerate(places, start=start):
                self._device[place] = _kv(slot, position, group, strip)
            pages.update(place // self._size for place in places)
        return pages

    def spoil(self, slot: Slot, count: int) -> None:
        """Leave garbage in the next positions of a slot."""
        for _, _, places in self._places(slot, slot.num_computed, count):
            for place in places:
                self._device[place] = _SPOILT

    def spoil_moves(self, plan: StepPlan) -> None:
        """Leave garbage where a plan moves blocks to."""
        self.spoil_pages((*plan.swap_in.destinations, *plan.copies.destinations))
        for _, block in plan.swap_out:
            self._spoil_block(self._host, block)

    def spoil_pages(self, pages: Iterable[int]) -> None:
        """Leave garbage in device pages."""
        for page in pages:
            self._spoil_block(self._device, page)

    def check(self, slot: Slot, start: int, end: int) -> None:
        """Attention reads the KV of all positions before `end`, with a window those that the rows from `start` read."""
        size, device = self._size, self._device
        for group, table in zip(self._groups, slot.tables, strict=True):
            begin = 0 if group.window is None else max(0, start + 1 - group.window)
            for index in range(begin // size, -(-end // size)):
                first, last = max(begin, index * size), min(end, (index + 1) * size)
                for strip, page in enumerate(table[index] or [-1] * group.pages_per_block):
                    at = page * size + first % size
                    wanted = [_kv(slot, position, group.index, strip) for position in range(first, last)]
                    if page < 0 or device[at : at + last - first] != wanted:
                        raise PlanError(
                            f"slot {slot.number} (seed {slot.sampling.seed}, sample {slot.sample_index}) reads "
                            f"positions {first} to {last - 1} from page {page}, which does not hold its KV"
                        )

    def _places(self, slot: Slot, start: int, count: int) -> Iterable[tuple[int, int, list[int]]]:
        """Group, strip, and where it has these positions."""
        size, positions = self._size, range(start, start + count)
        require(start + count <= slot.num_blocks * size, f"a block table of slot {slot.number} is too short")
        for group, table in enumerate(slot.tables):
            for strip in range(self._groups[group].pages_per_block):
                yield group, strip, [table[each // size][strip] * size + each % size for each in positions]

    def _spoil_block(self, pool: list[int], block: int) -> None:
        pool[block * self._size : (block + 1) * self._size] = [_SPOILT] * self._size


def _kv(slot: Slot, position: int, group: int, strip: int) -> int:
    """What a page of this group and strip must hold there."""
    return hash((slot.kv[position], group, strip)) if group or strip else slot.kv[position]
