"""The figures of queues and memory: one row each says what it is and where its value comes from.

`Load`, `SchedulerLoad` and `ExecutorInfo` on the wire, and the client's `ServerLoad` have fields of these names, and
are filled by name. docs/metrics.md prints the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.plan_loop.ports import Load


@dataclass(frozen=True, slots=True)
class Gauge:
    """One figure; `of_all` is for all executors, and the sum of `of_lane` where it is None."""

    name: str
    unit: str
    meaning: str
    of_lane: Callable[[Scheduler, Lane], int]
    of_all: Callable[[Scheduler], int] | None = None


def num_queued(core: Scheduler) -> int:
    """Number of groups that wait, those that wait for their adapter included."""
    return len(core.waiting) + len(core.adapters.parked)


def _num_used_blocks(lane: Lane) -> int:
    return lane.spec.num_blocks - lane.blocks.num_free


def _num_unused_slots(lane: Lane) -> int:
    held = _num_used_blocks(lane) * lane.spec.block_size
    return held - lane.num_stored_tokens - lane.num_reserved_tokens


# Counts since the start have a total of their own: executors that were removed count too.
GAUGES = (
    Gauge(
        "num_waiting", "requests", "Wait to be served; of an executor, those placed there.",
        lambda core, lane: core.num_waiting(lane.executor_id), lambda core: num_queued(core) - core.num_swapped,
    ),
    Gauge("num_running", "requests", "Run.", lambda _, lane: lane.num_running_groups),
    Gauge(
        "num_swapped", "requests", "Are swapped out to the host pool.",
        lambda _, lane: len({sequence.group for sequence in lane.swapped}), lambda core: core.num_swapped,
    ),
    Gauge("num_device_blocks", "blocks", "KV blocks of the device pool.", lambda _, lane: lane.spec.num_blocks),
    Gauge("num_used_device_blocks", "blocks", "Sequences hold them.", lambda _, lane: _num_used_blocks(lane)),
    Gauge("num_cached_device_blocks", "blocks", "Free, and still cached.", lambda _, lane: lane.blocks.num_cached),
    Gauge("num_host_blocks", "blocks", "KV blocks of the host pool.", lambda _, lane: lane.spec.num_host_blocks),
    Gauge("num_used_host_blocks", "blocks", "Sequences hold them.", lambda _, lane: lane.blocks.num_used_host),
    Gauge("num_cached_host_blocks", "blocks", "Free, still cached.", lambda _, lane: lane.blocks.host_pool.num_idle),
    Gauge("num_stored_tokens", "tokens", "Have KV in the held blocks.", lambda _, lane: lane.num_stored_tokens),
    Gauge("num_unused_slots", "tokens", "Fit into held blocks beside them.", lambda _, lane: _num_unused_slots(lane)),
    Gauge(
        "num_reserved_slots", "tokens", "Reserved beyond a sequence's tokens, by policies that reserve.",
        lambda _, lane: lane.num_reserved_tokens,
    ),
    Gauge("num_used_slots", "sequences", "Hold a batch slot.", lambda _, lane: lane.slots.num_used),
    Gauge(
        "num_shared_block_refs", "blocks", "Saved by sharing: references beyond the first of each.",
        lambda _, lane: lane.blocks.num_shared_refs,
    ),
    Gauge(
        "num_steps", "steps", "Planned since the start.",
        lambda _, lane: lane.counts.num_steps, lambda core: core.counts.num_steps,
    ),
    Gauge(
        "num_output_tokens", "tokens", "Output since the start.",
        lambda _, lane: lane.counts.num_output_tokens, lambda core: core.counts.num_output_tokens,
    ),
    Gauge(
        "num_preemptions", "preemptions", "Since the start.",
        lambda _, lane: lane.counts.num_preemptions, lambda core: core.counts.num_preemptions,
    ),
    Gauge(
        "num_prefix_queries", "tokens", "Looked up in the prefix cache since the start.",
        lambda _, lane: lane.counts.prefixes.num_queried, lambda core: core.counts.prefixes.num_queried,
    ),
    Gauge(
        "num_prefix_hits", "tokens", "Found there.",
        lambda _, lane: lane.counts.prefixes.num_hits, lambda core: core.counts.prefixes.num_hits,
    ),
    Gauge(
        "num_prefix_host_hits", "tokens", "Found in the host pool.",
        lambda _, lane: lane.counts.prefixes.num_host_hits, lambda core: core.counts.prefixes.num_host_hits,
    ),
    Gauge(
        "num_drafts", "tokens", "Drafts that were checked since the start.",
        lambda _, lane: lane.counts.drafts.num_drafts, lambda core: core.counts.drafts.num_drafts,
    ),
    Gauge(
        "num_accepted_drafts", "tokens", "Drafts that were accepted.",
        lambda _, lane: lane.counts.drafts.num_accepted, lambda core: core.counts.drafts.num_accepted,
    ),
)  # fmt: skip


def lane_load(core: Scheduler, lane: Lane) -> Load:
    """The current state of one executor; its queue is that of the groups that wait for it."""
    return Load(**{gauge.name: gauge.of_lane(core, lane) for gauge in GAUGES})


def current_load(core: Scheduler) -> Load:
    """The current state of queues and memory, over all executors."""
    lanes = list(core.lanes.values())
    return Load(**{gauge.name: _total(gauge, core, lanes) for gauge in GAUGES})


def _total(gauge: Gauge, core: Scheduler, lanes: list[Lane]) -> int:
    if gauge.of_all is not None:
        return gauge.of_all(core)
    return sum(gauge.of_lane(core, lane) for lane in lanes)
