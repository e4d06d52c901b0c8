"""The gateway that `cadenza up` and `LLM` start: where it listens, and how it reaches the scheduler."""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Mapping

from cadenza.credentials import is_loopback
from cadenza.errors import OptionError
from cadenza.local_options import GATEWAY, Setting
from cadenza.local_ports import reserve_port
from cadenza.tls import TLS
from cadenza.transport import SCHEDULER_PORT, format_address, parse_address


def http_place(host: str, http: str | None, settings: Mapping[str, Setting]) -> tuple[str, int] | None:
    """Host and port of the option; None: there is to be no gateway.

    host: the scheduler's, which a port alone is taken on. Raises OptionError, also for an address that others can reach
    in plain text.
    """
    if http is None:
        return None
    try:
        own_host, port = (host, _port(http)) if http.isdigit() else parse_address(http, default_port=0)
    except ValueError as error:
        raise OptionError(f"option http: {error}") from None
    allowed = "http_tls_cert" in settings or ("insecure" in settings and settings["insecure"].value)
    if not (allowed or is_loopback(own_host)):
        raise OptionError(
            f"option http: {own_host}: other machines could read what is sent: give --http-tls-cert and "
            "--http-tls-key, or --insecure to serve in plain text"
        )
    return own_host, port


def gateway_address(place: tuple[str, int] | None, kept: contextlib.ExitStack) -> dict[str, str]:
    """Where it listens, by its name; nothing without a gateway.

    A free port is chosen here, so that a restarted gateway has it too.
    """
    if place is None:
        return {}
    host, port = place
    if port == 0:
        with contextlib.suppress(OSError):  # such as an IPv6 address: the gateway chooses the port itself
            return {GATEWAY: reserve_port(host, kept)}
    return {GATEWAY: format_address(host, port)}


def gateway_arguments(scheduler: str, http: str) -> list[str]:
    """Where its scheduler is, and where it listens. A scheduler on all addresses is reached on loopback."""
    host, port = parse_address(scheduler, default_port=SCHEDULER_PORT)
    with contextlib.suppress(ValueError):  # a name
        address = ipaddress.ip_address(host)
        if address.is_unspecified:
            host = "127.0.0.1" if address.version == 4 else "::1"
    return [f"--target={format_address(host, port)}", f"--http={http}"]


def gateway_environment(tls: TLS | None) -> dict[str, str]:
    """How it connects to the scheduler, as clients are told."""
    if tls is None:
        return {}
    names = {"CADENZA_TLS_CA": tls.ca, "CADENZA_TLS_CERT": tls.cert, "CADENZA_TLS_KEY": tls.key}
    names["CADENZA_TLS_SERVER_NAME"] = tls.server_name
    return {name: str(value) for name, value in names.items() if value is not None}


def _port(text: str) -> int:
    if len(text) > 5 or int(text) > 65535:
        raise ValueError(f"the port must be 0 to 65535, not {text:.20}")
    return int(text)
