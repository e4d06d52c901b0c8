"""The outcome of each request and of each step, in columns: one array for each quantity.

All times are seconds since the run's start, on one monotonic clock; NaN: it did not happen. A request's clock starts
when it was *due* by the schedule, not when it was sent: a client or server that falls behind makes latencies longer
instead of hiding the delay (coordinated omission).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt

from cadenza_loadtest.requests import Floats, Ints


@dataclass(slots=True)
class RequestColumns:
    """One row per request, in the order of `index`; [n] each unless stated otherwise."""

    index: Ints
    due_s: Floats
    """When the request was due. For a later turn of a session: the end of the previous turn plus the think time."""
    sent_s: Floats
    """When the request was handed to the transport; sent_s - due_s is the client's own lag."""
    first_s: Floats
    """When the client received the first output token."""
    last_s: Floats
    """When the client received the last output token."""
    num_prompt_tokens: Ints
    num_cached_tokens: Ints
    """Prompt tokens from the prefix cache, as the server reports; -1: unknown."""
    num_output_tokens: Ints
    """Tokens received, over all samples."""
    num_samples: Ints
    num_preemptions: Ints
    """As the server reports; -1: unknown."""
    queue_s: Floats
    """From the server's own timestamps: arrival to first plan; NaN: unknown."""
    server_first_s: Floats
    """From the server's own timestamps: arrival to first token, in seconds (a duration); NaN: unknown."""
    server_total_s: Floats
    """From the server's own timestamps: arrival to end (a duration); NaN: unknown."""
    kind: npt.NDArray[np.str_]
    tenant: npt.NDArray[np.str_]
    session: Ints
    turn: Ints
    error: npt.NDArray[np.str_]
    """Error code of a failed request, such as "RESOURCE_EXHAUSTED", "HTTP_503", "TIMEOUT"; "" if it completed."""
    num_gaps: Ints
    """Number of this request's entries in gap_s, which holds the rows' gaps one after the other."""
    gap_s: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    """[sum of num_gaps] seconds between successive messages with tokens of one request: inter-token latencies. Empty if
    they were not kept; num_gaps is 0 then."""
    adapter: npt.NDArray[np.str_] = field(default_factory=lambda: np.zeros(0, np.str_))
    """Name of the LoRA adapter, "" for none, as for all requests where it is not given."""

    def __post_init__(self) -> None:
        if not len(self.adapter):
            self.adapter = np.full(len(self.index), "", np.str_)

    def __len__(self) -> int:
        return len(self.index)

    @property
    def ok(self) -> npt.NDArray[np.bool_]:
        """[n] whether each request completed."""
        good: npt.NDArray[np.bool_] = self.error == ""
        return good

    def select(self, rows: npt.NDArray[np.bool_]) -> RequestColumns:
        """The rows where `rows` [n] is true, with their gaps."""
        keep_gap = np.repeat(rows, self.num_gaps) if len(self.gap_s) else np.zeros(0, bool)
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        gaps = values.pop("gap_s")
        return RequestColumns(**{name: value[rows] for name, value in values.items()}, gap_s=gaps[keep_gap])


@dataclass(slots=True)
class StepColumns:
    """One row per step of the scheduler, from WatchSteps or the simulator; [n] each."""

    executor: Ints
    planned_s: Floats
    applied_s: Floats
    device_s: Floats
    """Time on the device (a duration)."""
    num_sequences: Ints
    num_tokens: Ints
    """Computed tokens of prompts and outputs."""
    num_sampled: Ints
    num_waiting: Ints
    num_running: Ints
    num_swapped: Ints
    num_used_blocks: Ints
    num_blocks: Ints
    num_stored_tokens: Ints
    num_preempted: Ints
    num_dropped: int = 0
    """Number of records that were lost in transit."""

    def __len__(self) -> int:
        return len(self.planned_s)
