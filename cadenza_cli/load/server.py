"""The server of a load test: from the command line, or from an earlier result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cadenza_cli.service_args import named_model
from cadenza_launcher.services.checks import check_model
from cadenza_launcher.services.options import route_options

if TYPE_CHECKING:
    from cadenza_loadtest.results.results import Reached

_NOT_AGAIN = ("record",)
"""Options of the services that a rerun does not repeat, because it would overwrite the first run's output."""


@dataclass(frozen=True, slots=True)
class ServerPlace:
    """A running server (`target`), or one to be started for `model`; with neither, the default address."""

    target: str | None
    model: str | None
    config: str | None
    options: Mapping[str, Any]
    """Options of the services, as given."""

    @property
    def is_named(self) -> bool:
        """Whether a Cadenza server is named."""
        return self.target is not None or named_model(self.model, self.config) is not None


def rerun_place(place: ServerPlace, before: Reached | None) -> ServerPlace:
    """The server of the earlier result, overridden by `place`: another target, model or options.

    The environment sets only what neither of them does. Raises OptionError.
    """
    if before is None or place.target is not None:
        return place
    model = named_model(place.model, place.config) or before.model
    if model is None:
        return ServerPlace(before.target, None, place.config, place.options)
    given = route_options(check_model(model), place.options, config=place.config, environment={}).settings
    return ServerPlace(
        None, model, None, {**before.options, **{name: setting.value for name, setting in given.items()}}
    )


def reached_at(place: ServerPlace, address: str) -> Reached:
    """How the server at `address` was reached, for the result file. Raises OptionError."""
    from cadenza_loadtest.results.results import Reached

    model = named_model(place.model, place.config)
    if model is None:
        return Reached(target=address)
    settings = route_options(check_model(model), place.options, config=place.config).settings
    return Reached(model=model, options={name: settings[name].value for name in settings if name not in _NOT_AGAIN})
