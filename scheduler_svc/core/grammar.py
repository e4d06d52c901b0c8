"""A constraint on an output, as the core passes it on."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b


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


def turn_of(tenant: str) -> int:
    """Return a tenant's number, in whose turn executors compile its grammars; 0: there are no tenants."""
    return int.from_bytes(blake2b(tenant.encode(), digest_size=8).digest(), "little") if tenant else 0
