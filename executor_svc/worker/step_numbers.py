"""What an executor measures: plain numbers, updated once for each step on the device thread."""

from __future__ import annotations

from cadenza_common.metrics.histogram import Histogram
from cadenza_common.plan.result import StepResult, StepStatus

STEP_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5, 10.0, 60.0)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PHASES = ("queue", "moves", "forward", "sample", "total")
"""Of a step: its plan waits, blocks are moved, the model runs, tokens are sampled; `total` is all but the wait."""


class StepNumbers:
    """Counts and times since the start."""

    def __init__(self) -> None:
        self.statuses = dict.fromkeys(StepStatus, 0)
        """Number of answered plans by status."""
        self.num_sampled = 0
        """Tokens sampled."""
        self.num_slot_errors = 0
        """Slots that failed alone, as for logits that are not finite."""
        self.num_sequences = Histogram(TOKENS)
        self.num_tokens = Histogram(TOKENS)
        self.phases = {phase: Histogram(STEP_S) for phase in PHASES}

    def on_result(self, result: StepResult) -> None:
        """A plan is about to be answered."""
        self.statuses[result.status] += 1
        if result.status is not StepStatus.OK:
            return
        timings, phases = result.timings, self.phases
        phases["queue"].observe(timings.queue_ns / 1e9)
        phases["forward"].observe(timings.device_ns / 1e9)
        phases["sample"].observe(timings.sample_ns / 1e9)
        phases["total"].observe(timings.total_ns / 1e9)
        if timings.moves_ns:
            phases["moves"].observe(timings.moves_ns / 1e9)
        self.num_sampled += len(result.token_ids)
        self.num_slot_errors += len(result.error_slots)
        self.num_sequences.observe(result.num_sequences)
        self.num_tokens.observe(result.num_computed)
