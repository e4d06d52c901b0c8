"""TLS of connections; `TLS` is public, the rest are parts."""

from __future__ import annotations

from cadenza.tls.connection import TLS

__all__ = ["TLS"]
