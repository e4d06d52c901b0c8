"""Names of the model: which ones requests may give, and what they mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cadenza.errors import FailedPreconditionError, PermissionDeniedError, UnsupportedError
from cadenza.info import ModelInfo
from gateway_svc.fields.sampling import utf8
from gateway_svc.http.errors import ApiError
from gateway_svc.scheduler.caller import SchedulerCaller

_MAX_NAME = 128


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a request's model is."""

    name: str
    """As answers have it."""
    adapter: str
    """A LoRA adapter; empty: none. Whether there is one, the scheduler knows."""


class Names:
    """The served model's names."""

    def __init__(self, served: Sequence[str]) -> None:
        """served: those of --served-model-name."""
        self._served = tuple(served)

    def of_model(self, info: ModelInfo) -> tuple[str, ...]:
        """Its names; answers have the first."""
        if self._served:
            return self._served
        last = info.model.rstrip("/").rpartition("/")[2]
        return (info.model, last) if last != info.model else (info.model,)

    def choose(self, given: str | None, info: ModelInfo) -> Chosen:
        """What a request's `model` means; any other name is that of an adapter. Raises ApiError."""
        names = self.of_model(info)
        if given is None or given == "":
            return Chosen(names[0], "")
        if given in names:
            return Chosen(given, "")
        if len(given) > _MAX_NAME or not given.isprintable():
            raise unknown_model(utf8(given, "model"), names[0])
        return Chosen(given, utf8(given, "model"))


async def check_model(names: Names, given: str | None, caller: SchedulerCaller) -> ModelInfo:
    """The served model; raises ApiError for a name that is neither its own nor that of an adapter.

    For a call that generates nothing, where the scheduler sees no adapter's name. Tenants that may not list adapters
    may name any: the tokens are the model's.
    """
    info = await caller.model()
    adapter = names.choose(given, info).adapter
    if adapter:
        try:
            known = await caller.adapters()
        except PermissionDeniedError:
            return info
        except (UnsupportedError, FailedPreconditionError):
            known = []
        if all(each.name != adapter for each in known):
            raise unknown_model(adapter, names.of_model(info)[0])
    return info


def unknown_model(name: str, served: str) -> ApiError:
    """The error of a name that is neither the model's nor an adapter's."""
    message = f"there is no model {name[:_MAX_NAME]!a}: the served one is {served[:_MAX_NAME]!a}"
    return ApiError(404, message, param="model", code="model_not_found")
