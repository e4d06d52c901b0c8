"""The entries of --executor: addresses, DNS names, services of Kubernetes, and files of addresses."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from cadenza_common.wire.transport import EXECUTOR_PORT, format_address, parse_address

_DNS, _FILE, _KUBERNETES = "dns:///", "file:", "k8s://"
_LABEL = r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"
"""A name of Kubernetes, as RFC 1123 has labels."""
_MAX_CHARS = 300
"""More than a DNS name (253) and a port have."""
_THIS_MACHINE = {"localhost", "127.0.0.1", "::1", "0.0.0.0", "::"}


def executor_address(text: str) -> str:
    """The one form of an executor's address, which ExecutorInfo has; raises ValueError."""
    if not text.strip():
        raise ValueError("must be HOST:PORT of an executor")
    if len(text) > _MAX_CHARS:
        raise ValueError(f"has {len(text)} characters; at most {_MAX_CHARS} are allowed")
    if not text.strip().isprintable():
        raise ValueError(f"{text!r} is not HOST:PORT: it must hold no control characters")
    return format_address(*_host_and_port(text))


def is_same_listener(target: str, listen: str) -> bool:
    """Whether an executor's address is the one at which this process listens, by what the two texts say."""
    (host, port), (own_host, own_port) = _host_and_port(target), _host_and_port(listen)
    return port == own_port and (host == own_host or {host, own_host} <= _THIS_MACHINE)


def _host_and_port(text: str) -> tuple[str, int]:
    host, port = parse_address(text, default_port=EXECUTOR_PORT)
    if port == 0:
        raise ValueError(f"{text!r} is not HOST:PORT of an executor: the port must be 1 to 65535")
    return host, port


@dataclass(frozen=True, slots=True)
class ServiceName:
    """A service of Kubernetes: each endpoint of it that is ready is an executor."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{_KUBERNETES}{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class ExecutorEntries:
    """The entries of --executor by kind."""

    addresses: tuple[str, ...]
    names: tuple[tuple[str, int], ...]
    """(name, port): each address of the name is an executor."""
    files: tuple[str, ...]
    """Paths of files with an address on each line."""
    services: tuple[ServiceName, ...] = ()


def executor_entries(entries: Iterable[str]) -> ExecutorEntries:
    """Split the entries by kind; raises ValueError with the problem."""
    addresses: list[str] = []
    names: list[tuple[str, int]] = []
    files: list[str] = []
    services: list[ServiceName] = []
    for entry in entries:
        if entry.startswith(_DNS):
            names.append(_host_and_port(entry.removeprefix(_DNS)))
        elif entry.startswith(_KUBERNETES):
            services.append(_service_name(entry))
        elif entry.startswith(_FILE):
            files.append(entry.removeprefix(_FILE))
            if not files[-1]:
                raise ValueError(f"{entry!r} names no file: it must be file:PATH")
        else:
            addresses.append(executor_address(entry))
    return ExecutorEntries(tuple(addresses), tuple(names), tuple(files), tuple(services))


def _service_name(entry: str) -> ServiceName:
    found = re.fullmatch(rf"{_KUBERNETES}({_LABEL})/({_LABEL})", entry)
    if found is None:
        raise ValueError(f"{entry!r} names no service of Kubernetes: it must be k8s://NAMESPACE/SERVICE")
    return ServiceName(found[1], found[2])


def addresses_in(text: str) -> list[str]:
    """The addresses of a file: one a line; `#` begins a comment. Raises ValueError that names the line."""
    found: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        entry = line.partition("#")[0].strip()
        if entry:
            try:
                found.append(executor_address(entry))
            except ValueError as exc:
                raise ValueError(f"line {number}: {exc}") from None
    return found
