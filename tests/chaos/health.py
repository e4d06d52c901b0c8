"""Whether the scheduler reports its health as it is: a watch beside what the run itself knows about the services."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

LIMIT_S = 2.0
"""Health must be true so long after a change."""
SLACK_S = 1.0
"""On a machine with other work a run allows this beyond it; the report counts what is over LIMIT_S."""
_LOOK_S = 0.05
_RPC_TIMEOUT_S = 1.0
_RECONNECT = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 100),
              ("grpc.use_local_subchannel_pool", 1)]  # fmt: skip


class Truth:
    """What is known to be wrong with the service or with one of its executors, and since when.

    Health must be SERVING while nothing is wrong with the service and with one executor; it must be NOT_SERVING while
    the service, or each executor, has something wrong that health must report.
    """

    def __init__(self, num_executors: int = 1) -> None:
        self._wrong: dict[tuple[int | None, str], bool] = {}
        """Each reason by the executor's index, None: the service; whether health must be NOT_SERVING because of it."""
        now = time.monotonic()
        self._clean_since: dict[int | None, float | None] = dict.fromkeys((None, *range(num_executors)), now)
        """Since when nothing is wrong with it; None: something is."""
        self.right_since: float | None = now
        self.wrong_since: float | None = None

    @property
    def reasons(self) -> list[str]:
        """What is wrong now."""
        return [reason if place is None else f"{reason} ({place})" for place, reason in self._wrong]

    def begin(self, reason: str, executor: int | None = None, *, must: bool = True) -> None:
        """Something is wrong from now on with the service or an executor; must: health has to say so, if it is all."""
        key = (executor, reason)
        self._wrong[key] = must or self._wrong.get(key, False)
        self._changed()

    def end(self, reason: str, executor: int | None = None) -> None:
        """It is right again. If something else is wrong, its time starts again: what a link held arrives only now."""
        if self._wrong.pop((executor, reason), None) is not None:
            self.wrong_since = None
            self._changed()

    def _changed(self) -> None:
        now = time.monotonic()
        for place, since in self._clean_since.items():
            wrong = any(of == place for of, _ in self._wrong)
            self._clean_since[place] = None if wrong else now if since is None else since
        service = self._clean_since[None]
        clean = [since for place, since in self._clean_since.items() if place is not None and since is not None]
        self.right_since = max(service, min(clean)) if service is not None and clean else None
        if not self._must_not_serve():
            self.wrong_since = None
        elif self.wrong_since is None:
            self.wrong_since = now

    def _must_not_serve(self) -> bool:
        must = {place for (place, _), must in self._wrong.items() if must}
        joined = {place for place, _ in self._wrong if place is not None and place not in self._clean_since}
        executors = {place for place in self._clean_since if place is not None} | joined
        return None in must or executors <= must


class HealthWatch:
    """Looks at the health every 50 ms, and compares it with the truth."""

    def __init__(self, target: str, truth: Truth, report: Callable[[str], None], *, slack_s: float = SLACK_S) -> None:
        """report: called with each violation."""
        self.is_serving = False
        self.lags_s: dict[str, list[float]] = {"NOT_SERVING": [], "SERVING": []}
        """How late it was, after each change that it had time to follow."""
        self._target = target
        self._truth = truth
        self._report = report
        self._slack_s = slack_s
        self._unmatched_since: float | None = None
        self._is_reported = False
        self._last = (truth.right_since, truth.wrong_since)

    async def run(self) -> None:
        """Watch until it is cancelled."""
        async with grpc.aio.insecure_channel(self._target, options=_RECONNECT) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while True:
                asked_at = time.monotonic()
                is_serving = False
                with contextlib.suppress(grpc.aio.AioRpcError):
                    answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=_RPC_TIMEOUT_S)
                    is_serving = answer.status == health_pb2.HealthCheckResponse.SERVING
                self.is_serving = is_serving
                self._compare(asked_at, time.monotonic())
                await asyncio.sleep(_LOOK_S)

    def _compare(self, asked_at: float, now: float) -> None:
        truth = self._truth
        since = (truth.right_since, truth.wrong_since)
        if since != self._last:
            # Another executor may take requests instead of the one that did: then health must not change.
            stays = since[0] is not None and self._last[0] is not None and self._unmatched_since is None
            self._last, self._is_reported = since, False
            must = since[1] if since[1] is not None else since[0]
            self._unmatched_since = None if stays else must
        if since == (None, None):
            return  # something is wrong that health need not know
        should_serve = truth.right_since is not None
        began = truth.right_since if should_serve else truth.wrong_since
        assert began is not None
        if asked_at < began:
            return
        word = "SERVING" if should_serve else "NOT_SERVING"
        if self.is_serving == should_serve:
            if self._unmatched_since is not None:
                self.lags_s[word].append(now - self._unmatched_since)
            self._unmatched_since = None
            return
        if self._unmatched_since is None:  # it was true, and is no more: as when a step failed
            self._unmatched_since = asked_at
        late_s = asked_at - self._unmatched_since
        if late_s > LIMIT_S + self._slack_s and not self._is_reported:
            self._is_reported = True
            self._report(f"health is not {word} {late_s:.1f} s after it should be; wrong: {truth.reasons}")
