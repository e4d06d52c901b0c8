"""The batching policies that the first experiments compare, as options of the scheduler."""

from __future__ import annotations

from typing import Any

STATIC = "static"
DYNAMIC = "dynamic"
RESERVED = "continuous, memory reserved"
PAGED = "continuous, paged"


def policies(num_reserved: int) -> dict[str, dict[str, Any]]:
    """Options by policy; memory for `num_reserved` sequences can be reserved up to their greatest length.

    static and dynamic use batches of that size; continuous without paging is limited to as many sequences at once;
    paged runs as many as there are blocks for.
    """
    return {
        STATIC: {"batching": "static", "batch_size": num_reserved},
        DYNAMIC: {"batching": "dynamic", "batch_size": num_reserved},
        RESERVED: {"batching": "continuous", "max_num_seqs": num_reserved},
        PAGED: {"batching": "continuous"},
    }
