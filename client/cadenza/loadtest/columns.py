"""What became of each request, and of each step, in columns: one array for each quantity.

All times are seconds since the run's start, on one monotonic clock; NaN where it did not happen. A request's clock
starts when it was *due* by the schedule, not when it was sent: a client or a server that falls behind makes latencies
longer and hides nothing (coordinated omission).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt

from cadenza.loadtest.requests import Floats, Ints


@dataclass(slots=True)
class RequestColumns:
    """One row per request, in the order of `index`; [n] each unless said otherwise."""

    index: Ints
    due_s: Floats
    """When it was to be sent. Of a session's later turn: the end of the turn before plus the think time."""
    sent_s: Floats
    """When it was handed to the transport; sent_s - due_s is the client's own lag."""
    first_s: Floats
    """When its first output token was here."""
    last_s: Floats
    """When its last output token was here."""
    num_prompt_tokens: Ints
    num_cached_tokens: Ints
    """Prompt tokens from the prefix cache, as the server tells; -1 unknown."""
    num_output_tokens: Ints
    """Over all samples, as they arrived."""
    num_samples: Ints
    num_preemptions: Ints
    """As the server tells; -1 unknown."""
    queue_s: Floats
    """From the server's own stamps: arrival to first plan; NaN unknown."""
    server_first_s: Floats
    """From the server's own stamps: arrival to first token, in seconds (a duration); NaN unknown."""
    server_total_s: Floats
    """From the server's own stamps: arrival to end (a duration); NaN unknown."""
    kind: npt.NDArray[np.str_]
    tenant: npt.NDArray[np.str_]
    session: Ints
    turn: Ints
    error: npt.NDArray[np.str_]
    """Code of what ended it early, such as "RESOURCE_EXHAUSTED", "HTTP_503", "TIMEOUT"; "" where all went well."""
    num_gaps: Ints
    """Of gap_s, how many are this request's; the rows' gaps follow each other."""
    gap_s: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    """[sum of num_gaps] seconds between two messages with tokens of one request: inter-token latencies. Empty where
    they were not kept; num_gaps is 0 then."""

    def __len__(self) -> int:
        return len(self.index)

    @property
    def ok(self) -> npt.NDArray[np.bool_]:
        """[n] which ended well."""
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
    """Computed, prompts' and outputs'."""
    num_sampled: Ints
    num_waiting: Ints
    num_running: Ints
    num_swapped: Ints
    num_used_blocks: Ints
    num_blocks: Ints
    num_stored_tokens: Ints
    num_preempted: Ints
    num_dropped: int = 0
    """Records that were lost on the way."""

    def __len__(self) -> int:
        return len(self.planned_s)
