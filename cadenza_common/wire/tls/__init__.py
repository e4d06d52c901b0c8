"""TLS of connections; `TLS` is public, the rest are parts."""

from __future__ import annotations

from cadenza_common.wire.tls.connection import TLS

__all__ = ["TLS"]
