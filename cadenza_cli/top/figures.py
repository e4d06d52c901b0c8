"""The state of a server at the end of an interval, as plain data and as a JSON line."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from cadenza.errors import CadenzaError
from cadenza.info import ExecutorInfo, ServerInfo, TenantInfo

TIMES = ("total", "queue", "device", "sample", "moves")
"""Times of a step on its executor: total is from start to end; queue from the plan's arrival to its start; device the
forward pass; sample sampling; moves block copies and swaps."""


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of a time over the steps of a window, in seconds."""

    p50: float
    p99: float


@dataclass(frozen=True, slots=True)
class ExecutorFigures:
    """One executor over the window; figures of steps are 0 or empty if none ran."""

    info: ExecutorInfo
    num_steps: int  # that computed something
    num_failed_steps: int
    steps_per_s: float
    busy: float  # share of the window in which steps ran, 0 to 1
    mean_sequences: float  # per step
    max_sequences: int
    prompt_tokens_per_s: float
    sampled_tokens_per_s: float  # beams sample none
    output_tokens_per_s: float
    prefix_hit_rate: float | None  # share of the prompt tokens looked up there that were cached; None: none was
    tokens_per_step: float | None  # that a decoding sequence got; None: there were no drafts
    acceptance: float | None  # share of the drafts that were accepted; None: there were none
    times_s: dict[str, Percentiles]  # by the names of TIMES; times that the executor does not report are missing


@dataclass(frozen=True, slots=True)
class TenantFigures:
    """One tenant over the window."""

    info: TenantInfo
    output_tokens_per_s: float
    num_rejected_in_window: int  # requests


@dataclass(frozen=True, slots=True)
class ServerFigures:
    """A server at the end of an interval, and over the window that ends there."""

    info: ServerInfo
    model: str  # folder or hub id, as given to the executor
    watched_s: float  # since the watch began
    num_dropped: int  # step records lost to this watch; the figures of steps lack them
    window_s: float
    prompt_tokens_per_s: float  # including tokens recomputed after a preemption
    output_tokens_per_s: float
    interval_prompt_tokens_per_s: float  # over the newest interval alone, as the other two
    interval_output_tokens_per_s: float
    interval_ttft_s: Percentiles | None
    ttft_s: Percentiles | None  # of the requests that got their first token in the window; None: there are none
    tokens_per_step: float | None  # that a decoding sequence got; None: there were no drafts
    interval_tokens_per_step: float | None
    acceptance: float | None  # share of the drafts that were accepted; None: there were none
    interval_acceptance: float | None
    num_preemptions: int
    num_swapped_out: int  # sequences
    num_swapped_in: int  # sequences
    prefix_hit_rate: float | None  # share of the looked-up prompt tokens that were cached; None: none was looked up
    waiting_s: float | None  # time for which the queue has been non-empty; None: no request waits
    running_s: float | None  # longest time since a running sequence joined the batch; None: not known, or none runs
    swapped_s: float | None  # longest time since a sequence was swapped out; None: not known, or none is
    executors: list[ExecutorFigures]
    tenants: list[TenantFigures] = field(default_factory=list)

    @property
    def max_num_seqs(self) -> int | None:
        """Most sequences that an executor runs at once; None if the server does not report it."""
        value = self.info.options.get("max_num_seqs", "")
        return int(value) if value.isdigit() else None

    @property
    def kv_use(self) -> float:
        """Share of the device's KV blocks that sequences hold, 0 to 1."""
        load = self.info.load
        return load.num_used_device_blocks / load.num_device_blocks if load.num_device_blocks else 0.0


@dataclass(frozen=True, slots=True)
class Lost:
    """The server cannot be reached or does not answer."""

    error: CadenzaError
    lost_s: float  # since its last answer, or the first request


def percentiles(values: Sequence[float]) -> Percentiles:
    """Percentiles of one or more values, interpolated linearly."""
    if len(values) == 1:
        return Percentiles(values[0], values[0])
    marks = statistics.quantiles(values, n=100, method="inclusive")
    return Percentiles(marks[49], marks[98])


def json_line(observation: ServerFigures | Lost, *, target: str, time_s: float) -> str:
    """One line without its end; `time_s` is the time of day in seconds since 1970."""
    head = {"time_s": time_s, "target": target, "connected": isinstance(observation, ServerFigures)}
    rest = (
        _snapshot_fields(observation)
        if isinstance(observation, ServerFigures)
        else {"error": str(observation.error), "lost_s": observation.lost_s}
    )
    return json.dumps(head | rest)


def _snapshot_fields(snapshot: ServerFigures) -> dict[str, Any]:
    fields = asdict(snapshot)
    info = fields.pop("info")
    executors = [_executor_fields(each) for each in fields.pop("executors")]
    tenants = [each.pop("info") | each for each in fields.pop("tenants")]
    about = {name: info[name] for name in ("version", "uptime_s", "draining", "resident_bytes")}
    derived = {"kv_use": snapshot.kv_use, "max_num_seqs": snapshot.max_num_seqs}
    return {
        **about,
        **fields,
        **derived,
        "load": info["load"],
        "executors": executors,
        "tenants": tenants,
        "faults": info["faults"],
        "adapters": info["adapters"],
    }


def _executor_fields(fields: dict[str, Any]) -> dict[str, Any]:
    info = fields.pop("info")
    info["incarnation"] = f"{info['incarnation']:016x}"  # not every JSON parser supports 64-bit integers
    return {**info, **fields}
