"""Bugs of recurrent states in the core, put in by hand: the block manager's machine must find each.

Some are those of others, whose issues are named. `WAYS` are bugs of plans and sessions, which tests of the core find.
"""

from __future__ import annotations

from tests.simulation.bugs.seeded_bugs import SeededBug

STATE_BUGS = (
    SeededBug(
        "a hit does not ask for a state where it ends (vLLM 46453)",
        "scheduler_svc.core.memory.hit_rule", "HitRule.last_end",
        "missing = self._last_snapshot(places, end)", "missing = None",
    ),
    SeededBug(
        "a hit takes the state of another position (SGLang 31833, 37836)",
        "scheduler_svc.core.memory.state_tables", "StateTables.claim",
        "on_device, place = places[-1] >= 0, places[-1]",
        "place = next(each for each in places if each in self._tiers.device.windows[-1]); on_device = True",
    ),
    SeededBug(
        "a copy is found before a step has made it (SGLang 30862)",
        "scheduler_svc.core.memory.snapshots", "PendingSave.__init__",
        "self.is_made = False", "self.is_made = True",
    ),
    SeededBug(
        "a copy is of the node behind it (SGLang 34760)",
        "scheduler_svc.core.memory.snapshots", "Snapshots.note_nodes",
        "range(sequence.num_cached_blocks - save.num_blocks)",
        "range(sequence.num_cached_blocks - save.num_blocks - 1)",
    ),
    SeededBug(
        "a copy that is given up keeps its pages (SGLang 16067, 21404)",
        "scheduler_svc.core.memory.snapshots", "Snapshots.release",
        "self._tiers.device.free_state(save.pages)", "pass",
    ),
    SeededBug(
        "the snapshot that a hit reads is counted as free (SGLang 33773)",
        "scheduler_svc.core.memory.state_tables", "StateTables.num_to_open",
        "(1 + is_idle)", "1",
    ),
    SeededBug(
        "a hit is not loaded",
        "scheduler_svc.core.memory.state_tables", "StateTables.open",
        "self._moves.load(claim, sequence.state_pages)", "claim[0].leave_window(-1, claim[1])",
    ),
    SeededBug(
        "a sample begins with garbage",
        "scheduler_svc.core.memory.state_tables", "StateTables.copy",
        "if source.state_pages and child.state_pages:", "if False:",
    ),
    SeededBug(
        "a swap leaves the state behind",
        "scheduler_svc.core.memory.state_tables", "StateTables.move",
        "move(before, sequence.state_pages)", "pass",
    ),
    SeededBug(
        "a state that a plan reads is free for the same plan",
        "scheduler_svc.core.memory.state_moves", "StateMoves.drop",
        "if pages in reads.values():", "if False:",
    ),
    SeededBug(
        "a state that was to be copied comes from where it was not yet",
        "scheduler_svc.core.memory.state_moves", "StateMoves.swap_out",
        "self._copies.get(source, source)", "source",
    ),
    SeededBug(
        "a sequence that ends leaves its state",
        "scheduler_svc.core.memory.state_tables", "StateTables.drop",
        "self._moves.drop(pool, sequence.state_pages)", "pass",
    ),
    SeededBug(
        "a lookup does not learn that a state was saved",
        "scheduler_svc.core.memory.paged_pool", "PagedPool.set_snapshot",
        "self.num_window_changes += 1", "pass",
    ),
    SeededBug(
        "a block that is replaced takes its snapshot along",
        "scheduler_svc.core.memory.paged_tiers", "PagedTiers.replace",
        "self.device.set_snapshot(block_id, pages)", "self.device.states.add(pages)",
    ),
    SeededBug(
        "an evicted block moves to the host without its snapshot",
        "scheduler_svc.core.memory.paged_tiers", "PagedTiers._evict_block",
        "self._swapped[host_block_id] = tuple(pages)",
        "self._swapped[host_block_id] = (*pages[:-1], ()) if self.states is not None else tuple(pages)",
    ),
)  # fmt: skip

WAYS = (
    SeededBug(
        "a copy's position is counted in blocks of another size (vLLM 53142, 55600)",
        "scheduler_svc.core.steps.saves", "_arm",
        "end * lane.spec.block_size", "end * (2 * lane.spec.block_size)",
    ),
    SeededBug(
        "a state that a lost plan was to change is kept",
        "scheduler_svc.core.steps.kept_kv", "keep_kv",
        "{*contexts, *_copied_to(lane, steps)} if lane.blocks.states is not None else set()", "set()",
    ),
    SeededBug(
        "a state that a lost plan was to copy is kept",
        "scheduler_svc.core.steps.kept_kv", "keep_kv",
        ", *_copied_to(lane, steps)}", "}",
    ),
    SeededBug(
        "a state that no plan has copied yet is taken for the KV that is there",
        "scheduler_svc.core.steps.kept_kv", "keep_kv",
        "or sequence.kv_source is not None", "or False",
    ),
    SeededBug(
        "a beam goes on from another state than its parent's",
        "scheduler_svc.core.steps.beam_scheduling", "_reorder",
        "lane.blocks.states.copy(parent, child)", "pass",
    ),
    SeededBug(
        "beams that come back begin without the state of what they have in common",
        "scheduler_svc.core.steps.planning", "_shared_kv_is_computed",
        "states.copy(source, sequence)", "pass",
    ),
    SeededBug(
        "a beam that comes back does not wait where others need its state",
        "scheduler_svc.core.steps.chunks", "plan_chunk",
        "(lane.blocks.windows or lane.blocks.states) is not None", "lane.blocks.windows is not None",
    ),
    SeededBug(
        "beams come back behind a hit that not all of them have",
        "scheduler_svc.core.steps.allocation", "allocations_of",
        "allocation.num_shared < allocations[0].found.num_blocks", "False",
    ),
    SeededBug(
        "a beam to come has no state",
        "scheduler_svc.core.steps.admission", "_allocate",
        "lane.blocks.open_state(sequence)", "pass",
    ),
    SeededBug(
        "copies that a lost session was to make are waited for",
        "scheduler_svc.core.lanes.lane", "Lane.reset_session",
        "self.blocks.snapshots.clear()", "pass",
    ),
    SeededBug(
        "no state is saved where a prefix branches that was seen twice (vLLM 45238, 57610)",
        "scheduler_svc.core.steps.saves", "save_in_chunk",
        ", *matched}", "}",
    ),
    SeededBug(
        "no state is saved in the middle of a long prompt",
        "scheduler_svc.core.steps.saves", "save_in_chunk",
        "ends.update(range(", "set().update(range(",
    ),
    SeededBug(
        "the last states of talks go before those of others (vLLM 48435)",
        "scheduler_svc.core.memory.block_manager", "BlockManager._drop_others",
        "self.snapshots.renew_last(sequence)", "pass",
    ),
    SeededBug(
        "samples begin without their source's state",
        "scheduler_svc.core.steps.planning", "_fill",
        "lane.blocks.states.copy(source, sample)", "pass",
    ),
    SeededBug(
        "copies take the last pages",
        "scheduler_svc.core.steps.saves", "_arm",
        "blocks.can_take(num_pages + spare, alone=False)", "blocks.can_take(num_pages, alone=True)",
    ),
)  # fmt: skip
