"""The turn in which a tenant's grammars are compiled."""

from __future__ import annotations

from hashlib import blake2b


def turn_of(tenant: str) -> int:
    """Return a tenant's number, in whose turn executors compile its grammars; 0: there are no tenants."""
    return int.from_bytes(blake2b(tenant.encode(), digest_size=8).digest(), "little") if tenant else 0
