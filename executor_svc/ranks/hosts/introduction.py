"""What ranks that something else has started tell rank 0 of themselves: their version and their options."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from executor_svc.config import ExecutorConfig

_OWN = {
    "config", "listen", "insecure", "log_level", "log_format", "otlp_traces_endpoint", "metrics_port", "metrics_host",
    "metrics_insecure", "metrics_token_file", "tls_cert", "tls_key", "tls_client_ca", "tls_scheduler_name",
    "max_connections", "max_connections_per_peer", "drain_timeout_s", "step_timeout_s", "rank_port", "rank_secret_file",
    "rank_connect_timeout_s", "save_quantized",
}  # fmt: skip
"""Options that may differ between ranks: most are for rank 0 alone, or name a file of this machine."""


def introduction(config: ExecutorConfig, num_threads: int) -> dict[str, Any]:
    """Return what a rank says about itself; num_threads: how many threads it will use."""
    options = config.model_dump(mode="json", exclude=_OWN)
    options["num_threads"] = num_threads
    return {"version": importlib.metadata.version("cadenza"), "options": options}


def difference(first: dict[str, Any], other: dict[str, Any]) -> str | None:
    """Return what of another rank does not fit rank 0; None: nothing."""
    if first["version"] != other["version"]:
        return f"it is Cadenza {other['version']}, and rank 0 is {first['version']}"
    ours, theirs = first["options"], other["options"]
    for name in sorted(ours.keys() | theirs.keys()):
        here, there = ours.get(name), theirs.get(name)
        if here != there:
            flag = f"--{name.replace('_', '-')}"
            return f"{flag} is {there} there and {here} at rank 0: all ranks need the same options"
    return None
