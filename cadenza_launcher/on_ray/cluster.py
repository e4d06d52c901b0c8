"""This program's connection to a Ray cluster: the machines that it has, and actors in placement groups."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cadenza.credentials import is_loopback
from cadenza.errors import OptionError
from cadenza_common.wire.transport import parse_address

_RAY_PORT = 6379
_CONNECT_S = 10.0
_TRUST = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
"""What a Ray that is started here is told: report nothing to anybody, and leave CUDA_VISIBLE_DEVICES alone."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A node of the cluster."""

    host: str
    num_cpus: float
    num_gpus: float


class RayCluster:
    """Places actors. One for each process at a time, as Ray has it."""

    def __init__(self, address: str | None) -> None:
        """Connect; raises OptionError that names the option."""
        try:
            import ray
        except ImportError as error:
            from cadenza_common.settings.extras import install_command

            reason = f"Ray is not installed here ({error}): {install_command('ray')}"
            raise OptionError(f"option distributed_executor_backend: ray: {reason}") from None
        self._ray = ray
        for name, value in _TRUST.items():
            os.environ.setdefault(name, value)
        with _own_signals():
            self._is_own = not ray.is_initialized()
            if self._is_own:
                _check_address(address)
                try:
                    ray.init(address, log_to_driver=False, logging_level="ERROR", configure_logging=False)
                except (ConnectionError, ValueError, RuntimeError, AssertionError) as error:
                    reason = " ".join(str(error).split()) or type(error).__name__
                    raise OptionError(f"option ray_address: {address or 'none is given'}: {reason}") from None
        self._groups: list[Any] = []

    @property
    def host(self) -> str:
        """The address of this machine in the cluster."""
        return str(self._ray.util.get_node_ip_address())

    def machines(self) -> list[Machine]:
        """Return the nodes that are alive."""
        return [
            Machine(node["NodeManagerAddress"], node["Resources"].get("CPU", 0.0), node["Resources"].get("GPU", 0.0))
            for node in self._ray.nodes()
            if node["Alive"]
        ]

    def place(self, bundle: dict[str, float], count: int, strategy: str) -> PlacementGroup:
        """Ask for `count` places with these resources each, and do not wait for them."""
        group = self._ray.util.placement_group([dict(bundle) for _ in range(count)], strategy=strategy)
        self._groups.append(group)
        return PlacementGroup(self, group, bundle)

    def release(self, group: Any) -> None:
        """Take a placement group away, and the actors in it."""
        self._groups.remove(group)
        with contextlib.suppress(Exception):  # of Ray: it is gone with its machine
            self._ray.util.remove_placement_group(group)

    def close(self) -> None:
        """Take all away, and leave the cluster."""
        for group in list(self._groups):
            self.release(group)
        if self._is_own:
            with _own_signals():
                self._ray.shutdown()


class PlacementGroup:
    """A placement group."""

    def __init__(self, cluster: RayCluster, group: Any, bundle: dict[str, float]) -> None:
        self._cluster, self._group, self._bundle = cluster, group, bundle

    def actor(self, index: int) -> Any:
        """Return a new actor in one of the places; Ray starts it again as often as it ends."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from cadenza_launcher.on_ray.actor import ProcessActor

        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        options = {
            "num_cpus": self._bundle.get("CPU", 0),
            "num_gpus": self._bundle.get("GPU", 0),
            "max_restarts": -1,
            "max_task_retries": 0,
            "max_concurrency": 8,
            "scheduling_strategy": place,
        }
        return ray.remote(**options)(ProcessActor).remote()

    def release(self) -> None:
        """Take it away, and the actors in it."""
        self._cluster.release(self._group)


def _check_address(address: str | None) -> None:
    """Raise OptionError for an address where no cluster can be: Ray would say so after a minute."""
    if address in (None, "auto", "local"):
        return
    try:
        host, port = parse_address(address, default_port=_RAY_PORT)
        socket.create_connection((host, port), _CONNECT_S).close()
    except ValueError as error:
        raise OptionError(f"option ray_address: {error}") from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise OptionError(f"option ray_address: no Ray cluster answers at {address}: {reason}") from None


def all_on_loopback(machines: Sequence[Machine]) -> bool:
    """Whether no other machine can reach these."""
    return all(is_loopback(each.host) for each in machines)


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """In the body Ray may handle signals; after it this program does again."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
