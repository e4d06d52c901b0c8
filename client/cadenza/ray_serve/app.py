"""An application of Ray Serve: `import_path: cadenza.ray_serve.app:application` in a Serve configuration.

Its one deployment, `Server`, runs what `cadenza up` runs; executors are where Ray places them (docs/ray.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ray import serve

from cadenza.errors import OptionError
from cadenza.local_checks import check_listener, check_scaling
from cadenza.local_options import route_options
from cadenza.ray_serve.server import Server
from cadenza.transport import SCHEDULER_PORT

_SETTLED = {
    **dict.fromkeys(("http", "http_tls_cert", "http_tls_key"), "Ray Serve's proxy listens for HTTP (http_options)"),
    "ray_address": "executors are on the cluster of the application",
}
_UNHEALTHY_AFTER_S = 600.0
_MAX_ONGOING_REQUESTS = 1_000_000
"""Serve is to hold no request back: the scheduler has the queue, and its limit (max_queued_requests)."""

deployment = serve.deployment(
    name="Server",
    num_replicas=1,
    max_ongoing_requests=_MAX_ONGOING_REQUESTS,
    ray_actor_options={"num_cpus": 0},
    graceful_shutdown_timeout_s=60.0,
)(Server)
"""One replica: one scheduler knows all requests, and the number of executors follows its load (max_executors)."""


def application(args: Mapping[str, Any]) -> serve.Application:
    """Return the application; raises OptionError, whose text is in the application's status.

    args: `model`, and options of `cadenza up` by their names, such as `executors`, `tensor_parallel_size`, and `host`
    and `port`, where the scheduler listens for gRPC clients; those that are not given come from the environment of the
    replica, such as CADENZA_MAX_NUM_SEQS. `unhealthy_after_s`: seconds without service, 600 by default, after which
    Serve starts another replica.
    """
    options = {"host": "127.0.0.1", "port": SCHEDULER_PORT, "distributed_executor_backend": "ray", **args}
    unhealthy_after_s = options.pop("unhealthy_after_s", _UNHEALTHY_AFTER_S)
    if not isinstance(unhealthy_after_s, (int, float)) or not 0 <= unhealthy_after_s < math.inf:
        raise OptionError(f"option unhealthy_after_s: must be a number of seconds from 0 on, not {unhealthy_after_s!r}")
    _check(**options)
    return deployment.bind(options, float(unhealthy_after_s))


def _check(model: str = "", host: str = "", port: int = 0, config: str | None = None, **options: Any) -> None:
    """Raise OptionError for what is wrong wherever the replica will be: it finds out the rest."""
    if not model:
        raise OptionError("option model: it is missing in the application's args")
    for name, reason in _SETTLED.items():
        if name in options:
            raise OptionError(f"option {name} cannot be given here: {reason}")
    arguments = route_options(model, options, environment={})
    check_scaling(arguments.values, arguments.settings)
    if config is None:
        check_listener(host, arguments.settings)
