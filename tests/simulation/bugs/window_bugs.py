"""Bugs of the prefix cache in lanes with windows, put in by hand: the block manager's machine must find each.

Some are those of others, whose issues are named; `tests/simulation/bugs/seeded_bugs.py` has those that histories find.
"""

from __future__ import annotations

from tests.simulation.bugs.seeded_bugs import SeededBug

WINDOW_BUGS = (
    SeededBug(
        "a hit ends only where all ends that was cached (vLLM 45238, 57610)",
        "scheduler_svc.core.memory.hit_rule", "HitRule.last_end",
        "return end", "return end if end == most else 0",
    ),
    SeededBug(
        "windows at the ends of prefixes go before those that were passed (vLLM 48435)",
        "scheduler_svc.core.memory.paged_pool", "PagedPool.evict_window",
        "if self._spare:", "if self._spare and not self._kept:",
    ),
    SeededBug(
        "a window's blocks are counted in blocks of another size (vLLM 53142, 55600)",
        "scheduler_svc.core.kv_groups", "GroupSizes.num_read",
        "// self.block_size)", "// (2 * self.block_size))",
    ),
    SeededBug(
        "one of several window groups says where a hit ends (vLLM 46453)",
        "scheduler_svc.core.memory.hit_rule", "HitRule.last_end",
        "rank < len(lowest)", "rank < 1",
    ),
    SeededBug(
        "a window comes back from the host in part (LMCache 4247)",
        "scheduler_svc.core.memory.paged_tiers", "PagedTiers.swap_in",
        "self._keep(block_id, self._windows_of(self.host, host_block_id))", "self._kept[block_id] = []",
    ),
    SeededBug(
        "a block moves to the host without the content of its windows",
        "scheduler_svc.core.memory.paged_tiers", "PagedTiers._evict_block",
        "= tuple(pages)", "= (pages[0], *[()] * len(device.windows))",
    ),
    SeededBug(
        "what a hit reads is evicted for the blocks behind it",
        "scheduler_svc.core.memory.window_tables", "WindowTables.claim",
        "in self._groups():", "in ():",
    ),
    SeededBug(
        "an evicted block keeps its windows",
        "scheduler_svc.core.memory.paged_pool", "PagedPool.evict",
        "self._drop_idle_windows(block_id)", "pass",
    ),
    SeededBug(
        "a block that leaves the cache keeps its windows",
        "scheduler_svc.core.memory.paged_pool", "PagedPool.uncache",
        "self._drop_idle_windows(block_id)", "pass",
    ),
    SeededBug(
        "a lookup does not learn that a window was evicted",
        "scheduler_svc.core.memory.paged_pool", "PagedPool.evict_window",
        "self.num_window_changes += 1", "pass",
    ),
    SeededBug(
        "idle windows that a hit takes are not counted",
        "scheduler_svc.core.memory.window_tables", "WindowTables.num_to_open",
        "device.window_refs[number]", "device.windows[number]",
    ),
    SeededBug(
        "a cancelled copy holds the windows that it was to read",
        "scheduler_svc.core.memory.paged_tiers", "PagedTiers.cancel",
        "pool.leave_window(group, held)", "pass",
    ),
    SeededBug(
        "a block keeps the windows of a block that was not cached",
        "scheduler_svc.core.memory.paged_pool", "PagedPool.leave_window",
        "if block_id in self.cached:", "if True:",
    ),
)  # fmt: skip
