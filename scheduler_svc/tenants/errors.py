"""Errors of tenants and tokens. A message never holds a token, and one text covers all wrong tokens."""

from __future__ import annotations

from cadenza_common.metrics.listener_counts import RefusalReason
from scheduler_svc.core.errors import WaitingQueueFullError


class TenantsFileError(ValueError):
    """The tenants file cannot be read or has invalid contents; the message names the file, the table and the key."""


class InvalidTokenError(Exception):
    """The call has no valid token. Its message is the same for every reason; `refusal` is for the operator."""

    def __init__(self, refusal: RefusalReason) -> None:
        self.refusal = refusal
        super().__init__("this service needs a valid token, in the call's metadata: authorization: Bearer TOKEN")


class AdminNeededError(Exception):
    """The call's token is that of a tenant without admin."""

    refusal = RefusalReason.NO_ADMIN

    def __init__(self) -> None:
        super().__init__("this call needs the token of a tenant with admin = true")


class LoaderNeededError(AdminNeededError):
    """The call's token is that of a tenant with neither admin nor may_load_adapters."""

    def __init__(self) -> None:
        Exception.__init__(self, "this call needs the token of a tenant with admin or may_load_adapters = true")


class NamingForbiddenError(Exception):
    """A session names another tenant, and its own may not."""

    def __init__(self) -> None:
        super().__init__("naming the tenant of a request needs the token of a tenant with may_name_tenants = true")


class AdapterForbiddenError(Exception):
    """The tenant may not use adapters of this name, whether or not there is one; `field` is the field that has it."""

    def __init__(self, name: str, field: str) -> None:
        super().__init__(f"this tenant may not use the adapter {name!r}")
        self.field = field


class TenantLimitError(WaitingQueueFullError):
    """A limit of the tenant is reached; try again after `retry_after_s` seconds."""

    def __init__(self, limit: str, message: str, retry_after_s: float) -> None:
        """limit: its name in the tenants file."""
        super().__init__(f"{message} ({limit})", retry_after_s)
        self.limit = limit
