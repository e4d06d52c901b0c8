"""The services' options as options of a command, made from the fields of their configurations."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from rich.console import Console

from cadenza.errors import OptionError
from cadenza.local_options import config_classes, service_options

_PANEL = "Options of the services"


def with_service_options(command: Callable[..., None], exclude: Collection[str] = ()) -> Callable[..., None]:
    """Give `command` a keyword parameter for each option of the services in place of its `**options`.

    Values arrive as text (flags as bool) and None where not given: the configurations check them, so that every front
    has the same errors. Without the services installed there are no such options.
    """
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    taken = {p.name for p in own} | set(exclude)
    parameters = own + [_parameter(name, field) for name, field in _fields() if name not in taken]

    def run(**values: Any) -> None:
        command(**values)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


@contextlib.contextmanager
def serving(target: str | None, model: str | None, options: dict[str, Any]) -> Iterator[str]:
    """The server to talk to: the one at `target`, or one started here for `model` and stopped at the end."""
    from cadenza.transport import SCHEDULER_PORT, parse_address

    given = {name: value for name, value in options.items() if value is not None}
    if model is None:
        if given:
            raise OptionError(f"option {next(iter(given))} is for a service started here: give --model too")
        try:
            parse_address(target or "", default_port=SCHEDULER_PORT)
        except ValueError as error:
            raise OptionError(f"option target: {error}") from None
        yield target or f"127.0.0.1:{SCHEDULER_PORT}"
        return
    if target is not None:
        raise OptionError("give --target or --model, not both")
    from cadenza.local import LocalServices

    console = Console(stderr=True)
    with contextlib.ExitStack() as stack:
        with console.status(f"starting both services on {model}"):
            # Events come from another thread while the answer streams: a line of their own.
            services = stack.enter_context(LocalServices(model, on_event=console.print, **given))
        yield services.target


def _fields() -> Iterator[tuple[str, Any]]:
    try:
        services = service_options()
    except OptionError:
        return
    configs = config_classes()
    for name, owners in services.items():
        fields = [configs[owner].model_fields[name] for owner in owners]
        # Where both have it, the scheduler's default counts, unless it has none of its own and takes the executor's.
        yield name, next((field for field in reversed(fields) if field.default is not None), fields[0])


def _parameter(name: str, field: Any) -> inspect.Parameter:
    kind = field.annotation
    default = "" if field.default is None else f"  [default: {field.default}]".lower()
    flag = f"--{name.replace('_', '-')}"
    help_text = f"{field.description}{default}"
    annotation: Any
    if kind is bool:
        off = f"--no-{name.replace('_', '-')}"
        annotation = Annotated[
            bool | None, typer.Option(f"{flag}/{off}", help=help_text, show_default=False, rich_help_panel=_PANEL)
        ]
    else:
        metavar = "|".join(get_args(kind)) if get_origin(kind) is Literal else _metavar(kind)
        annotation = Annotated[
            str | None,
            typer.Option(flag, help=help_text, metavar=metavar, show_default=False, rich_help_panel=_PANEL),
        ]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _metavar(kind: Any) -> str:
    kinds = [each for each in (get_args(kind) or (kind,)) if each is not type(None)]
    return {int: "INTEGER", float: "NUMBER"}.get(kinds[0], "TEXT")
