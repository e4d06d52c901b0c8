"""All groups of measurements, in the order in which they are run: what comes last is the first to be skipped."""

from __future__ import annotations

from benchmarks.gpu import attention_cases, ceilings, elementwise_cases, flashinfer_cases, linear_cases, step_cases
from benchmarks.gpu.cases import Group

WARM = attention_cases.WARM
ORDER: tuple[Group, ...] = (
    ceilings.GROUP,
    attention_cases.DECODE,
    attention_cases.PREFILL,
    step_cases.STEPS_8B,
    step_cases.STEPS_06B,
    elementwise_cases.GROUP,
    linear_cases.GROUP,
    attention_cases.BLOCKS,
    attention_cases.TUNE_PREFILL,
    attention_cases.TUNE_DECODE,
    flashinfer_cases.GROUP,
)
GROUPS: dict[str, Group] = {group.name: group for group in (*ORDER, WARM)}
