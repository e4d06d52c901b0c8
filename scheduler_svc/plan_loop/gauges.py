"""The gauges of queues and memory: each row of `Load` says what one is, who shows it and where its value comes from.

`SchedulerLoad` and `ExecutorInfo` on the wire, and the client's `ServerLoad` and `ExecutorInfo`, have fields of these
names, and are filled by name. Prometheus' definitions and values, and docs/metrics.md, are made from the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.lanes.lane_counts import LaneCounts
from scheduler_svc.core.scheduler import Scheduler

_NONE: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Gauge:
    """One figure; `of_all` is for all executors, and the sum of `of_lane` where it is None."""

    name: str
    unit: str
    meaning: str
    of_lane: Callable[[Scheduler, Lane], int]
    of_all: Callable[[Scheduler], int] | None
    of_counts: Callable[[LaneCounts], int] | None
    """Of a count since the start; None: of no count."""
    families: Mapping[str, str]
    """The Prometheus families that show it as it is, and their meanings. Those of `cadenza_lane_` are by executor."""


def _gauge(
    unit: str,
    meaning: str,
    of_lane: Callable[[Scheduler, Lane], int],
    of_all: Callable[[Scheduler], int] | None = None,
    *,
    of_counts: Callable[[LaneCounts], int] | None = None,
    families: Mapping[str, str] = _NONE,
) -> Any:
    """A row."""
    row = {"unit": unit, "meaning": meaning, "of_lane": of_lane, "of_all": of_all, "of_counts": of_counts}
    return field(default=0, metadata={**row, "families": families})


def _count(unit: str, meaning: str, of: Callable[[LaneCounts], int], families: Mapping[str, str] = _NONE) -> Any:
    """A row of a count since the start. The core's total has executors that were removed too."""
    return _gauge(
        unit, meaning, lambda _, lane: of(lane.counts), lambda core: of(core.counts), of_counts=of, families=families
    )


def _family(names: str, meaning: str) -> dict[str, str]:
    """Families of one meaning."""
    return dict.fromkeys(names.split(), meaning)


def num_queued(core: Scheduler) -> int:
    """Number of groups that wait, those that wait for their adapter included."""
    return len(core.waiting) + len(core.adapters.parked)


def _num_used_blocks(lane: Lane) -> int:
    return lane.spec.num_blocks - lane.blocks.num_free


def _num_unused_slots(lane: Lane) -> int:
    held = _num_used_blocks(lane) * lane.spec.block_size
    return held - lane.num_stored_tokens - lane.num_reserved_tokens


@dataclass(frozen=True, slots=True)
class Load:
    """The state of queues and memory, over all executors or of one."""

    num_waiting: int = _gauge(
        "requests", "Wait to be served; of an executor, those placed there.",
        lambda core, lane: core.num_waiting(lane.executor_id), lambda core: num_queued(core) - core.num_swapped,
    )  # fmt: skip
    num_running: int = _gauge(
        "requests", "Run.", lambda _, lane: lane.num_running_groups,
        families=_family("vllm:num_requests_running", "Requests with a sequence that runs."),
    )  # fmt: skip
    num_swapped: int = _gauge(
        "requests", "Are swapped out to the host pool.",
        lambda _, lane: len({sequence.group for sequence in lane.swapped}), lambda core: core.num_swapped,
    )  # fmt: skip
    num_device_blocks: int = _gauge("blocks", "KV blocks of the device pool.", lambda _, lane: lane.spec.num_blocks)
    num_used_device_blocks: int = _gauge("blocks", "Sequences hold them.", lambda _, lane: _num_used_blocks(lane))
    num_cached_device_blocks: int = _gauge("blocks", "Free, and still cached.", lambda _, lane: lane.blocks.num_cached)
    num_host_blocks: int = _gauge("blocks", "KV blocks of the host pool.", lambda _, lane: lane.spec.num_host_blocks)
    num_used_host_blocks: int = _gauge("blocks", "Sequences hold them.", lambda _, lane: lane.blocks.num_used_host)
    num_cached_host_blocks: int = _gauge(
        "blocks", "Free, still cached.", lambda _, lane: lane.blocks.host_pool.num_idle_pages
    )
    num_stored_tokens: int = _gauge(
        "tokens", "Have KV in the held blocks.", lambda _, lane: lane.num_stored_tokens,
        families=_family("cadenza_lane_stored_tokens", "Tokens whose KV running sequences use."),
    )  # fmt: skip
    num_unused_slots: int = _gauge(
        "tokens", "Fit into held blocks beside them.", lambda _, lane: _num_unused_slots(lane)
    )
    num_reserved_slots: int = _gauge(
        "tokens", "Reserved beyond a sequence's tokens, by policies that reserve.",
        lambda _, lane: lane.num_reserved_tokens,
    )  # fmt: skip
    num_used_slots: int = _gauge("sequences", "Hold a batch slot.", lambda _, lane: lane.slots.num_used)
    num_shared_block_refs: int = _gauge(
        "blocks", "Saved by sharing: references beyond the first of each.", lambda _, lane: lane.blocks.num_shared_refs
    )
    num_steps: int = _count(
        "steps", "Planned since the start.", lambda counts: counts.num_steps,
        _family("cadenza_lane_steps_total", "Steps planned."),
    )  # fmt: skip
    num_output_tokens: int = _count(
        "tokens", "Output since the start.", lambda counts: counts.num_output_tokens,
        _family("vllm:generation_tokens_total cadenza_lane_output_tokens_total", "Output tokens."),
    )  # fmt: skip
    num_preemptions: int = _count(
        "preemptions", "Since the start.", lambda counts: counts.num_preemptions,
        _family("vllm:num_preemptions_total", "Preemptions."),
    )  # fmt: skip
    num_prefix_queries: int = _count(
        "tokens", "Looked up in the prefix cache since the start.", lambda counts: counts.prefixes.num_queried,
        _family(
            "vllm:prefix_cache_queries_total vllm:gpu_prefix_cache_queries_total",
            "Tokens of admitted sequences that were looked up in the prefix cache.",
        )
        | _family("cadenza_lane_prefix_queried_tokens_total", "Tokens looked up."),
    )  # fmt: skip
    num_prefix_hits: int = _count(
        "tokens", "Found there.", lambda counts: counts.prefixes.num_hits,
        _family("vllm:prefix_cache_hits_total vllm:gpu_prefix_cache_hits_total", "Tokens found there."),
    )  # fmt: skip
    num_prefix_host_hits: int = _count(
        "tokens", "Found in the host pool.", lambda counts: counts.prefixes.num_host_hits
    )
    num_drafts: int = _count(
        "tokens", "Drafts that were checked since the start.", lambda counts: counts.drafts.num_drafts
    )
    num_accepted_drafts: int = _count("tokens", "Drafts that were accepted.", lambda counts: counts.drafts.num_accepted)


GAUGES = tuple(Gauge(row.name, **row.metadata) for row in fields(Load))


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
