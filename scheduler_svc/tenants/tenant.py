"""A tenant: whose request it is, and what it may do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tenant:
    """One table of the tenants file; see docs/tenants.md."""

    name: str = ""
    weight: float = 1.0
    """Its share where the order is fair, over 0."""
    max_requests: int | None = None
    """Maximum unfinished requests."""
    max_queued_tokens: int | None = None
    """Maximum prompt tokens of requests that have not begun to run."""
    tokens_per_minute: int | None = None
    """Prompt and output tokens a minute."""
    max_priority: int | None = None
    """The highest priority that its requests may have. Smaller numbers go first, so it is the smallest number."""
    shared_prefixes: str = ""
    """Tenants with the same name here share cached prefixes; empty: it shares with no other."""
    admin: bool = False
    """Whether it may call AdminService and sees everything."""


ONLY_TENANT = Tenant(admin=True)
"""The one tenant of a service without a tenants file."""
