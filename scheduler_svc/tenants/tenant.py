"""A tenant: whose request it is, what it may do, and the tokens by which it is known.

The service knows tokens by their SHA-256 only.

A token holds 256 random bits, so its plain hash can be neither reversed nor guessed, and needs no salt and no slow hash
(docs/decisions/0029).
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from cadenza_common.metrics.listener_counts import RefusalReason
from cadenza_common.wire.limits import MAX_TOKEN_CHARS
from scheduler_svc.tenants.errors import InvalidTokenError

HASH_PREFIX = "sha256:"
METADATA_KEY = "authorization"
_SCHEME = "bearer "
_NO_DIGEST = bytes(hashlib.sha256().digest_size)


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


def digest_of(token: str) -> bytes:
    """Return the SHA-256 of a token."""
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()


def token_in(metadata: Iterable[tuple[str, str | bytes]] | None) -> str | None:
    """Return the bearer token in a call's metadata; None if there is none."""
    for key, value in metadata or ():
        if key == METADATA_KEY and isinstance(value, str) and value[: len(_SCHEME)].lower() == _SCHEME:
            return value[len(_SCHEME) :].strip()
    return None


def known_digest(token: str | None, digests: Mapping[bytes, bytes], revoked: Collection[bytes] = ()) -> bytes:
    """Return the token's digest if it is one of these, which are listed under themselves; raises UnauthenticatedError.

    revoked: digests of tokens that were valid, which the error distinguishes.

    The lookup depends on the token only through its hash, which a caller cannot steer; the comparison of what it finds
    takes the same time wherever two digests differ.
    """
    if not token:
        raise InvalidTokenError(RefusalReason.NO_TOKEN)
    if len(token) > MAX_TOKEN_CHARS:
        raise InvalidTokenError(RefusalReason.UNKNOWN_TOKEN)
    digest = digest_of(token)
    if not hmac.compare_digest(digests.get(digest, _NO_DIGEST), digest):
        raise InvalidTokenError(RefusalReason.REVOKED_TOKEN if digest in revoked else RefusalReason.UNKNOWN_TOKEN)
    return digest
