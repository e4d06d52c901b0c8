"""Mutual TLS between the processes of a benchmark, with certificates made for it."""

from __future__ import annotations

from pathlib import Path

from cadenza_launcher.certs import make_certs


class BenchmarkCertificates:
    """Options of services, and the environment of their clients."""

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

    def client_environment(self) -> dict[str, str]:
        """The variables by which a client connects with a certificate of its own."""
        own = self._folder / "client"
        files = {"CA": own / "ca.pem", "CERT": own / "client.pem", "KEY": own / "client-key.pem"}
        return {f"CADENZA_TLS_{name}": str(path) for name, path in files.items()}
