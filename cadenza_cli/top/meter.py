"""A server's figures over a moving window, from its step records and its server info."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from cadenza.info import ExecutorInfo, ServerInfo, ServerLoad
from cadenza.steps.cells import ran
from cadenza.steps.watch import PromptCounter
from cadenza.v1 import admin_pb2, execution_pb2
from cadenza_cli.top.ages import Ages
from cadenza_cli.top.figures import TIMES, ExecutorFigures, Percentiles, ServerFigures, TenantFigures, percentiles


@dataclass(frozen=True, slots=True)
class _MeteredStep:
    """The kept part of a record."""

    at_s: float
    executor: int
    ran: bool
    failed: bool
    num_sequences: int
    num_prompt_tokens: int
    num_sampled: int
    num_decodes: int  # sequences that decoded and got tokens
    num_decoded: int  # tokens that they got
    num_swapped_out: int
    num_swapped_in: int
    ttfts_s: tuple[float, ...]
    times_s: tuple[float, ...]  # in the order of TIMES


_Drafts = ExecutorInfo | ServerLoad
"""What has counts of drafts."""


class Meter:
    """Add records as they arrive, and take a snapshot at the end of each interval.

    All times are on the server's clock, in seconds since it started. A window begins at a snapshot, so that the
    server's counts and those of records cover the same time. A late record counts in the interval in which it arrived,
    so that each record counts once.
    """

    def __init__(self, info: ServerInfo, window_s: float, *, model: str = "") -> None:
        """`info`: at the start of the watch; `window_s`: minimum length of the window; 0: one interval; `model`: its
        name, if known."""
        self._model = model
        self._window_s = window_s
        self._infos = deque([info])
        self._begin_s = info.uptime_s
        self._steps: deque[_MeteredStep] = deque()
        self._num_dropped = 0
        self._ages, self._prompts = Ages(), PromptCounter()

    def add(self, records: Sequence[admin_pb2.StepRecord], num_dropped: int) -> None:
        """Add records in the order of steps; `num_dropped`: records lost to this watch so far."""
        if num_dropped > self._num_dropped:  # the state of the sequences is not known any more
            self._num_dropped = num_dropped
            self._ages, self._prompts = Ages(), PromptCounter()
        for record in records:
            self._steps.append(self._step(record))
            self._ages.add(record)

    def snapshot(self, info: ServerInfo) -> ServerFigures:
        """The figures over the window that ends at `info`."""
        now_s, infos = info.uptime_s, self._infos
        newest = infos[-1]
        while len(infos) > 1 and now_s - infos[1].uptime_s >= self._window_s:
            infos.popleft()
        base = infos[0]
        infos.append(info)
        while self._steps and self._steps[0].at_s < base.uptime_s:
            self._steps.popleft()
        steps = [step for step in self._steps if step.at_s < now_s]
        window_s = now_s - base.uptime_s
        newest_steps, newest_s = [step for step in steps if step.at_s >= newest.uptime_s], now_s - newest.uptime_s
        waiting_s, running_s, swapped_s = self._ages.look(info.load, now_s)
        queries = info.load.num_prefix_queries - base.load.num_prefix_queries
        before = {executor.index: executor for executor in base.executors}
        return ServerFigures(
            info=info,
            model=self._model,
            watched_s=now_s - self._begin_s,
            num_dropped=self._num_dropped,
            window_s=window_s,
            prompt_tokens_per_s=_rate(sum(step.num_prompt_tokens for step in steps), window_s),
            output_tokens_per_s=_rate(info.load.num_output_tokens - base.load.num_output_tokens, window_s),
            interval_prompt_tokens_per_s=_rate(sum(step.num_prompt_tokens for step in newest_steps), newest_s),
            interval_output_tokens_per_s=_rate(info.load.num_output_tokens - newest.load.num_output_tokens, newest_s),
            interval_ttft_s=_ttft(newest_steps),
            ttft_s=_ttft(steps),
            tokens_per_step=_tokens_per_step(info.load, base.load, steps),
            interval_tokens_per_step=_tokens_per_step(info.load, newest.load, newest_steps),
            acceptance=_acceptance(info.load, base.load),
            interval_acceptance=_acceptance(info.load, newest.load),
            num_preemptions=info.load.num_preemptions - base.load.num_preemptions,
            num_swapped_out=sum(step.num_swapped_out for step in steps),
            num_swapped_in=sum(step.num_swapped_in for step in steps),
            prefix_hit_rate=(info.load.num_prefix_hits - base.load.num_prefix_hits) / queries if queries else None,
            waiting_s=waiting_s,
            running_s=running_s,
            swapped_s=swapped_s,
            executors=[
                _executor(
                    executor,
                    before.get(executor.index),
                    [step for step in steps if step.executor == executor.index],
                    window_s,
                )
                for executor in info.executors
            ],
            tenants=_tenants(info, base, window_s),
        )

    def _step(self, record: admin_pb2.StepRecord) -> _MeteredStep:
        timings, at_s = record.timings, record.applied_ns / 1e9
        num_prompt_tokens, decoded = self._prompts.count(record)
        return _MeteredStep(
            at_s=at_s if at_s < self._begin_s else max(at_s, self._infos[-1].uptime_s),
            executor=record.executor_index,
            ran=bool(ran([record])),
            failed=record.status != execution_pb2.STEP_STATUS_OK,
            num_sequences=len(record.sequence_ids),
            num_prompt_tokens=num_prompt_tokens,
            num_sampled=sum(record.num_sampled),
            num_decodes=len(decoded),
            num_decoded=sum(decoded),
            num_swapped_out=len(record.swapped_out_ids),
            num_swapped_in=len(record.swapped_in_ids),
            ttfts_s=tuple(time_ns / 1e9 for time_ns in record.first_token_ns),
            times_s=tuple(getattr(timings, f"{name}_ns") / 1e9 for name in TIMES),
        )


def _executor(
    info: ExecutorInfo, base: ExecutorInfo | None, steps: list[_MeteredStep], window_s: float
) -> ExecutorFigures:
    """`base`: the executor at the window's begin; None: it joined later, and its counts began at 0."""
    tokens, queries, hits = (
        getattr(info, name) - (getattr(base, name) if base is not None else 0)
        for name in ("num_output_tokens", "num_prefix_queries", "num_prefix_hits")
    )
    done = [step for step in steps if step.ran]
    total_s = sum(step.times_s[0] for step in done)
    return ExecutorFigures(
        info=info,
        num_steps=len(done),
        num_failed_steps=sum(step.failed for step in steps),
        steps_per_s=_rate(len(done), window_s),
        busy=min(1.0, _rate(total_s, window_s)),
        mean_sequences=_rate(sum(step.num_sequences for step in done), len(done)),
        max_sequences=max((step.num_sequences for step in done), default=0),
        prompt_tokens_per_s=_rate(sum(step.num_prompt_tokens for step in done), window_s),
        sampled_tokens_per_s=_rate(sum(step.num_sampled for step in done), window_s),
        output_tokens_per_s=_rate(tokens, window_s),
        prefix_hit_rate=hits / queries if queries else None,
        tokens_per_step=_tokens_per_step(info, base, done),
        acceptance=_acceptance(info, base),
        times_s=_times(done),
    )


