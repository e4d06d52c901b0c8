"""Numbers about requests, one set for each tenant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from copy import copy

from cadenza_common.metrics.histogram import Histogram
from scheduler_svc.core.types import FinishDetail, RequestSpec
from scheduler_svc.metrics import buckets
from scheduler_svc.plan_loop.ports import RequestCounts, RequestTimes

OTHER_TENANT = "other"
"""The label of tenants that are not configured: a client must not be able to create time series."""
FAILED = "failed"
"""The label of a request that ended with an error in place of a finish."""


class TenantNumbers:
    """Counts and times of one tenant's requests."""

    def __init__(self) -> None:
        self.num_admitted = 0
        self.num_prompt_tokens = 0
        """Of requests that have their first token; those found in the prefix cache included."""
        self.num_cached_tokens = 0
        self.ends: Counter[str] = Counter()
        """Ended requests by the name of their finish detail, or `FAILED`."""
        self.first_token_s = Histogram(buckets.FIRST_TOKEN_S)
        self.per_token_s = Histogram(buckets.TOKEN_S)
        self.queue_s = Histogram(buckets.REQUEST_S)
        self.total_s = Histogram(buckets.REQUEST_S)

    def copied(self) -> TenantNumbers:
        """The same numbers, which do not change any more."""
        result = copy(self)
        result.ends = self.ends.copy()
        result.first_token_s, result.per_token_s = self.first_token_s.copy(), self.per_token_s.copy()
        result.queue_s, result.total_s = self.queue_s.copy(), self.total_s.copy()
        return result


class RequestNumbers:
    """Counts and times of all requests; most are kept by tenant, so that they are counted once."""

    def __init__(self, is_tenant: Callable[[str], bool]) -> None:
        """is_tenant: whether there is a tenant with this name; each has a label of its own."""
        self._is_tenant = is_tenant
        self.tenants: dict[str, TenantNumbers] = {}
        self.prefill_s = Histogram(buckets.REQUEST_S)
        self.decode_s = Histogram(buckets.REQUEST_S)
        self.inference_s = Histogram(buckets.REQUEST_S)
        self.prompt_tokens = Histogram(buckets.VLLM_REQUEST_TOKENS)
        self.output_tokens = Histogram(buckets.VLLM_REQUEST_TOKENS)

    def of(self, tenant: str) -> TenantNumbers:
        """The numbers that a tenant's requests count for."""
        found = self.tenants.get(tenant)
        if found is None:
            found = self.tenants.setdefault(tenant if self._is_tenant(tenant) else OTHER_TENANT, TenantNumbers())
        return found

    def on_first_token(
        self, spec: RequestSpec, times: RequestTimes, counts: RequestCounts, catches_up: bool = False
    ) -> None:
        """A request has its first token in this process.

        With known outputs, and if it catches up, its client may have had it from an earlier process.
        """
        if catches_up or spec.known_outputs:
            return
        numbers = self.of(spec.tenant)
        numbers.num_prompt_tokens += len(spec.prompt_token_ids)
        numbers.num_cached_tokens += counts.num_cached_tokens
        numbers.first_token_s.observe((times.first_token_ns - times.arrival_ns) / 1e9)

    def on_ended(self, spec: RequestSpec, times: RequestTimes, num_tokens: int, detail: FinishDetail | None) -> None:
        """A request has ended. num_tokens: of its output, over all samples; detail: None if it failed."""
        numbers = self.of(spec.tenant)
        numbers.ends[FAILED if detail is None else detail.name.lower()] += 1
        numbers.total_s.observe((times.end_ns - times.arrival_ns) / 1e9)
        numbers.queue_s.observe(((times.first_plan_ns or times.end_ns) - times.arrival_ns) / 1e9)
        self.prompt_tokens.observe(len(spec.prompt_token_ids))
        self.output_tokens.observe(num_tokens)
        if not times.first_token_ns:
            return
        decode_s = (times.end_ns - times.first_token_ns) / 1e9
        self.prefill_s.observe((times.first_token_ns - times.first_plan_ns) / 1e9)
        self.decode_s.observe(decode_s)
        self.inference_s.observe((times.end_ns - times.first_plan_ns) / 1e9)
        per_sample = num_tokens // spec.num_samples
        if per_sample > 1:
            numbers.per_token_s.observe(decode_s / (per_sample - 1))
