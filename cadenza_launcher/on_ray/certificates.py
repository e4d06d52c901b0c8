"""Certificates of one program's own scheduler and executors, where others could reach the executors.

An authority is made for them alone. Its key is gone before the first one starts; the executors' key travels through
Ray, whose users can do on its machines what they like anyway.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from cadenza.errors import OptionError
from cadenza_common.wire.tls import TLS
from cadenza_launcher.certs import CertsError, make_certs

_DAYS = 3650.0
"""As long as their authority: they end with the program that has made them."""
_EXECUTOR = "cadenza-executor"


@dataclass(frozen=True, slots=True)
class LinkCertificates:
    """The certificates of the links between a scheduler and its executors."""

    files: dict[str, str]
    """Texts of the executors' files by name."""
    tls: TLS
    """The scheduler's side."""

    executor_arguments = (
        "--tls-cert={files}/executor.pem",
        "--tls-key={files}/executor-key.pem",
        "--tls-client-ca={files}/ca.pem",
    )
    """`{files}` is the folder of the files."""

    @property
    def scheduler_arguments(self) -> list[str]:
        """The scheduler's options."""
        tls = self.tls
        return [
            f"--executor-ca={tls.ca}",
            f"--executor-cert={tls.cert}",
            f"--executor-key={tls.key}",
            f"--executor-server-name={tls.server_name}",
        ]


def make_link_certificates(folder: Path) -> LinkCertificates:
    """Make them in a folder that others cannot read; raises OptionError."""
    try:
        make_certs(folder, days=_DAYS)
    except CertsError as error:
        raise OptionError(f"option distributed_executor_backend: ray: {error}") from None
    names = ("ca.pem", "executor.pem", "executor-key.pem")
    files = {name: (folder / "executor" / name).read_text() for name in names}
    for gone in ("ca", "executor", "client"):
        shutil.rmtree(folder / gone)
    own = folder / "scheduler"
    tls = TLS(own / "ca.pem", own / "scheduler.pem", own / "scheduler-key.pem", _EXECUTOR)
    return LinkCertificates(files, tls)
