"""The token of a client: where it comes from, and how calls carry it.

A token is sent as call metadata, `authorization: Bearer TOKEN`. It is never sent over a connection without TLS to
another machine, unless the program says that this is safe, and never shown.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cadenza.errors import OptionError
from cadenza_common.wire.limits import MAX_TOKEN_CHARS, MODEL_METADATA

TOKEN_VARIABLE = "CADENZA_TOKEN"
Metadata = tuple[tuple[str, str], ...]
_Stub = TypeVar("_Stub")


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a client shows to its server."""

    token: str | None = field(default=None, repr=False)
    insecure: bool = False
    """Whether the token may be sent to another machine without TLS."""
    model: str | None = None
    """The model that is meant, of a server with several."""


_of_command: ContextVar[Credentials | None] = ContextVar("credentials of the running command", default=None)


@contextlib.contextmanager
def command_credentials(token_file: str | None, *, insecure: bool, model: str | None = None) -> Iterator[None]:
    """Clients that are made in the body without a token or model of their own use that of the file, and this model;
    raises OptionError."""
    token = None if token_file is None else read_token(token_file)
    reset = _of_command.set(Credentials(token, insecure, model))
    try:
        yield
    finally:
        _of_command.reset(reset)


def chosen_token(token: str | None) -> str | None:
    """The token given here, else the command's, else that of the environment; raises OptionError for an invalid one."""
    if token is not None:
        return _checked(token, "token")
    of_command = _of_command.get()
    if of_command is not None and of_command.token is not None:
        return of_command.token
    found = os.environ.get(TOKEN_VARIABLE, "").strip()  # secrets of Kubernetes often end with a line end
    return _checked(found, TOKEN_VARIABLE) if found else None


def check_connection(host: str, token: str | None, *, has_tls: bool, insecure: bool) -> None:
    """Raise OptionError if the token would be readable on the way to this host."""
    of_command = _of_command.get()
    allowed = insecure or (of_command is not None and of_command.insecure)
    if token is not None and not (has_tls or allowed or is_loopback(host)):
        raise OptionError(
            f"the token is not sent to {host} without TLS, where others may read it: use TLS, or say that the network "
            "is safe (--insecure, insecure=True)"
        )


def read_token(path: str) -> str:
    """The token in a file, alone on its line; raises OptionError."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read(2 * MAX_TOKEN_CHARS)
    except OSError as error:
        raise OptionError(f"option token-file: {path}: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError:
        raise OptionError(f"option token-file: {path}: this is no text") from None
    return _checked(text.strip(), f"option token-file: {path}")


def call_metadata(token: str | None, model: str | None = None) -> Metadata:
    """What each call carries; model: of a server with several, by default the command's."""
    if model is None and (of_command := _of_command.get()) is not None:
        model = of_command.model
    own = () if model is None else ((MODEL_METADATA, model),)
    return own if token is None else (("authorization", f"Bearer {token}"), *own)


def checked_model(model: str | None) -> str | None:
    """The name of a model if it can be one; raises ValueError."""
    if model is not None and not (model and model.isascii() and model.isprintable()):
        raise ValueError(f"model must be a name of printable ASCII, not {model!r}")
    return model


def authorized(stub: _Stub, metadata: Metadata) -> _Stub:
    """The stub, whose calls carry this metadata before their own; some 0.3 us a call (docs/decisions/0029)."""
    if metadata:
        for name, method in list(vars(stub).items()):
            setattr(stub, name, _with_metadata(method, metadata))
    return stub


def is_loopback(host: str) -> bool:
    """Whether a host is this machine; a name other than localhost counts as another one."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _with_metadata(method: Callable[..., Any], own: Metadata) -> Callable[..., Any]:
    def call(*args: Any, metadata: Any = None, **options: Any) -> Any:
        return method(*args, metadata=own if metadata is None else (*own, *metadata), **options)

    return call


def _checked(token: object, where: str) -> str:
    """The token if it can be one; the error does not show it."""
    if (
        not isinstance(token, str)
        or not 0 < len(token) <= MAX_TOKEN_CHARS
        or not (token.isascii() and token.isprintable())
        or " " in token
    ):
        raise OptionError(f"{where}: must hold one token: printable ASCII without spaces, not shown here")
    return token
