"""What each tenant uses, and the limits that a new request must keep.

Requests count from their admission to the queue to their end, whether a client sent them or a journal restored them; a
message that resumes or repeats a request is none. The bucket of tokens_per_minute holds at most a minute's tokens. A
new request needs its prompt's tokens there and takes them; its output is taken as it is generated, and may leave less
than nothing, so that the next request waits the longer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from scheduler_svc.core.errors import RequestRejectedError, WaitingQueueFullError
from scheduler_svc.core.outputs import StepOutputs, count_by_tenant
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.core.types import RequestKey, RequestSpec
from scheduler_svc.plan_loop.clock import Clock
from scheduler_svc.tenants.errors import TenantLimitError
from scheduler_svc.tenants.registry import Registry
from scheduler_svc.tenants.tenant import ONLY_TENANT, Tenant

_MINUTE_S = 60.0
_ROUNDING_S = 1e-6


class TokenBucket:
    """Tokens that a tenant may use: refilled steadily, up to a minute's worth."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def take(self, num_tokens: int) -> None:
        """Take tokens; the level may fall below 0."""
        self._level -= num_tokens

    def wait_s(self, num_tokens: int, now: float) -> float:
        """Seconds until there are so many tokens; 0: there are. At most a minute's tokens may be requested."""
        self._level = min(float(self.per_minute), self._level + (now - self._at) * self.per_minute / _MINUTE_S)
        self._at = now
        return max(0.0, (num_tokens - self._level) * _MINUTE_S / self.per_minute)

    def set_rate(self, per_minute: int, now: float) -> None:
        """Refill at another rate from now on."""
        self.wait_s(0, now)
        self.per_minute = per_minute
        self._level = min(self._level, float(per_minute))


class Usage:
    """The requests and tokens of one tenant."""

    __slots__ = (
        "bucket",
        "num_output_tokens",
        "num_prompt_tokens",
        "num_queued_tokens",
        "num_requests",
        "queued",
        "rejections",
    )

    def __init__(self) -> None:
        self.num_requests = 0
        """Unfinished ones."""
        self.queued: dict[str, int] = {}
        """Prompt tokens of the requests that have not begun to run, by id."""
        self.num_queued_tokens = 0
        """Their sum."""
        self.num_prompt_tokens = 0
        """Of all requests admitted to the queue since the start."""
        self.num_output_tokens = 0
        self.rejections: Counter[str] = Counter()
        """Requests refused since the start, by the limit that was reached."""
        self.bucket: TokenBucket | None = None

    @property
    def num_rejected(self) -> int:
        """Number of refused requests."""
        return self.rejections.total()

    def leave_queue(self, request_id: str) -> None:
        """A request has begun to run, or ended before."""
        self.num_queued_tokens -= self.queued.pop(request_id, 0)


@dataclass(frozen=True, slots=True)
class TenantLoad:
    """The load of one tenant; see TenantInfo in generation.proto."""

    name: str
    num_waiting: int
    num_running: int
    num_queued_tokens: int
    num_output_tokens: int
    rejections: Counter[str]
    """Refused requests by the limit that was reached."""
    weight: float

    @property
    def num_rejected(self) -> int:
        """Number of refused requests."""
        return self.rejections.total()


