"""The gateway that `cadenza up` and `LLM` start: where it listens, and how it reaches the scheduler."""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Mapping

from cadenza.credentials import is_loopback
from cadenza.errors import OptionError
from cadenza_common.settings.names import to_arguments
from cadenza_common.wire.tls import TLS
from cadenza_common.wire.transport import SCHEDULER_PORT, format_address, parse_address
from cadenza_launcher.services.checks import check_address
from cadenza_launcher.services.options import Setting
from cadenza_launcher.services.ports import reserve_port


def gateway_places(
    host: str, port: int, listeners: Mapping[str, str], settings: Mapping[str, Setting]
) -> dict[str, tuple[str, int]]:
    """Host and port of each listener, by option; none: there is to be no gateway.

    host, port: the scheduler's; a port alone is taken on its host. Raises OptionError, also for an address that others
    can reach in plain text, and for one that is taken.
    """
    places: dict[str, tuple[str, int]] = {}
    owners = {(host, port): "port"}
    for option, given in listeners.items():
        try:
            place = (host, _port(given)) if given.isdigit() else parse_address(given, default_port=0)
        except ValueError as error:
            raise OptionError(f"option {option}: {error}") from None
        allowed = "http_tls_cert" in settings or ("insecure" in settings and settings["insecure"].value)
        if not (allowed or is_loopback(place[0])):
            raise OptionError(
                f"option {option}: {place[0]}: other machines could read what is sent: give --http-tls-cert and "
                "--http-tls-key, or --insecure to serve in plain text"
            )
        if place[1] and place in owners:
            raise OptionError(f"option {option}: option {owners[place]} has {format_address(*place)} too")
        check_address(*place, option)
        owners[place], places[option] = option, place
    return places


def gateway_listeners(places: Mapping[str, tuple[str, int]], kept: contextlib.ExitStack) -> dict[str, str]:
    """Where it listens, by option. A free port is chosen here, so that a restarted gateway has it too."""
    addresses = {}
    for option, (host, port) in places.items():
        addresses[option] = format_address(host, port)
        if port == 0:
            with contextlib.suppress(OSError):  # such as an IPv6 address: the gateway chooses the port itself
                addresses[option] = reserve_port(host, kept)
    return addresses


def gateway_arguments(scheduler: str, listeners: Mapping[str, str]) -> list[str]:
    """Where its scheduler is, and where it listens. A scheduler on all addresses is reached on loopback."""
    host, port = parse_address(scheduler, default_port=SCHEDULER_PORT)
    with contextlib.suppress(ValueError):  # a name
        address = ipaddress.ip_address(host)
        if address.is_unspecified:
            host = "127.0.0.1" if address.version == 4 else "::1"
    return to_arguments({"target": format_address(host, port), **listeners})


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
