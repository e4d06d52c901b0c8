"""Which option belongs to which service: a field's name in the services' configurations is the option's name."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cadenza.errors import OptionError

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_settings import BaseSettings

EXECUTOR = "executor"
SCHEDULER = "scheduler"
# Cadenza sets these itself when it starts both services.
_OWN = {"model": "it is the model", "listen": "use host and port", "executor": "it is started here"}


@dataclass(frozen=True, slots=True)
class ServiceArguments:
    """Checked command lines of the two services, without --listen and --executor."""

    executor: list[str]
    scheduler: list[str]


def config_classes() -> dict[str, type[BaseSettings]]:
    """The configuration class of each service; raises OptionError if the services are not installed."""
    try:
        from executor_svc.config import ExecutorConfig
        from scheduler_svc.config import SchedulerConfig
    except ImportError as error:
        raise OptionError(
            f"the services are not installed here ({error}): pip install 'cadenza[scheduler,executor]'"
        ) from None
    return {EXECUTOR: ExecutorConfig, SCHEDULER: SchedulerConfig}


def service_options() -> dict[str, list[str]]:
    """Every option that may be given, and the services that take it."""
    options: dict[str, list[str]] = {}
    for service, config in config_classes().items():
        for name in config.model_fields:
            if name not in _OWN:
                options.setdefault(name, []).append(service)
    return options


def check_model(model: str | os.PathLike[str]) -> str:
    """The model's folder or hub id as the services shall see it; raises OptionError for a folder that is not there."""
    model = os.fspath(model)
    if not model.strip():
        raise OptionError("option model: it is empty: give a folder or a hub id")
    path = Path(model).expanduser()
    if path.is_dir():
        return str(path.resolve())
    looks_like_path = model.startswith(("/", ".", "~")) or model.count("/") > 1 or path.exists()
    if looks_like_path:
        raise OptionError(f"option model: {model!r} is not a folder")
    return model


def route_options(model: str, options: Mapping[str, Any]) -> ServiceArguments:
    """Give each option to the services that have it and check all values.

    An option of None counts as not given. Raises OptionError that names the option.
    """
    routes = service_options()
    chosen: dict[str, dict[str, Any]] = {EXECUTOR: {}, SCHEDULER: {}}
    for name, value in options.items():
        if name not in routes:
            raise OptionError(_unknown(name, list(routes)))
        if value is not None:
            for service in routes[name]:
                chosen[service][name] = value
    chosen[EXECUTOR]["model"] = model
    from pydantic import ValidationError

    for service, config in config_classes().items():
        try:
            checked = config(**chosen[service])
        except ValidationError as error:
            raise OptionError(_explain(error)) from None
        chosen[service] = {name: getattr(checked, name) for name in chosen[service]}  # "yes" is True by now
    return ServiceArguments(to_arguments(chosen[EXECUTOR]), to_arguments(chosen[SCHEDULER]))


def to_arguments(options: Mapping[str, Any]) -> list[str]:
    """Command-line arguments: kebab case, `--name=value`, `--name` or `--no-name` for booleans."""
    arguments: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, (list, tuple)):
            arguments += [f"--{flag}={item}" for item in value]
        else:
            arguments.append(f"--{flag}={value}")
    return arguments


def _unknown(name: str, known: list[str]) -> str:
    if name in _OWN:
        return f"option {name} cannot be given here: {_OWN[name]}"
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    hint = f"; did you mean {' or '.join(close)}?" if close else f"; options are {', '.join(sorted(known))}"
    return f"unknown option {name}{hint}"


def _explain(error: ValidationError) -> str:
    lines = []
    for problem in error.errors(include_url=False):
        name = ".".join(str(part) for part in problem["loc"]) or "?"
        message = problem["msg"].removeprefix("Value error, ")
        lines.append(f"option {name}: {message[:1].lower()}{message[1:]}")
    return "; ".join(lines)
