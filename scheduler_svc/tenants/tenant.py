"""A tenant: whose request it is, and what it may do."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase


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
    adapters: tuple[str, ...] = ("*",)
    """Names of the LoRA adapters that its requests may name, as patterns of fnmatch."""
    may_load_adapters: bool = False
    """Whether it may load, unload and list those adapters."""
    may_name_tenants: bool = False
    """Whether its sessions may carry requests of other tenants, by the hashes of their tokens."""
    admin: bool = False
    """Whether it may call AdminService and sees everything."""

    def may_use_adapter(self, name: str) -> bool:
        """Whether one of the patterns matches an adapter's name."""
        return any(fnmatchcase(name, pattern) for pattern in self.adapters)

    def may_load_adapter(self, name: str) -> bool:
        """Whether it may load an adapter under this name, unload and list it."""
        return self.admin or (self.may_load_adapters and self.may_use_adapter(name))


ONLY_TENANT = Tenant(admin=True)
"""The one tenant of a service without a tenants file."""
