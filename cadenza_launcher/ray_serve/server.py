"""The replica of a Ray Serve deployment: it runs what `cadenza up` runs, and passes HTTP requests on to it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from cadenza_launcher.local import LocalServices
from cadenza_launcher.ray_serve.forwarding import Forwarder
from cadenza_launcher.services.supervised_service import RestartPolicy

_log = logging.getLogger("ray.serve")
_ANY_PORT = "127.0.0.1:0"


class Server:
    """A scheduler, its executors and a gateway, for as long as the replica exists.

    Services that die are started again here, as by `cadenza up`. Where that does not help, Ray Serve starts another
    replica: see `check_health`. Serve calls all methods in one event loop of the replica.
    """

    def __init__(self, options: Mapping[str, Any], unhealthy_after_s: float) -> None:
        """Start all, and wait until all serve; raises OptionError and LocalServiceError.

        options: those of LocalServices, with the model; unhealthy_after_s: as in `check_health`.
        """
        # Ray sets it to the processors of the replica; how many threads there are is for the options to say.
        os.environ.pop("OMP_NUM_THREADS", None)
        restarts = RestartPolicy(max_deaths=None)
        self._services = LocalServices(
            http=_ANY_PORT, restarts=restarts, on_log=_log_line, on_event=_log.warning, **options
        )
        assert self._services.http is not None
        self._forwarder = Forwarder(self._services.http)
        self._unhealthy_after_s = unhealthy_after_s
        self._served_at = time.monotonic()

    async def __call__(self, request: Request) -> Response:
        """Return the gateway's answer."""
        return await self._forwarder.answer(request)

    async def check_health(self) -> None:
        """Raise an error if the gateway does not answer, or if no requests have been served for `unhealthy_after_s`.

        Less would not do: while an executor loads the model again, another replica would have to load it too.
        """
        refusal = await self._forwarder.refusal()
        now = time.monotonic()
        if refusal is None:
            self._served_at = now
        elif now - self._served_at > self._unhealthy_after_s:
            raise RuntimeError(f"not serving for {now - self._served_at:.0f} s: {refusal}")

    def __del__(self) -> None:
        """Let the requests of gRPC clients finish, within drain_timeout_s, and end all.

        Serve calls it when it ends a replica, after the last answer over HTTP, and then ends the process.
        """
        services: LocalServices | None = self.__dict__.pop("_services", None)  # none: they did not start
        if services is not None:
            services.drain()
            services.close()


def _log_line(service: str, line: str) -> None:
    _log.info("%s: %s", service, line)
