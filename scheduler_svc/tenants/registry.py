"""The tenants of a service, and who a call is from.

The tenants file is read again when it changes: its metadata is looked at each second, in a thread. A broken new file
changes nothing and is logged once.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Iterator

from cadenza_common.metrics.listener_counts import RefusalReason
from scheduler_svc.plan_loop.clock import Clock
from scheduler_svc.tenants.errors import (
    AdminNeededError,
    InvalidTokenError,
    LoaderNeededError,
    NamingForbiddenError,
    TenantsFileError,
)
from scheduler_svc.tenants.file import Tenants, parse_tenants
from scheduler_svc.tenants.tenant import ONLY_TENANT, Tenant, known_digest, token_in

_LOG = logging.getLogger(__name__)
_LOOK_S = 1.0
_Signature = tuple[int, ...]
Metadata = Iterable[tuple[str, str | bytes]] | None


class Registry:
    """The tenants of the file; without a file the one tenant that needs no token."""

    def __init__(self, path: str | None = None) -> None:
        """Read the file; raises TenantsFileError."""
        self._path = path
        self._tenants = Tenants({"": ONLY_TENANT})
        self._digests: dict[bytes, bytes] = {}
        self._revoked: set[bytes] = set()
        """Digests that were in the file since the start, and are not any more."""
        self._signature: _Signature | None = None
        self._problem = ""
        self._listeners: list[Callable[[], None]] = []
        self.number = 0
        """Grows each time other tenants or tokens take effect."""
        if path is not None:
            self._signature, content = _read(path)
            self._set(parse_tenants(content, path))

    def __iter__(self) -> Iterator[Tenant]:
        """The tenants, by name."""
        return iter([tenant for _, tenant in sorted(self._tenants.by_name.items())])

    @property
    def is_open(self) -> bool:
        """Whether there is no file, so that calls need no token."""
        return self._path is None

    @property
    def weights(self) -> dict[str, float]:
        """The weights of the tenants of the file; empty without one."""
        return {} if self.is_open else self._tenants.weights

    def has(self, name: str) -> bool:
        """Whether there is a tenant of this name."""
        return name in self._tenants.by_name

    def find(self, name: str) -> Tenant | None:
        """The tenant of this name."""
        return self._tenants.by_name.get(name)

    def add_listener(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever the file has been read again."""
        self._listeners.append(callback)

    # --- calls -------------------------------------------------------------------------------------------------------

    def caller(self, metadata: Metadata) -> Caller:
        """Who a call with this metadata is from; raises UnauthenticatedError."""
        if self.is_open:
            return Caller(self, b"", ONLY_TENANT)
        digest = known_digest(token_in(metadata), self._digests, self._revoked)
        return Caller(self, digest, self.tenant_of(digest))

    def tenant_of(self, digest: bytes) -> Tenant:
        """The tenant of a token's digest; raises UnauthenticatedError if the token is not valid any more."""
        if self.is_open:
            return ONLY_TENANT
        name = self._tenants.by_digest.get(digest)
        if name is None:
            raise InvalidTokenError(
                RefusalReason.REVOKED_TOKEN if digest in self._revoked else RefusalReason.UNKNOWN_TOKEN
            )
        return self._tenants.by_name[name]

    # --- the file ----------------------------------------------------------------------------------------------------

    async def follow(self, clock: Clock) -> None:
        """Read the file again whenever it changes, until cancelled."""
        while self._path is not None:
            await clock.sleep(_LOOK_S)
            self._apply(await asyncio.to_thread(self._read_changed, self._path))

    def reload(self) -> None:
        """Read the file again now if it has changed."""
        if self._path is not None:
            self._apply(self._read_changed(self._path))

    def _read_changed(self, path: str) -> tuple[_Signature | None, Tenants | TenantsFileError] | None:
        """The contents of a file that has changed, or what is wrong with it; None if it has not. Blocks."""
        try:
            if _signature(os.stat(path)) == self._signature:
                return None
            signature, content = _read(path)
        except OSError as exc:
            return None, TenantsFileError(f"{path}: {(exc.strerror or str(exc)).lower()}")
        except TenantsFileError as exc:
            return None, exc
        try:
            return signature, parse_tenants(content, path)
        except TenantsFileError as exc:
            return signature, exc

    def _apply(self, found: tuple[_Signature | None, Tenants | TenantsFileError] | None) -> None:
        if found is None:
            return
        self._signature, content = found
        if isinstance(content, TenantsFileError):
            if str(content) != self._problem:
                self._problem = str(content)
                _LOG.error("--tenants: %s; the tenants stay as they were", content)
            return
        self._problem = ""
        self._set(content)
        _LOG.info("--tenants: read %s again: %d tenants", self._path, len(content.by_name))
        for callback in self._listeners:
            callback()

    def _set(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._revoked = (self._revoked | self._digests.keys()) - tenants.by_digest.keys()
        self._digests = {digest: digest for digest in tenants.by_digest}
        self.number += 1


class Caller:
    """Who a call is from: follows changes of the file, so that a revoked token is refused within a stream too."""

    __slots__ = ("_digest", "_number", "_registry", "_tenant")

    def __init__(self, registry: Registry, digest: bytes, tenant: Tenant) -> None:
        self._registry = registry
        self._digest = digest
        self._tenant = tenant
        self._number = registry.number

    @property
    def name(self) -> str:
        """The tenant's name when the call began, whether or not its token is still valid."""
        return self._tenant.name

    def tenant(self) -> Tenant:
        """The tenant as of now; raises UnauthenticatedError if the token has been revoked."""
        registry = self._registry
        if self._number != registry.number:
            tenant = registry.tenant_of(self._digest)
            if tenant.name != self._tenant.name:
                # The token has moved to another tenant: this stream's requests are not that one's.
                raise InvalidTokenError(RefusalReason.REVOKED_TOKEN)
            self._tenant, self._number = tenant, registry.number
        return self._tenant

    def named(self, digest: bytes) -> Tenant:
        """The tenant, as of now, of a request that this caller makes for the token with this digest; empty: its own.

        Raises NamingForbiddenError unless the caller may name others, and UnauthenticatedError for either's token.
        """
        own = self.tenant()
        if not digest or digest == self._digest or self._registry.is_open:
            return own
        if not own.may_name_tenants:
            raise NamingForbiddenError
        return self._registry.tenant_of(digest)

    def check_admin(self) -> None:
        """Raise AdminNeededError unless the tenant is an admin, UnauthenticatedError if the token was revoked."""
        if not self.tenant().admin:
            raise AdminNeededError

    def check_loader(self) -> None:
        """Raise LoaderNeededError unless the tenant may load adapters, UnauthenticatedError for a revoked token."""
        tenant = self.tenant()
        if not (tenant.admin or tenant.may_load_adapters):
            raise LoaderNeededError


def _read(path: str) -> tuple[_Signature, bytes]:
    """The file's signature from before it was read, and its content; raises TenantsFileError."""
    try:
        with open(path, "rb") as file:
            signature = _signature(os.fstat(file.fileno()))
            return signature, file.read()
    except OSError as exc:
        raise TenantsFileError(f"{path}: {(exc.strerror or str(exc)).lower()}") from None


def _signature(status: os.stat_result) -> _Signature:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
