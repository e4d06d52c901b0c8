"""A tiny phrase grammar: `{a|b|}` is a choice (nestable, an empty branch means "left out").

The demo model only answers unseen wordings when it has met hundreds of wordings per topic, so wordings are written
as patterns and expanded, never listed one by one.
"""

from __future__ import annotations

import random
import re

_SPACES = re.compile(r" {2,}")


def _split_choice(pattern: str, start: int) -> tuple[list[str], int]:
    """Return the branches of the choice that opens at `start` and the index after its closing brace."""
    depth, branch_start = 0, start + 1
    branches: list[str] = []
    for index in range(start, len(pattern)):
        char = pattern[index]
        if char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
            if depth == 0:
                branches.append(pattern[branch_start:index])
                return branches, index + 1
        elif char == "|" and depth == 1:
            branches.append(pattern[branch_start:index])
            branch_start = index + 1
    raise ValueError(f"unbalanced braces in pattern {pattern!r}")


def _sample(pattern: str, rng: random.Random) -> str:
    pieces: list[str] = []
    position = 0
    while (opening := pattern.find("{", position)) >= 0:
        pieces.append(pattern[position:opening])
        branches, position = _split_choice(pattern, opening)
        pieces.append(_sample(rng.choice(branches), rng))
    pieces.append(pattern[position:])
    return "".join(pieces)


def sample(pattern: str, rng: random.Random) -> str:
    """Expand `pattern` once at random; runs of spaces left by empty branches collapse to one."""
    return _SPACES.sub(" ", _sample(pattern, rng)).strip()


def count_expansions(pattern: str) -> int:
    """Return how many ways `pattern` expands (different ways may give the same text)."""
    total, position = 1, 0
    while (opening := pattern.find("{", position)) >= 0:
        branches, position = _split_choice(pattern, opening)
        total *= sum(count_expansions(branch) for branch in branches)
    return total
