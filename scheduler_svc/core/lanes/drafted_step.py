"""What a result says of drafts, for the control of their number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class ScopeDrafts:
    """What one result says of the drafts of the sequences of one scope. Columns have one entry per position."""

    num_drafting: int
    """Sequences that were allowed drafts."""
    accepted_at: list[int]
    """How many of them accepted their i-th draft."""
    drafted_at: list[int]
    """How many had an i-th draft."""


@dataclass(slots=True)
class DraftedStep:
    """What one result says of drafts."""

    num_decodes: int
    """Sequences that decoded in this step, drafting or not."""
    num_drafting: int
    """How many of these were allowed drafts."""
    max_drafts: int
    """The plan's number of drafts per sequence; 0: none."""
    num_drafts: int
    """Drafts computed in all: a source may find fewer than the plan allows, or none."""
    num_accepted: int
    """Drafts accepted in all."""
    num_other_tokens: int
    """Tokens of prompts and the like in the same step: such a step says nothing of what decodes cost."""
    step_ns: int
    """Time of the step: forward pass, drafting, verification and sampling."""
    by_scope: Mapping[int, ScopeDrafts]
    """The same by the scope of the sequences that drafted."""
