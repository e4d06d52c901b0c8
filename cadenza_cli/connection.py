"""Options of every command that connects to a server: how it proves who it is, and whom it trusts.

They override the variables that the client library reads, for the time of the command.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from cadenza.credentials import TOKEN_VARIABLE, chosen_token, command_credentials
from cadenza.errors import OptionError, PermissionDeniedError, UnauthenticatedError

_PANEL = "Connection"
_HELP = {
    "tls_ca": ("FILE", "Use TLS, and trust the CA certificates of this PEM file."),
    "tls_cert": ("FILE", "Certificate that this client shows, as PEM."),
    "tls_key": ("FILE", "Key of --tls-cert, as PEM."),
    "tls_server_name": ("NAME", "Name that the server's certificate must have.  [default: the host of --target]"),
}
_WHERE = f"--token-file FILE or {TOKEN_VARIABLE}"
TokenFile = Annotated[
    str | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help=f"File with this user's token, for a server with tenants.  [default: {TOKEN_VARIABLE}]",
    ),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Send the token to another machine without TLS: the network is safe.")
]
ModelName = Annotated[
    str | None,
    typer.Option("--model-name", metavar="NAME", help="Name of the model, where the server of --target has several."),
]


def with_credentials(command: Callable[..., None]) -> Callable[..., None]:
    """The command with these options: clients that it makes use the token.

    An error that concerns the token says which one is needed.
    """
    signature = inspect.signature(command, eval_str=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    own = [
        inspect.Parameter("token_file", keyword, default=None, annotation=TokenFile),
        inspect.Parameter("insecure", keyword, default=False, annotation=Insecure),
        inspect.Parameter("model_name", keyword, default=None, annotation=ModelName),
    ]

    @functools.wraps(command)
    def run(
        *args: Any,
        token_file: str | None = None,
        insecure: bool = False,
        model_name: str | None = None,
        **values: Any,
    ) -> None:
        with command_credentials(token_file, insecure=insecure, model=model_name):
            try:
                command(*args, **values)
            except UnauthenticatedError as error:
                known = chosen_token(None) is not None
                error.message += f" (that of {_WHERE} is unknown or revoked)" if known else f" (give one with {_WHERE})"
                raise
            except PermissionDeniedError as error:
                error.message += f" (give an admin's with {_WHERE})"
                raise

    parameters = list(signature.parameters.values())
    at = next((i for i, each in enumerate(parameters) if each.kind is inspect.Parameter.VAR_KEYWORD), len(parameters))
    parameters[at:at] = own
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def with_connection(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command` the options; it connects to a server of --target."""
    signature = inspect.signature(command, eval_str=True)
    parameters = list(signature.parameters.values())
    rest = [each for each in parameters if each.kind is inspect.Parameter.VAR_KEYWORD]
    parameters = [*(each for each in parameters if each not in rest), *(_parameter(name) for name in _HELP), *rest]

    def run(**values: Any) -> None:
        given = {name: values.pop(name, None) for name in _HELP}
        _check(given, values.get("model"))
        with _variables(given):
            command(**values)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _parameter(name: str) -> inspect.Parameter:
    from cadenza_common.settings.names import flag, variable

    metavar, text = _HELP[name]
    option = typer.Option(
        flag(name), metavar=metavar, help=f"{text} Also {variable(name)}.", show_default=False, rich_help_panel=_PANEL
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, option]
    )


def _check(given: Mapping[str, str | None], model: object) -> None:
    from cadenza_common.settings.names import flag

    first = next((name for name, value in given.items() if value is not None), None)
    if first is not None and model is not None:
        raise OptionError(f"option {flag(first)[2:]} is for a running server: give --target, not --model")
    for name, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
        if given[name] is not None and given[other] is None:
            raise OptionError(f"option {flag(name)[2:]} needs {flag(other)}")


@contextmanager
def _variables(given: Mapping[str, str | None]) -> Iterator[None]:
    """In the body, the environment has the given values, as the client library reads them."""
    from cadenza_common.settings.names import variable

    before = {variable(name): os.environ.get(variable(name)) for name in given}
    os.environ.update({variable(name): value for name, value in given.items() if value is not None})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
