"""Follows a service of Kubernetes by its EndpointSlices: which addresses are ready, and when that changes.

Plain HTTPS to the API server of the cluster that this process runs in, with the token of its pod
(https://kubernetes.io/docs/tasks/run-application/access-api-from-pod/). The slices are listed, and watched from the
version of that list on; the first event of a watch ends it, and they are listed anew. So there is no state that could
differ from the server's.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

from cadenza_common.wire.tls.sockets import ResetSafeSocket
from cadenza_common.wire.transport import format_address
from scheduler_svc.executors.addresses import ServiceName

WATCH_S = 60
"""The longest watch; then the slices are listed again, whether or not they have changed."""
_ANSWER_S = 10.0
_SETTLE_S = 0.2
"""Between an event and the list that follows it: a rollout changes slices in bursts."""
_MAX_ANSWER_BYTES = 32 * 2**20
_PORT_NAME = "grpc"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Endpoints:
    """What the slices of a service say."""

    addresses: tuple[str, ...]
    """HOST:PORT of each endpoint that is ready, sorted."""
    version: str
    """The resource version of the list, from which a watch goes on."""


@dataclass(frozen=True, slots=True)
class KubernetesApi:
    """The API server, as a pod reaches it, and the folder of the pod's service account."""

    host: str = "kubernetes.default.svc"
    port: int = 443
    account: Path = Path("/var/run/secrets/kubernetes.io/serviceaccount")

    async def endpoints(self, service: ServiceName, version: str) -> Endpoints:
        """The endpoints as soon as they may differ from those of `version`; at once for "". Raises OSError."""
        return await in_daemon_thread(lambda: self._after(service, version), "endpointslices")

    def _after(self, service: ServiceName, version: str) -> Endpoints:
        try:
            if version:
                self._wait(service, version)
            return ready_endpoints(self._list(service))
        except FileNotFoundError as exc:
            raise OSError(f"{exc.filename} is missing: this is no pod, or one without a service account") from None
        except OSError:
            raise  # Errors of certificates are ValueErrors too.
        except (http.client.HTTPException, ValueError) as exc:
            reason = str(exc) or type(exc).__name__
            raise OSError(f"the API server's answer cannot be read: {reason}") from exc

    def _list(self, service: ServiceName) -> Mapping[str, Any]:
        connection = self._connection(_ANSWER_S)
        try:
            with self._ask(connection, service, {}) as answer:
                text = answer.read(_MAX_ANSWER_BYTES + 1)
        finally:
            connection.close()
        if len(text) > _MAX_ANSWER_BYTES:
            raise ValueError(f"it has over {_MAX_ANSWER_BYTES} bytes")
        content = json.loads(text)
        if not isinstance(content, dict):
            raise ValueError("it is no list of slices")
        return content

    def _wait(self, service: ServiceName, version: str) -> None:
        """Return at the first event after `version`, an error or a bookmark included, or when the watch ends."""
        connection = self._connection(WATCH_S + _ANSWER_S)
        try:
            query = {"watch": "1", "resourceVersion": version, "timeoutSeconds": str(WATCH_S)}
            with self._ask(connection, service, query) as answer:
                answer.readline(_MAX_ANSWER_BYTES)
        except GoneError:
            pass  # The version is too old.
        except TimeoutError:
            pass  # The link is dead, or the server does not end watches: the next list has the changes.
        finally:
            connection.close()
        time.sleep(_SETTLE_S)

    def _connection(self, timeout_s: float) -> http.client.HTTPSConnection:
        """The CA and the token are read anew for each: the cluster changes them."""
        context = ssl.create_default_context(cadata=(self.account / "ca.crt").read_text())
        context.sslsocket_class = ResetSafeSocket
        return http.client.HTTPSConnection(self.host, self.port, timeout=timeout_s, context=context)

    def _ask(
        self, connection: http.client.HTTPSConnection, service: ServiceName, query: Mapping[str, str]
    ) -> http.client.HTTPResponse:
        """Send the request; raises OSError if the answer is an error."""
        token = (self.account / "token").read_text().strip()
        selector = {"labelSelector": f"kubernetes.io/service-name={service.name}"}
        path = f"/apis/discovery.k8s.io/v1/namespaces/{quote(service.namespace, safe='')}/endpointslices"
        headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
        connection.request("GET", f"{path}?{urlencode({**selector, **query})}", headers=headers)
        answer = connection.getresponse()
        if answer.status == http.client.OK:
            return answer
        with answer:
            error = GoneError if answer.status == http.client.GONE else OSError
            raise error(f"the API server says {answer.status} {answer.reason}{_reason_in(answer.read(4096))}")


class GoneError(OSError):
    """The API server does not have this version any more."""


def ready_endpoints(slices: Mapping[str, Any]) -> Endpoints:
    """The ready addresses of an EndpointSliceList; raises ValueError if it is none.

    Of a service with IPv4 and IPv6 the IPv4 addresses alone: both lead to the same pods. A condition that is not known
    counts as ready (https://kubernetes.io/docs/concepts/services-networking/endpoint-slices/).
    """
    try:
        items = slices.get("items") or []
        families = {item["addressType"] for item in items}
        family = "IPv4" if "IPv4" in families else min(families, default="")
        found = {
            format_address(str(endpoint["addresses"][0]), port)
            for item in items
            if item["addressType"] == family
            for endpoint in item.get("endpoints") or []
            if (endpoint.get("conditions") or {}).get("ready", True)
            for port in _port_of(item)
        }
        return Endpoints(tuple(sorted(found)), str(slices["metadata"]["resourceVersion"]))
    except (KeyError, TypeError, IndexError, AttributeError) as exc:
        raise ValueError(f"it is no list of slices: {exc!r}") from None


def _port_of(item: Mapping[str, Any]) -> list[int]:
    """The port that is named grpc, or the only one; raises ValueError if it is not clear which one to take."""
    ports = {entry.get("name") or "": int(entry["port"]) for entry in item.get("ports") or [] if entry.get("port")}
    if not ports:
        return []  # A slice without endpoints may have none.
    if _PORT_NAME in ports:
        return [ports[_PORT_NAME]]
    if len(ports) > 1:
        raise ValueError(f"the service has the ports {', '.join(sorted(ports))}; that of the executors must be grpc")
    return list(ports.values())


def _reason_in(text: bytes) -> str:
    """The message of a Status object, as the API server's errors have it."""
    try:
        message = json.loads(text).get("message")
    except (ValueError, AttributeError):
        return ""
    return f": {message}" if isinstance(message, str) else ""


async def in_daemon_thread(work: Callable[[], _T], name: str) -> _T:
    """What `work` returns or raises. A cancelled caller leaves the thread alone, which ends by itself."""
    found: Future[_T] = Future()

    def run() -> None:
        found.set_running_or_notify_cancel()
        try:
            found.set_result(work())
        except BaseException as exc:
            found.set_exception(exc)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(found)
