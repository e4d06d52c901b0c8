"""Certificates for tests, made by the code of `cadenza certs`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cadenza_common.wire.tls import TLS
from cadenza_launcher.certs import make_certs


@dataclass(frozen=True)
class Certificates:
    """A development CA and its certificates."""

    folder: Path

    def renew(self, **options: Any) -> None:
        """Make the certificates anew; options are those of `make_certs`."""
        make_certs(self.folder, **options)

    def of(self, party: str) -> TLS:
        """How a party connects."""
        own = self.folder / party
        return TLS(own / "ca.pem", own / f"{party}.pem", own / f"{party}-key.pem")

    def listener(self, party: str, *, proof: bool = True) -> dict[str, str]:
        """The options of a service's listener; with `proof` its clients must show a certificate."""
        own = self.folder / party
        ca = {"tls_client_ca": str(own / "ca.pem")} if proof else {}
        return {"tls_cert": str(own / f"{party}.pem"), "tls_key": str(own / f"{party}-key.pem"), **ca}

    def executor_link(self, party: str = "scheduler") -> dict[str, str]:
        """The scheduler's options for its connections to executors."""
        own = self.folder / party
        return {
            "executor_ca": str(own / "ca.pem"),
            "executor_cert": str(own / f"{party}.pem"),
            "executor_key": str(own / f"{party}-key.pem"),
        }


def certificates(folder: Path, **options: Any) -> Certificates:
    """Certificates in a new folder."""
    made = Certificates(folder)
    made.renew(**options)
    return made
