"""All groups of measurements in the order in which they run: the last ones are skipped first when time runs out."""

from __future__ import annotations

from benchmarks.gpu.common.cases import Group
from benchmarks.gpu.kernels import (
    attention,
    attention_tiles,
    beside_flashinfer,
    ceilings,
    elementwise,
    few_bits,
    linears,
    lora,
    steps,
)

WARM = attention_tiles.WARM
ORDER: tuple[Group, ...] = (
    ceilings.GROUP,
    attention.DECODE,
    attention.PREFILL,
    *steps.GROUPS.values(),
    elementwise.GROUP,
    linears.GROUP,
    few_bits.GROUP,
    lora.GROUP,
    attention.BLOCKS,
    attention_tiles.TUNE_PREFILL,
    attention_tiles.TUNE_DECODE,
    beside_flashinfer.GROUP,
)
GROUPS: dict[str, Group] = {group.name: group for group in (*ORDER, WARM)}
