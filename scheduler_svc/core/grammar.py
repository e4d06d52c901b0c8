"""A constraint on an output, as the core passes it on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on an output. The core does not read it."""

    spec: bytes
    """Its wire form, a GrammarSpec."""
    engine: bytes
    """What it was checked with: executors with the same `ExecutorSpec.grammar_engine` can follow it."""

    @property
    def num_values(self) -> int:
        """What it adds to a plan, in numbers."""
        return len(self.spec) // 4