class Quotas:
    """The usage of each tenant, and the checks of its new requests."""

    def __init__(self, registry: Registry, clock: Clock, max_queued_requests: int) -> None:
        self.registry = registry
        self._clock = clock
        self._max_queued = max_queued_requests
        self._usages: dict[str, Usage] = {}

    def usage(self, tenant: str) -> Usage:
        """The usage of a tenant, zero at first."""
        usage = self._usages.get(tenant)
        if usage is None:
            usage = self._usages[tenant] = Usage()
        return usage

    def check(self, spec: RequestSpec, num_waiting: int, retry_after_s: float) -> None:
        """Check a new request of this tenant against the queue's limit and the tenant's own.

        num_waiting: groups in the queue, of all tenants; retry_after_s: when the queue may have moved. Raises
        QueueFullError, TenantLimitError and, for what can never be admitted, RequestRejectedError.
        """
        tenant, usage = self.registry.find(spec.tenant) or ONLY_TENANT, self.usage(spec.tenant)
        self._check_possible(spec, tenant)
        try:
            self._check_queue(usage, num_waiting, retry_after_s)
            self._check_limits(spec, tenant, usage, retry_after_s)
        except WaitingQueueFullError as exc:
            usage.rejections[exc.limit] += 1
            raise

    def loads(self, waiting: Iterable[SequenceGroup]) -> list[TenantLoad]:
        """The load of each tenant; `waiting`: the groups in the queue."""
        num_waiting = Counter(group.spec.tenant for group in waiting)
        return [self._load(tenant, num_waiting[tenant.name]) for tenant in self.registry]

    def _load(self, tenant: Tenant, num_waiting: int) -> TenantLoad:
        usage = self.usage(tenant.name)
        return TenantLoad(
            name=tenant.name,
            num_waiting=num_waiting,
            num_running=max(0, usage.num_requests - num_waiting),
            num_queued_tokens=usage.num_queued_tokens,
            num_output_tokens=usage.num_output_tokens,
            rejections=usage.rejections.copy(),
            weight=tenant.weight,
        )

    def charge(self, spec: RequestSpec) -> None:
        """Take a new request's prompt from the tenant's tokens."""
        usage = self.usage(spec.tenant)
        if usage.bucket is not None:
            usage.bucket.take(len(spec.prompt_token_ids))

    # --- events of the engine ----------------------------------------------------------------------------------------

    def on_added(self, spec: RequestSpec) -> None:
        """A request was queued, new or restored."""
        usage = self.usage(spec.tenant)
        usage.num_requests += 1
        usage.num_prompt_tokens += len(spec.prompt_token_ids)
        usage.queued[spec.request_id] = len(spec.prompt_token_ids)
        usage.num_queued_tokens += len(spec.prompt_token_ids)

    def on_started(self, key: RequestKey) -> None:
        """A request is part of a step for the first time."""
        self.usage(key[0]).leave_queue(key[1])

    def on_ended(self, key: RequestKey) -> None:
        """A request ended."""
        usage = self.usage(key[0])
        usage.num_requests -= 1
        usage.leave_queue(key[1])

    def on_outputs(self, outputs: StepOutputs) -> None:
        """Take the new tokens from those of their tenants."""
        if outputs.sequences:
            if self.registry.is_open:
                self.usage("").num_output_tokens += len(outputs.sequences)
            else:
                for name, count in (outputs.num_by_tenant or count_by_tenant(outputs.sequences)).items():
                    self._take(name, count)
        for beam in outputs.hypotheses:
            self._take(beam.group.spec.tenant, len(beam.token_ids))

    def _take(self, name: str, num_tokens: int) -> None:
        usage = self.usage(name)
        usage.num_output_tokens += num_tokens
        if usage.bucket is not None:
            usage.bucket.take(num_tokens)

    # --- checks ------------------------------------------------------------------------------------------------------

    def _check_possible(self, spec: RequestSpec, tenant: Tenant) -> None:
        """Raise RequestRejectedError for a request that exceeds a limit by itself."""
        if tenant.max_priority is not None and spec.priority < tenant.max_priority:
            raise RequestRejectedError(
                "sampling_params.priority",
                f"must be {tenant.max_priority} or more for this tenant (max_priority; smaller goes first), "
                f"not {spec.priority}",
            )
        for name in ("max_queued_tokens", "tokens_per_minute"):
            limit = getattr(tenant, name)
            if limit is not None and len(spec.prompt_token_ids) > limit:
                raise RequestRejectedError(
                    "prompt", f"has {len(spec.prompt_token_ids)} tokens; this tenant's {name} is {limit}"
                )

    def _check_queue(self, usage: Usage, num_waiting: int, retry_after_s: float) -> None:
        """Raise QueueFullError if the queue has no place for a request of this tenant.

        With a tenants file a tenant may have as many waiting requests as there are free places: one alone half of the
        queue, two a third each (the dynamic thresholds of Choudhury and Hahne, IEEE/ACM Trans. Networking 6(2), 1998).
        So whatever one tenant sends, there is place for the others.
        """
        if self.registry.is_open:
            if num_waiting >= self._max_queued:
                raise WaitingQueueFullError(f"{num_waiting} requests wait already (max_queued_requests)", retry_after_s)
        elif len(usage.queued) >= self._max_queued - num_waiting:
            raise WaitingQueueFullError(
                f"waiting requests of this tenant: {len(usage.queued)}, its share of the queue (max_queued_requests)",
                retry_after_s,
            )

    def _check_limits(self, spec: RequestSpec, tenant: Tenant, usage: Usage, retry_after_s: float) -> None:
        if tenant.max_requests is not None and usage.num_requests >= tenant.max_requests:
            raise TenantLimitError(
                "max_requests", f"unfinished requests of this tenant: {usage.num_requests}", retry_after_s
            )
        num_prompt = len(spec.prompt_token_ids)
        if tenant.max_queued_tokens is not None and usage.num_queued_tokens + num_prompt > tenant.max_queued_tokens:
            raise TenantLimitError(
                "max_queued_tokens",
                f"waiting prompt tokens of this tenant: {usage.num_queued_tokens}; {num_prompt} more exceed "
                f"{tenant.max_queued_tokens}",
                retry_after_s,
            )
        if tenant.tokens_per_minute is None:
            usage.bucket = None
            return
        now, bucket = self._clock.monotonic(), usage.bucket
        if bucket is None:
            bucket = usage.bucket = TokenBucket(tenant.tokens_per_minute, now)
        elif bucket.per_minute != tenant.tokens_per_minute:
            bucket.set_rate(tenant.tokens_per_minute, now)
        wait_s = bucket.wait_s(num_prompt, now)
        if wait_s > _ROUNDING_S:
            raise TenantLimitError(
                "tokens_per_minute", f"this tenant has used its {tenant.tokens_per_minute} tokens a minute", wait_s
            )
