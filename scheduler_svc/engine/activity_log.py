"""Logs what the engine does: figures at intervals while it is busy, and a line for each request that ends."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.types import FinishDetail
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.metrics.numbers import EngineNumbers
from scheduler_svc.plan_loop.clock import Clock, ScheduledCall
from scheduler_svc.plan_loop.gauges import Load

_LOG = logging.getLogger(__name__)
_FAILED_ALONE = FinishDetail.NON_FINITE_LOGITS


class ActivityLog:
    """Writes to the log; prompts and outputs never appear in it."""

    def __init__(
        self,
        clock: Clock,
        load: Callable[[], Load],
        numbers: EngineNumbers,
        config: SchedulerConfig,
    ) -> None:
        """config: the time between two lines of figures, and whether there is one for each request."""
        self._clock = clock
        self._load = load
        self._interval_s = config.log_stats_interval_s
        self._log_requests = config.log_requests
        self._numbers = numbers
        self._base_prompt_tokens = 0
        self._timer: ScheduledCall | None = None
        self._base = Load()
        self._base_ns = 0

    def on_arrival(self) -> None:
        """A request is about to be queued: begin an interval, unless one runs."""
        if self._timer is None and self._interval_s > 0:
            self._begin_interval(self._load())

    def on_ended(self, live: LiveRequest) -> None:
        """A request has ended; one that has failed alone is always logged, for nothing else in the log shows it."""
        failed = any(each.finish is not None and each.finish.detail is _FAILED_ALONE for each in live.samples)
        if failed or self._log_requests:
            level = logging.WARNING if failed else logging.INFO
            _LOG.log(level, "%s", request_line(live), extra=request_fields(live))

    def stop(self) -> None:
        """Stop logging figures."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _begin_interval(self, load: Load) -> None:
        self._base, self._base_ns = load, self._clock.monotonic_ns()
        self._base_prompt_tokens = self._numbers.num_prompt_tokens
        self._timer = self._clock.call_later(self._interval_s, self._end_interval)

    def _end_interval(self) -> None:
        self._timer = None
        load, num_prompt_tokens = self._load(), self._numbers.num_prompt_tokens - self._base_prompt_tokens
        busy = load.num_running or load.num_waiting or load.num_swapped
        if busy or num_prompt_tokens or load.num_output_tokens > self._base.num_output_tokens:
            passed_s = (self._clock.monotonic_ns() - self._base_ns) / 1e9
            _LOG.info("%s", figures_line(self._base, load, num_prompt_tokens, passed_s))
        if busy:
            self._begin_interval(load)


def figures_line(before: Load, now: Load, num_prompt_tokens: int, passed_s: float) -> str:
    """The figures of an interval of `passed_s` seconds, in which `num_prompt_tokens` were computed."""
    swapped = f" swapped {now.num_swapped}" if now.num_swapped else ""
    used = now.num_used_device_blocks / now.num_device_blocks if now.num_device_blocks else 0.0
    num_output = now.num_output_tokens - before.num_output_tokens
    queries = now.num_prefix_queries - before.num_prefix_queries
    hits = f" prefix hits {(now.num_prefix_hits - before.num_prefix_hits) / queries:.0%}" if queries else ""
    drafts = now.num_drafts - before.num_drafts
    accepted = now.num_accepted_drafts - before.num_accepted_drafts
    preempted = now.num_preemptions - before.num_preemptions
    return (
        f"running {now.num_running} waiting {now.num_waiting}{swapped} kv {used:.0%} "
        f"prompt {num_prompt_tokens / passed_s:.0f} tok/s output {num_output / passed_s:.0f} tok/s{hits}"
        + (f" drafts accepted {accepted / drafts:.0%}" if drafts else "")
        + (f" preemptions {preempted}" if preempted else "")
    )


def request_line(live: LiveRequest) -> str:
    """One line about a request that has ended: its sizes, how it ended, and its times since it arrived."""
    spec, times, counts = live.request.spec, live.times, live.counts
    tenant = f" tenant {spec.tenant!r}" if spec.tenant else ""
    cached = f" ({counts.num_cached_tokens} cached)" if counts.num_cached_tokens else ""
    ends = Counter(sample.finish.detail.name.lower() for sample in live.samples if sample.finish is not None)
    ended = " ".join(f"{name} x{count}" if count > 1 else name for name, count in ends.items())
    if live.error is not None:
        ended = f"{ended} {type(live.error).__name__}".lstrip()
    preempted = f", preempted {counts.num_preemptions}" if counts.num_preemptions else ""
    queued = _since(times.arrival_ns, times.first_plan_ns or times.end_ns)
    first = f", first token {_since(times.arrival_ns, times.first_token_ns)}" if times.first_token_ns else ""
    return (
        f"request {spec.request_id!r}{tenant}: {ended}, prompt {len(spec.prompt_token_ids)} tokens{cached}, "
        f"output {live.num_completion_tokens} tokens{preempted}, "
        f"queued {queued}{first}, total {_since(times.arrival_ns, times.end_ns)}"
    )


def request_fields(live: LiveRequest) -> dict[str, object]:
    """What a log line about a request has beside its text."""
    spec = live.request.spec
    trace_id = live.trace.trace_id if live.trace is not None else None
    return {"request_id": spec.request_id, "tenant": spec.tenant, "trace_id": trace_id}


def _since(begin_ns: int, end_ns: int) -> str:
    return f"{(end_ns - begin_ns) / 1e9:.3f} s"
