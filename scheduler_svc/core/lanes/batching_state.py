"""What a batching policy remembers of one lane."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class BatchingState:
    """Counters of the batching policies; each uses its own."""

    num_held_back: int = 0
    """Continuous batching: steps since waiting groups were last admitted."""
    num_unfilled: int = 0
    """Static batching: groups of the running batch not admitted yet, as its prompts may need several steps."""
    closed_by_memory: bool = False
    """Static batching: the last batch was closed because memory was full."""
