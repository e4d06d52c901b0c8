"""Errors of the core."""

from __future__ import annotations


class SchedulerError(Exception):
    """Base class of the core's own errors."""


class RequestRejectedError(SchedulerError):
    """The request is invalid or can never fit; `field` is the path of the invalid field in GenerateRequest."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class UnknownAdapterError(SchedulerError):
    """There is no adapter of this name; `field` is the field that has it."""

    def __init__(self, name: str, field: str = "adapter") -> None:
        super().__init__(f"there is no adapter {name!r}")
        self.field = field


class PreconditionError(SchedulerError):
    """The service's configuration does not support this; `field` is the path of the field that needs it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class ModelChangedError(SchedulerError):
    """The executor came back with another model or other numerics, under which the request cannot go on."""


class WaitingQueueFullError(SchedulerError):
    """The waiting queue is full; try again after `retry_after_s` seconds."""

    limit = "max_queued_requests"
    """The option that limits it, for the metrics."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestExistsError(SchedulerError):
    """A request with this id exists already."""


class UnknownRequestError(SchedulerError):
    """There is no request with this id."""


class DataLossError(SchedulerError):
    """Output of a request that was accepted is lost."""


class DrainingError(SchedulerError):
    """The service accepts no new requests."""


class LimitsError(SchedulerError):
    """The options contradict the executor's limits; the message names them."""


class InvariantError(SchedulerError):
    """The core's own state is inconsistent: a bug, never the caller's fault."""