def _tenants(info: ServerInfo, base: ServerInfo, window_s: float) -> list[TenantFigures]:
    """`base`: the server at the window's begin; the counts of a tenant that is new since then began at 0."""
    before = {tenant.name: (tenant.num_output_tokens, tenant.num_rejected) for tenant in base.tenants}
    figures = []
    for tenant in info.tenants:
        tokens, rejected = before.get(tenant.name, (0, 0))
        rate = _rate(tenant.num_output_tokens - tokens, window_s)
        figures.append(TenantFigures(tenant, rate, tenant.num_rejected - rejected))
    return figures


def _acceptance(now: _Drafts, before: _Drafts | None) -> float | None:
    """Share of the drafts since `before` that were accepted; None: there were none."""
    num_drafts = now.num_drafts - (before.num_drafts if before is not None else 0)
    num_accepted = now.num_accepted_drafts - (before.num_accepted_drafts if before is not None else 0)
    return num_accepted / num_drafts if num_drafts > 0 else None


def _tokens_per_step(now: _Drafts, before: _Drafts | None, steps: list[_MeteredStep]) -> float | None:
    """Tokens that a decoding sequence gets in a step, where there were drafts since `before`; None: there were none."""
    num_decodes = sum(step.num_decodes for step in steps)
    if _acceptance(now, before) is None or not num_decodes:
        return None
    return sum(step.num_decoded for step in steps) / num_decodes


def _ttft(steps: list[_MeteredStep]) -> Percentiles | None:
    values = [value for step in steps for value in step.ttfts_s]
    return percentiles(values) if values else None


def _times(steps: list[_MeteredStep]) -> dict[str, Percentiles]:
    columns = dict(zip(TIMES, zip(*(step.times_s for step in steps), strict=True), strict=False))
    return {name: percentiles(values) for name, values in columns.items() if any(values)}


def _rate(count: float, of: float) -> float:
    return count / of if of > 0 else 0.0
