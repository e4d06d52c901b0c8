"""Options of a command, made from the fields of the services' configurations."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_origin

import typer
from typer.core import TyperCommand

from cadenza.errors import OptionError
from cadenza_launcher.services.options import option_classes, read_places, service_options

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

Config = Annotated[
    str | None,
    typer.Option(help="TOML file with any of these options, such as block_size = 32.", metavar="FILE"),
]


class GroupedCommand(TyperCommand):
    """A command whose help groups options under headings: the command's own first, then those of each panel."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the sections; called by click."""
        parameters = self.get_params(ctx)
        grouped = any(_panel_of(parameter) for parameter in parameters)
        own = "Common options" if grouped else "Options"
        sections: dict[str, list[tuple[str, str]]] = {own: []}
        for parameter in parameters:
            record = parameter.get_help_record(ctx)
            if record is not None and parameter.param_type_name == "option":
                sections.setdefault(_panel_of(parameter) or own, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


def _panel_of(parameter: Any) -> str | None:
    return getattr(parameter, "rich_help_panel", None)


@dataclass(frozen=True, slots=True)
class FieldOption:
    """A field of a pydantic model as a command's option."""

    name: str
    field: FieldInfo
    panel: str | None
    """Heading of the option in --help; None: the command's own."""


def with_fields(command: Callable[..., None], options: Iterable[FieldOption]) -> Callable[..., None]:
    """Give `command` a keyword parameter for each option in place of its `**options`; parameters that it has are kept.

    Values are passed as text (flags as bool), None if not given: the models check them, so that every front end has the
    same errors. An option of several values may be given several times, and is passed with commas. Of two options with
    one name the first is used.
    """
    options = list(options)
    lists = {option.name for option in options if _is_list(option.field)}
    signature = inspect.signature(command, eval_str=True)
    parameters = {p.name: p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD}
    for option in options:
        parameters.setdefault(option.name, _parameter(option))

    def run(**values: Any) -> None:
        joined = {name: ",".join(values[name]) if values.get(name) else None for name in lists & values.keys()}
        command(**{**values, **joined})

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    run.__annotations__ = {name: p.annotation for name, p in parameters.items()}
    return run


@contextlib.contextmanager
def serving(target: str | None, model: str | None, config: str | None, options: dict[str, Any]) -> Iterator[str]:
    """Yields the server's address: `target`, or a server started here for `model` and stopped at the end.

    Raises LocalServiceError if a service started here does not start, or is given up after five deaths without
    progress.
    """
    from cadenza_common.wire.transport import SCHEDULER_PORT, parse_address

    given = {name: value for name, value in options.items() if value is not None}
    model = named_model(model, config)
    if model is None:
        if given or config is not None:
            name = "config" if config is not None else next(iter(given))
            raise OptionError(f"option {name} is for a service started here: give --model too")
        try:
            parse_address(target or "", default_port=SCHEDULER_PORT)
        except ValueError as error:
            raise OptionError(f"option target: {error}") from None
        yield target or f"127.0.0.1:{SCHEDULER_PORT}"
        return
    if target is not None:
        raise OptionError("give --target or --model, not both")
    from rich.console import Console

    from cadenza_common.wire.tls.connection import no_tls_variables
    from cadenza_launcher.local import LocalServices

    console = Console(stderr=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(no_tls_variables())  # the services started here listen on loopback
        status = console.status(f"starting both services on {model}")  # shown once the model is there
        try:
            # Events arrive on another thread while the answer streams: each is a line of its own.
            services = stack.enter_context(
                LocalServices(
                    model, config=config, on_event=console.print, on_start=lambda names: status.start(), **given
                )
            )
        finally:
            status.stop()
        with services.naming_failure():
            yield services.target


def named_model(model: str | None, config: str | None) -> str | None:
    """The given model, else the one in the given file; None: no server is started here."""
    if model is None and config is not None and (place := read_places({}, config, {}).get("model")) is not None:
        return str(place.value)
    return model


def service_fields(heading: str = "{}") -> Iterator[FieldOption]:
    """The services' options, group by group; none if the services are not installed.

    `heading` has a place for the group's name. If it is nothing else, the common options come first, without a heading.
    """
    try:
        services = service_options()
    except OptionError:
        return
    from cadenza_common.settings.help import COMMON, GROUPS, group_of

    configs = option_classes()
    fields = {}
    for name, owners in services.items():
        both = [configs[owner].model_fields[name] for owner in owners]
        # If both have the option, the scheduler's default is used, unless it has none and uses the executor's.
        fields[name] = next((field for field in reversed(both) if field.default is not None), both[0])
    common = COMMON if heading == "{}" else ()
    for name in common:
        yield FieldOption(name, fields.pop(name), None)
    for name, field in sorted(fields.items(), key=lambda item: GROUPS.index(group_of(item[1]))):
        yield FieldOption(name, field, heading.format(group_of(field)))


def _parameter(option: FieldOption) -> inspect.Parameter:
    from cadenza_common.settings.help import described, value_name
    from cadenza_common.settings.names import flag

    name, field = option.name, option.field
    shown = value_name(field.annotation)
    kind: Any = list[str] if _is_list(field) else str if shown else bool
    declaration = flag(name) if shown else f"{flag(name)}/{flag('no_' + name)}"
    made = typer.Option(
        declaration,
        help=described(field),
        metavar=shown or None,
        show_default=False,
        rich_help_panel=option.panel,
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, made]
    )


def _is_list(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is list
