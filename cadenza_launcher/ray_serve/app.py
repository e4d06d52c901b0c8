"""An application of Ray Serve: `import_path: cadenza_launcher.ray_serve.app:application` in a Serve configuration.

Its one deployment, `Server`, runs what `cadenza up` runs; executors are where Ray places them (docs/ray.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ray import serve

from cadenza.errors import OptionError
from cadenza_common.wire.transport import SCHEDULER_PORT
from cadenza_launcher.ray_serve.server import Server
from cadenza_launcher.services.checks import check_listener, check_scaling
from cadenza_launcher.services.options import PLACES, read_places, route_options

_SETTLED = {
    **dict.fromkeys(("http", "http_tls_cert", "http_tls_key"), "Ray Serve's proxy listens for HTTP (http_options)"),
    "ray_address": "executors are on the cluster of the application",
}
_HOST = "127.0.0.1"
_UNHEALTHY_AFTER_S = 600.0
_MAX_ONGOING_REQUESTS = 1_000_000
"""Serve is to hold no request back: the scheduler has the queue, and its limit (max_queued_requests)."""

_PLACE = {"num_cpus": 0, "resources": {"node:__internal_head__": 0.6}}
"""On the head, and one at a time, as it takes more than half: the next replica waits until the last one has left its
ports and its journal."""

deployment = serve.deployment(
    name="Server",
    num_replicas=1,
    max_ongoing_requests=_MAX_ONGOING_REQUESTS,
    ray_actor_options=_PLACE,
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
    options = {"distributed_executor_backend": "ray", **args}
    unhealthy_after_s = _seconds(options.pop("unhealthy_after_s", _UNHEALTHY_AFTER_S))
    own = {name: options.pop(name, None) for name in PLACES}
    places = {name: setting.value for name, setting in read_places(own, environment={}).items()}
    config = options.pop("config", None)
    for name, reason in _SETTLED.items():
        if name in options:
            raise OptionError(f"option {name} cannot be given here: {reason}")
    if "model" not in places:
        raise OptionError("option model: it is missing in the application's args")
    arguments = route_options(places["model"], options, environment={})
    check_scaling(arguments.values, arguments.settings)
    places = {"host": _HOST, "port": SCHEDULER_PORT, **places}
    if config is None:
        check_listener(places["host"], arguments.settings)
    return deployment.bind({**options, **places, "config": config}, unhealthy_after_s)


def _seconds(value: Any) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise OptionError(f"option unhealthy_after_s: must be a number of seconds from 0 on, not {value!r}")
    return seconds
