"""All groups of measurements in the order in which they run: the last ones are skipped first when time runs out."""

from __future__ import annotations

from benchmarks.gpu.common.cases import Group
from benchmarks.gpu.kernels import (
    attention,
    attention_segments,
    attention_tiles,
    beside_flashinfer,
    ceilings,
    elementwise,
    few_bits,
    linears,
    lora,
    steps,
)

WARM: dict[str, Group] = {
    **dict.fromkeys(("decode", "prefill", "blocks", "tune-decode", "tune-prefill"), attention_tiles.WARM),
    attention_segments.GROUP.name: attention_segments.WARM,
}
"""Groups whose kernels several processes compile in advance, each with the group that does it."""
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
    attention_segments.GROUP,
    beside_flashinfer.GROUP,
)
GROUPS: dict[str, Group] = {group.name: group for group in (*ORDER, *WARM.values())}
