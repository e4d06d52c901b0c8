"""`python -m executor_svc --distributed-executor-backend ray`: an executor without `cadenza up`, on Ray's machines.

This program places it, passes its log on, and ends when it ends; whoever started this program starts it again.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from cadenza.credentials import is_loopback
from cadenza.errors import OptionError
from cadenza_common.settings.names import to_arguments
from cadenza_common.wire.transport import EXECUTOR_PORT, format_address, parse_address
from cadenza_launcher.on_ray.cluster import RayCluster
from cadenza_launcher.on_ray.launch import RayLaunch
from cadenza_launcher.on_ray.places import Places
from cadenza_launcher.on_ray.replica import ReplicaLife
from cadenza_launcher.on_ray.shares import placement_of, rank_share

EXIT_OPTIONS = 2
_NAME = "executor"
_OWN = ("distributed_executor_backend", "ray_address", "ray_placement", "config", "listen")
_LOOK_S = 0.1
_STOP_S = 10.0
_ANYWHERE = ("0.0.0.0", "::")


def run(values: Mapping[str, Any], report: Callable[[str], None]) -> int:
    """Run an executor with these options until it ends, or a signal stops it; returns its exit code.

    values: those that were set, by name; `report` prints an error for the user, in one line.
    """
    try:
        cluster = RayCluster(values.get("ray_address"))
    except OptionError as error:
        report(str(error))
        return EXIT_OPTIONS
    try:
        return _run(cluster, values, report)
    except OptionError as error:
        report(str(error))
        return EXIT_OPTIONS
    finally:
        cluster.close()


def _run(cluster: RayCluster, values: Mapping[str, Any], report: Callable[[str], None]) -> int:
    share = rank_share(values, cluster.machines(), 1)
    placement = placement_of(values, share)
    places = Places(cluster, placement, 1)
    listen = values.get("listen", f"127.0.0.1:{EXECUTOR_PORT}")
    own = to_arguments({name: value for name, value in values.items() if name not in _OWN})
    launch = RayLaunch(["-m", "executor_svc"], [*own, *share.arguments], placement.num_actors, listen=listen)
    stopped = threading.Event()

    def stop(_number: int, _frame: FrameType | None) -> None:
        stopped.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    life = places.take(_NAME).start(launch.orders(_NAME), _print, lambda: None)
    is_ready = False
    while life.exit_code() is None and not stopped.wait(_LOOK_S):
        if life.is_ready and not is_ready:
            is_ready = True
            print(f"ready {_reached(life, listen, cluster.host)}", flush=True)
    if stopped.is_set():
        life.stop(_STOP_S)
        return 0
    report(life.exit_reason())
    return life.exit_code() or 1


def _reached(life: ReplicaLife, listen: str, own_host: str) -> str:
    """Return where the executor is reached; raises OptionError where nobody but its own machine can."""
    host, port = parse_address(life.address, default_port=EXECUTOR_PORT)
    placed = life.host
    if is_loopback(host) and not (is_loopback(placed) or placed == own_host):
        life.stop(_STOP_S)
        raise OptionError(
            f"option listen: {listen}: Ray has placed the executor on {placed}, where others cannot reach it: give "
            "--listen 0.0.0.0:PORT with --tls-cert, --tls-key and --tls-client-ca, or with --insecure"
        )
    return format_address(placed if host in _ANYWHERE else host, port)


def _print(_service: str, line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
