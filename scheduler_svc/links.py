"""The TLS files of the scheduler's two links, to clients and to executors, from its options."""

from __future__ import annotations

from cadenza_common.wire.tls import TLS
from cadenza_common.wire.tls.connection import ChannelFiles
from cadenza_common.wire.tls.files import TlsError
from cadenza_common.wire.tls_server import ListenerFiles, listener_files
from cadenza_common.wire.transport import SCHEDULER_PORT
from scheduler_svc.config import SchedulerConfig


def front_files(config: SchedulerConfig) -> ListenerFiles | None:
    """The files of the listener for clients; None: plain text. Raises TlsError."""
    has_tokens = config.tenants is not None
    return listener_files(config, default_port=SCHEDULER_PORT, other_proof="--tenants", has_other_proof=has_tokens)


def executor_files(config: SchedulerConfig) -> ChannelFiles | None:
    """The files by which executors and this scheduler know each other; None: plain text. Raises TlsError."""
    given = {name: getattr(config, f"executor_{name}") for name in ("ca", "cert", "key", "server_name")}
    if not any(given.values()):
        return None
    if given["ca"] is None:
        raise TlsError("--executor-cert, --executor-key and --executor-server-name need --executor-ca")
    if (given["cert"] is None) != (given["key"] is None):
        raise TlsError("--executor-cert and --executor-key need each other")
    return ChannelFiles(TLS(**given), prefix="--executor-")
