"""TLS in the client library: where it is taken from, and what its errors say."""

from __future__ import annotations

from typing import Literal, TypeVar

import grpc

from cadenza.errors import CadenzaError, OptionError, UnavailableError
from cadenza_common.wire.tls import TLS
from cadenza_common.wire.tls.connection import ChannelFiles
from cadenza_common.wire.tls.files import TlsError
from cadenza_common.wire.tls_reason import find_tls_reason
from cadenza_common.wire.transport import SCHEDULER_PORT

_Error = TypeVar("_Error", bound=CadenzaError)
_FROM_GRPC = ("failed to connect", "Socket closed", "Connection reset", "empty address list", "handshake")


def client_tls(tls: TLS | Literal[False] | None) -> TLS | None:
    """The TLS of a client that was given `tls`; raises OptionError for variables that contradict each other."""
    if tls is not None:
        return tls or None
    try:
        return TLS.from_environment()
    except ValueError as error:
        raise OptionError(f"CADENZA_TLS_CERT and CADENZA_TLS_KEY: {error}") from None


def client_files(tls: TLS | None) -> ChannelFiles | None:
    """The files that a TLS names; raises OptionError for those that cannot be used."""
    try:
        return None if tls is None else ChannelFiles(tls)
    except TlsError as error:
        raise OptionError(f"option {str(error).removeprefix('--')}") from None


async def explained_unavailable(error: _Error, target: str, tls: TLS | None) -> _Error:
    """The error of a failed call; it names TLS if that is why there is no connection: gRPC often does not say."""
    if (
        isinstance(error, UnavailableError)
        and error.code in (grpc.StatusCode.UNAVAILABLE, None)
        and any(text in error.message for text in _FROM_GRPC)
    ):
        reason = await find_tls_reason(target, tls, default_port=SCHEDULER_PORT)
        if reason:
            error.message = f"no TLS connection to {target}: {reason}"
            error.args = (error.message,)
    return error
