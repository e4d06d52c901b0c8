"""Options of every command that talks to a server: the token."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from cadenza.credentials import TOKEN_VARIABLE, chosen_token, command_credentials
from cadenza.errors import PermissionDeniedError, UnauthenticatedError

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


def with_credentials(command: Callable[..., None]) -> Callable[..., None]:
    """The command with these options: clients that it makes use the token.

    An error that concerns the token says which one is needed.
    """
    signature = inspect.signature(command, eval_str=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    own = [
        inspect.Parameter("token_file", keyword, default=None, annotation=TokenFile),
        inspect.Parameter("insecure", keyword, default=False, annotation=Insecure),
    ]

    @functools.wraps(command)
    def run(*args: Any, token_file: str | None = None, insecure: bool = False, **values: Any) -> None:
        with command_credentials(token_file, insecure=insecure):
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
