"""Bugs put into the core, the engine and the plan loop by hand, to show that the histories find them.

A bug replaces a piece of one function's text. The mutants of tests/mutants are drawn at random and tried against the
whole suite; these few are the mistakes that a scheduler of this kind makes, and are tried against histories alone.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

NUM_SEARCHED = 1_500
"""Histories for a bug that shows in one of a few hundred."""


@dataclass(frozen=True, slots=True)
class SeededBug:
    """One wrong line."""

    name: str
    module: str
    place: str
    """The function or method that it is in."""
    old: str
    new: str
    found_in: int = 0
    """A history that shows it, tried before all others: a search from 0 takes up to a minute. It may change with the
    scheduler; `python -m tests.simulation.bugs.find_bugs` prints those that show each."""


SEEDED_BUGS = (
    SeededBug(
        "a released slot is taken one plan too early",
        "scheduler_svc.core.lanes.slot_pool", "SlotPool.on_result",
        "<= step_id + 1", "<= step_id + 2",
    ),
    SeededBug(
        "a finished sequence's blocks are freed before its last step is planned",
        "scheduler_svc.core.steps.planning", "_plan_decodes",
        "return lane.decode_batch.advance()", "[lane.retire(each) for each in lane.decode_batch.advance()]; return []",
    ),
    SeededBug(
        "a late token of a preempted sequence is dropped",
        "scheduler_svc.core.request_table", "RequestTable.requeue",
        "if swapped:", "sequence.drop_pending_tokens()\n    if swapped:",
    ),
    SeededBug(
        "tokens that a lost session would have sampled are waited for",
        "scheduler_svc.core.sequences.sequence_tokens", "SequenceTokens.drop_pending_tokens",
        "self._num_planned = self.num_tokens", "pass",
    ),
    SeededBug(
        "a host block that is swapped in is a target of the same plan's swap-outs",
        "scheduler_svc.core.memory.block_tiers", "BlockTiers.quarantine",
        "if block_id not in self.moves.quarantined]", "if False]",
        found_in=52,
    ),
    SeededBug(
        "the KV of a token that is not computed yet is cached",
        "scheduler_svc.core.memory.block_manager", "BlockManager.cache_full_blocks",
        "min(sequence.num_computed_tokens, sequence.num_tokens - 1)", "sequence.num_tokens",
        found_in=71,
    ),
    SeededBug(
        "a shared block is written without a copy",
        "scheduler_svc.core.memory.block_manager", "BlockManager.make_writable",
        "if self.pool.ref_counts[block_id] == 1:", "if True:",
    ),
    SeededBug(
        "a session with another incarnation than the described one is used",
        "scheduler_svc.plan_loop.plan_loop", "PlanLoop._session",
        "if stream.opened.incarnation != model.incarnation:", "if False:",
    ),
    SeededBug(
        "a new request does not wake the plan loop",
        "scheduler_svc.engine.engine", "Engine.add",
        "self.executors.wake()", "pass",
        found_in=30,
    ),
    SeededBug(
        "a step that hangs leaves the service healthy",
        "scheduler_svc.plan_loop.plan_loop", "PlanLoop.stalled",
        "self._progress.stall is not None", "False",
        found_in=101,
    ),
    SeededBug(
        "an ended request leaves its deadline timer",
        "scheduler_svc.engine.deadlines", "Deadlines.cancel",
        "timer.cancel()", "pass",
    ),
    SeededBug(
        "a reader does not learn that its request cannot go on",
        "scheduler_svc.engine.engine", "Engine.fail",
        "live.notify()", "pass",
    ),
    SeededBug(
        "a reader skips a token after a message that was full",
        "scheduler_svc.engine.reader", "_advance",
        "cursor.token, cursor.text, cursor.done = token_end,",
        "cursor.token, cursor.text, cursor.done = min(num_tokens, token_end + (not is_whole)),",
    ),
    # --- drafts
    SeededBug(
        "tokens of drafts that arrive after a preemption are not counted",
        "scheduler_svc.core.sequences.sequence_tokens", "SequenceTokens.count_more",
        "self._num_planned += num_tokens", "return",
        found_in=389,
    ),
    SeededBug(
        "drafts get rows of logits that the step does not have",
        "scheduler_svc.core.steps.planning", "plan_drafts",
        ", budget.num_sequences // num_drafting)", ")",
        found_in=26,
    ),
    SeededBug(
        "a fork gets blocks for drafts before its copy",
        "scheduler_svc.core.steps.planning", "_make_room",
        "if sequence not in lane.pending_copy_on_write", "if True",
        found_in=297,
    ),
    SeededBug(
        "accepted drafts do not bring a sequence nearer to its greatest length",
        "scheduler_svc.core.sequences.decode_batch", "DecodeBatch.correct",
        "self._last_token_calendar[last_at - num_more]", "self._last_token_calendar[last_at]",
        found_in=42,
    ),
    SeededBug(
        "beams have drafts",
        "scheduler_svc.core.lanes.draft_limits", "max_drafts_of",
        "group.was_suspected or group.spec.beams is not None", "group.was_suspected",
    ),
    # --- several executors
    SeededBug(
        "requests that wait for an executor that closes are not placed again",
        "scheduler_svc.core.placement.placer", "Placer.on_lane_changed",
        "if executor_id == lane_id or", "if",
    ),
    SeededBug(
        "a request is placed on an executor that is lost",
        "scheduler_svc.core.placement.candidates", "takes_groups",
        "lane.is_open and not lane.draining", "not lane.draining",
    ),
    SeededBug(
        "a draining executor admits requests",
        "scheduler_svc.core.placement.candidates", "takes_groups",
        "lane.is_open and not lane.draining", "lane.is_open",
    ),
    SeededBug(
        "another lane takes a request to which plans in flight refer",
        "scheduler_svc.core.lanes.lane", "Lane.holds",
        "if self.inflight and self.inflight[0].plan.step_id <= group.held_until:", "if False:",
        found_in=327,
    ),
    SeededBug(
        "a request that is taken over keeps its former lane",
        "scheduler_svc.core.request_table", "RequestTable.bind",
        "group.lane_id, group.numerics = lane.executor_id,",
        "group.lane_id, group.numerics = lane.executor_id if group.lane_id is None else group.lane_id,",
    ),
    SeededBug(
        "the head of the queue waits for its own lane for ever",
        "scheduler_svc.core.placement.placer", "Placer._rebalances",
        "return self._policy is not None and self._policy.rebalances", "return False",
        found_in=234,
    ),
    SeededBug(
        "step ids count over all executors",
        "scheduler_svc.core.scheduler", "Scheduler.plan_step",
        "StepPlan(lane.counts.last_step_id + 1,",
        "StepPlan(max(each.counts.last_step_id for each in self.lanes.values()) + 1,",
    ),
    SeededBug(
        "requests with output go on with other numerics",
        "scheduler_svc.core.placement.candidates", "may_continue",
        "group.numerics == lane.spec.numerics", "True",
        found_in=209,
    ),
    SeededBug(
        "the death of an executor that is given up makes no suspects",
        "scheduler_svc.core.scheduler", "Scheduler.give_up_executor",
        "same_incarnation=False", "same_incarnation=True",
        found_in=208,
    ),
    SeededBug(
        "a lost executor is waited for although others serve",
        "scheduler_svc.engine.fleet.executor_member", "RequestMoves.move",
        "self._give_up(member)", "pass",
        found_in=40,
    ),
    SeededBug(
        "executors without work are not woken for requests that may move",
        "scheduler_svc.engine.fleet.executor_set", "ExecutorSet._wake_idle",
        "if member.loop.idle:", "if False:",
        found_in=848,
    ),
    SeededBug(
        "the service counts as unhealthy when one of its executors is lost",
        "scheduler_svc.engine.fleet.executor_set", "ExecutorSet.can_serve",
        "return any(", "return all(",
    ),
    # --- adapters
    SeededBug(
        "groups of running adapters pass one that waits for a place for ever",
        "scheduler_svc.core.adapters.turns", "AdapterTurns._must_wait",
        "return self._num_passed >= MAX_PASSED or now - self._since >= MAX_PASSED_S", "return False",
    ),
    SeededBug(
        "no group that lacks a place for its adapter has a turn",
        "scheduler_svc.core.adapters.turns", "AdapterTurns.pass_over",
        "if self.waits is None:", "if False:",
        found_in=356,
    ),
    SeededBug(
        "more adapters run than have places",
        "scheduler_svc.core.adapters.lane_adapters", "LaneAdapters.has_place",
        "(self.has(index) and self.turns.admits(group, running, now))", "self.has(index)",
    ),
    SeededBug(
        "a plan names an adapter that is still being loaded",
        "scheduler_svc.core.adapters.lane_adapters", "LaneAdapters.has",
        "found.state is AdapterState.LOADED and", "found.state is not AdapterState.UNLOADING and",
    ),
    SeededBug(
        "an executor with other files of an adapter takes its requests",
        "scheduler_svc.core.adapters.lane_adapters", "LaneAdapters.on_loaded",
        "if known_hash and answer.content_hash != known_hash:", "if False:",
    ),
    SeededBug(
        "an adapter gives its place away while requests use it",
        "scheduler_svc.core.adapters.lane_adapters", "LaneAdapters.least_recently_used",
        "and index not in users", "",
    ),
    SeededBug(
        "a due adapter takes the place of one whose requests run",
        "scheduler_svc.core.steps.adapter_changes", "_held",
        "if group.was_admitted", "if not group.was_admitted",
        found_in=51,
    ),
    SeededBug(
        "a due adapter keeps others from beginning when its requests have ended",
        "scheduler_svc.core.adapters.table", "AdapterTable.on_finished",
        "self._due.pop(index, None)", "pass",
    ),
    SeededBug(
        "an executor is taken to have the adapters that it had in its last session",
        "scheduler_svc.core.steps.adapter_changes", "adopt_loaded",
        "lane.adapters.reset()", "pass",
    ),
    SeededBug(
        "prefixes are shared between adapters",
        "scheduler_svc.core.memory.prefix_lookups", "root_of",
        "sequence.group.adapter_hash", "b''",
    ),
    SeededBug(
        "requests are left waiting when the last executor with adapters is removed",
        "scheduler_svc.core.steps.lane_changes", "remove",
        "requests.adapters.num_answers += 1", "pass",
        found_in=142,
    ),
    SeededBug(
        "an ended request leaves the timer of its adapter",
        "scheduler_svc.engine.adapters.adapters", "Adapters.on_ended",
        "timer.cancel()", "pass",
    ),
    SeededBug(
        "an executor is placed first that must still load the adapter",
        "scheduler_svc.core.placement.candidates", "able_lanes",
        "if has_adapter(lane, group)", "if True",
        found_in=5166,
    ),
    SeededBug(
        "an executor with another model joins",
        "scheduler_svc.engine.fleet.served_executors", "ServedExecutors._why_unlike",
        "if reason := why_other_model(served, model):", "if reason := '':",
        found_in=49,
    ),
    # --- KV groups
    SeededBug(
        "a window gives back a block that its next row reads",
        "scheduler_svc.core.kv_groups", "GroupSizes.first_block",
        "self.num_kept(window))", "window + self.block_size)",
        found_in=4,
    ),
    SeededBug(
        "a window gives back what a chunk of the same step reads",
        "scheduler_svc.core.steps.planning", "_make_room",
        "if sequence not in chunked:", "if True:",
        found_in=872,
    ),
    SeededBug(
        "an ended sequence keeps its blocks in windows",
        "scheduler_svc.core.memory.block_manager", "BlockManager.free_all",
        "self._drop_others(sequence)", "pass",
        found_in=32,
    ),
    SeededBug(
        "a preempted sequence keeps its blocks in windows",
        "scheduler_svc.core.memory.block_manager", "BlockManager.free",
        "self._drop_others(sequence, keeps_state=keeps_state)", "pass",
        found_in=4,
    ),
    SeededBug(
        "a block is copied without its pages of windows",
        "scheduler_svc.core.memory.window_tables", "WindowTables.replace",
        "if index in held:", "if False:",
        found_in=18,
    ),
    SeededBug(
        "a fork holds nothing in windows",
        "scheduler_svc.core.steps.chunks", "_fork",
        "lane.blocks.windows.share(source, sibling)", "pass",
        found_in=60,
    ),
    SeededBug(
        "an admission counts no pages of windows",
        "scheduler_svc.core.steps.plain_admission", "_take_blocks",
        "blocks.num_to_take(found, num_blocks)", "found.num_to_take(num_blocks) * blocks.sizes.full_pages",
        found_in=1747,
    ),
    SeededBug(
        "a sequence goes on before those that wait for its KV hold their windows",
        "scheduler_svc.core.steps.chunks", "_num_before_waiting",
        "for each in lane.prefilling if each.kv_source is source]", "for each in ()]",
        found_in=1467,
    ),
    SeededBug(
        "KV is kept without what the next row reads in a window",
        "scheduler_svc.core.steps.kept_kv", "_give_up_uncertain",
        "not lane.blocks.windows.covers(sequence)", "False",
        found_in=2020,
    ),
    SeededBug(
        "appended pages of a block come in another order than its strips",
        "scheduler_svc.core.steps.pages", "note_windows",
        "for page in pool.windows[number][block_id]]", "for page in reversed(pool.windows[number][block_id])]",
        found_in=18,
    ),
    SeededBug(
        "a table begins at another block than its description says",
        "scheduler_svc.core.steps.pages", "describe_pages",
        "GroupTable(group.index, first, page_ids)", "GroupTable(group.index, 0, page_ids)",
        found_in=18,
    ),
    SeededBug(
        "chunks take no pages for what they have given back",
        "scheduler_svc.core.memory.window_tables", "WindowTables.cover",
        "max(needed, held.stop + num_freed[number])", "held.stop",
        found_in=46,
    ),
    SeededBug(
        "a hit ends where a window lacks its first block",
        "scheduler_svc.core.kv_groups", "GroupSizes.num_read",
        "-(-(window - 1) // self.block_size)", "(window - 1) // self.block_size",
        found_in=326,
    ),
    SeededBug(
        "a window moves to the host without its content",
        "scheduler_svc.core.memory.paged_tiers", "PagedTiers._evict_block",
        "= tuple(pages)", "= (pages[0], *[()] * len(device.windows))",
        found_in=921,
    ),
)  # fmt: skip


@contextlib.contextmanager
def seeded(bug: SeededBug) -> Iterator[None]:
    """Put a bug in place; raises LookupError if the text that it replaces is not there."""
    owner: Any = importlib.import_module(bug.module)
    *outer, name = bug.place.split(".")
    for each in outer:
        owner = getattr(owner, each)
    present = inspect.getattr_static(owner, name)
    function = present.fget if isinstance(present, property) else present
    source = inspect.getsource(function)
    if source.count(bug.old) != 1:
        raise LookupError(f"{bug.module} {bug.place} does not have {bug.old!r} once")
    indent = " " * (len(source) - len(source.lstrip()))
    new = source.replace(bug.old, bug.new.replace("\n", f"\n{indent}"))
    lines = [line.removeprefix(indent) for line in new.splitlines()]
    # In a class, where `super()` has its variable, and a method's name does not hide a function of the same name.
    code = "from __future__ import annotations\n" + "\n".join(["class Changed:", *(f"    {line}" for line in lines)])
    found: dict[str, Any] = {}
    exec(compile(code, f"<{bug.name}>", "exec"), dict(function.__globals__), found)
    # The code, not the name: other modules have imported the function.
    changed = found["Changed"].__dict__[name]
    before = function.__code__
    function.__code__ = (changed.fget if isinstance(changed, property) else changed).__code__
    try:
        yield
    finally:
        function.__code__ = before
