"""What the pages of a lane's device pool hold, a letter each, as the core has it."""

from __future__ import annotations

from typing import cast

from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.memory.paged_pool import PagedPool


def page_letters(lane: Lane) -> str:
    """F: KV of all positions; W: of a window; S: a state, or a copy that is being made; small: nobody holds it, and a
    request may find it (s: a snapshot); a dot: unused."""
    pool = cast("PagedPool", lane.blocks.pool)
    roles = ["."] * pool.num_pages
    for block_id in {*pool.cached, *(each for each, count in enumerate(pool.num_holders) if count)}:
        for page in pool.full_pages_of(block_id):
            roles[page] = "F" if pool.num_holders[block_id] else "f"
    letters = "W" * (len(pool.windows) - bool(lane.spec.pages_per_state)) + "S"
    for letter, blocks, refs in zip(letters, pool.windows, pool.window_refs, strict=False):
        for block_id, pages in blocks.items():
            for page in pages:
                roles[page] = letter if block_id in refs else letter.lower()
    for pages in pool.states:
        for page in pages:
            roles[page] = "S"
    return "".join(roles)
