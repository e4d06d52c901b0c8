"""KV groups of the simulated executor, from its options."""

from __future__ import annotations

import re

from executor_svc.errors import StartError
from executor_svc.plan.limits import GroupShape

_MAX_GROUPS = 8
_MAX_PAGES = 32
_MAX_WINDOW = 2**24
_GROUP = re.compile(r"(full|[1-9][0-9]{0,7}):([1-9][0-9]?)")


def read_groups(text: str) -> tuple[GroupShape, ...]:
    """Return the groups that an option names; raises StartError."""
    groups = []
    for part in text.split(","):
        found = _GROUP.fullmatch(part.strip())
        window = 0 if found is None or found[1] == "full" else int(found[1])
        if found is None or window > _MAX_WINDOW or int(found[2]) > _MAX_PAGES:
            raise StartError(
                f"--simulate-kv-groups: {part.strip()!r} is not WINDOW:PAGES, where WINDOW is full or 1 to "
                f"{_MAX_WINDOW} and PAGES is 1 to {_MAX_PAGES}"
            )
        groups.append(GroupShape(window, int(found[2])))
    if len(groups) > _MAX_GROUPS or not all(group.window for group in groups[1:]):
        raise StartError(f"--simulate-kv-groups: at most {_MAX_GROUPS} groups, of which only the first may be full")
    return tuple(groups)


def most_pages(groups: tuple[GroupShape, ...], num_blocks: int, block_size: int, max_chunk: int) -> int:
    """Return the most pages that a sequence of so many blocks holds, to compute chunks of so many tokens."""
    total = 0
    for group in groups:
        in_window = -(-(group.window + max_chunk) // block_size) + 2 if group.window else num_blocks
        total += group.pages_per_block * min(num_blocks, in_window)
    return total
