"""What can go wrong with a request or with the core itself."""

from __future__ import annotations


class SchedulerError(Exception):
    """Base of all errors that the core raises on purpose."""


class RequestRejectedError(SchedulerError):
    """The request is wrong or can never fit; `field` is the path of the field at fault in GenerateRequest."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class PreconditionError(SchedulerError):
    """The service cannot do this as it was started; `field` is the path of the field that asks for it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class QueueFullError(SchedulerError):
    """The waiting queue is full; try again after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestExistsError(SchedulerError):
    """A request of this id is known already."""


class DrainingError(SchedulerError):
    """The service takes no new requests."""


class LimitsError(SchedulerError):
    """The options and the executor's limits cannot work together; the message names them."""


class InvariantError(SchedulerError):
    """The core's own books do not balance: a bug, never the caller's fault."""
