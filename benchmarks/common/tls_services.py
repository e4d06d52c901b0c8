"""Mutual TLS between the processes of a benchmark, with certificates made for it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from cadenza.certs import make_certs


class BenchmarkCertificates:
    """Options of services, and the environment of this process as a client."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        make_certs(folder)

    def listener(self, party: str) -> tuple[str, ...]:
        """The options of a service's listener."""
        own = self._folder / party
        return (
            *("--tls-cert", str(own / f"{party}.pem"), "--tls-key", str(own / f"{party}-key.pem")),
            *("--tls-client-ca", str(own / "ca.pem")),
        )

    def executor_link(self) -> tuple[str, ...]:
        """The scheduler's options for its connection to the executor."""
        own = self._folder / "scheduler"
        return (
            *("--executor-ca", str(own / "ca.pem"), "--executor-cert", str(own / "scheduler.pem")),
            *("--executor-key", str(own / "scheduler-key.pem")),
        )

    @contextlib.contextmanager
    def as_client(self) -> Iterator[None]:
        """In the body, this process connects with a client's certificate; no service may be started there."""
        own = self._folder / "client"
        files = {"CA": own / "ca.pem", "CERT": own / "client.pem", "KEY": own / "client-key.pem"}
        variables = {f"CADENZA_TLS_{name}": str(path) for name, path in files.items()}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name in variables:
                del os.environ[name]
