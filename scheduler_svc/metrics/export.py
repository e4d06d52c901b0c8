"""A snapshot as metric families."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from cadenza_common.metrics.common import add_listener, add_loop_lag
from cadenza_common.metrics.families import Scrape
from cadenza_common.metrics.histogram import Histogram, sum_of
from scheduler_svc.core.lanes.lane_counts import DraftCounts
from scheduler_svc.core.types import FinishDetail
from scheduler_svc.metrics import buckets
from scheduler_svc.metrics.definitions import DEFINITIONS, GAUGE_FAMILIES
from scheduler_svc.metrics.lane_numbers import LaneNumbers
from scheduler_svc.metrics.request_numbers import FAILED, TenantNumbers
from scheduler_svc.metrics.snapshot import ScrapeSnapshot
from scheduler_svc.plan_loop.ports import ExecutorState
from scheduler_svc.tenants.quotas import TenantLoad

_ENGINE = "0"
"""vLLM's label for one of several engines. All executors of this scheduler are one."""
_LENGTH = (FinishDetail.MAX_TOKENS, FinishDetail.MAX_MODEL_LEN, FinishDetail.KV_CAPACITY)
_REASONS = {
    **dict.fromkeys((FinishDetail.EOS, FinishDetail.STOP_TOKEN, FinishDetail.STOP_STRING), "stop"),
    **dict.fromkeys(_LENGTH, "length"),
    **dict.fromkeys((FinishDetail.ABORTED, FinishDetail.DEADLINE), "abort"),
}
_VLLM_REASONS = {FAILED: "error", **{each.name.lower(): _REASONS.get(each, "error") for each in FinishDetail}}
_COUNTED = ("stop", "length", "abort", "error")
_QUEUE_LIMIT = "max_num_queued_reqs"
_VLLM_LIMITS = {"max_queued_requests": _QUEUE_LIMIT, "max_queued_tokens": "max_num_queued_tokens"}
"""vLLM's names of limits. Others keep their own."""


def scrape(snapshot: ScrapeSnapshot) -> Scrape:
    """All families of the scheduler."""
    result = Scrape(DEFINITIONS)
    _add_vllm(result, snapshot)
    _add_service(result, snapshot)
    for name, tenant in snapshot.tenants.items():
        _add_tenant(result, name, tenant)
    for load in snapshot.tenant_loads:
        _add_tenant_load(result, load)
    for state in snapshot.executors:
        _add_state(result, state)
    lanes = _by_target(snapshot.lanes)
    _add_gauges(result, snapshot, lanes)
    for target, lane in lanes.items():
        _add_lane(result, target, lane)
    sizes: dict[str, list[Histogram]] = {}
    for target, plan_bytes in snapshot.service.plan_bytes:
        sizes.setdefault(target, []).append(plan_bytes)
    for target, histograms in sizes.items():
        result.add_histogram("cadenza_lane_plan_bytes", sum_of(histograms, buckets.PLAN_BYTES), target)
    add_listener(result, snapshot.service.listener)
    add_loop_lag(result, snapshot.service.loop_lag, snapshot.service.max_loop_lag_s)
    return result


def _by_target(lanes: Iterable[LaneNumbers]) -> dict[str, LaneNumbers]:
    """The numbers by address: an executor that was removed and added again has one series."""
    found: dict[str, LaneNumbers] = {}
    for lane in lanes:
        if lane.target in found:
            found[lane.target].add(lane)
        else:
            found[lane.target] = lane
    return found


def _engine(snapshot: ScrapeSnapshot) -> tuple[str, str]:
    """The values of vLLM's labels."""
    model = snapshot.service.model
    return "" if model is None else model.name, _ENGINE


def _add_gauges(result: Scrape, snapshot: ScrapeSnapshot, lanes: dict[str, LaneNumbers]) -> None:
    """The families that show a gauge as it is. Counts of an executor outlive it, what is true of it now does not."""
    engine = _engine(snapshot)
    for gauge, family in GAUGE_FAMILIES:
        if "executor" not in family.labels:
            result.add(family.name, getattr(snapshot.load, gauge.name), *(engine if family.labels else ()))
        elif gauge.of_counts is None:
            for state in snapshot.executors:
                result.add(family.name, getattr(state.load, gauge.name), state.target)
        else:
            for target, lane in lanes.items():
                result.add(family.name, gauge.of_counts(lane.counts), target)


def _add_vllm(result: Scrape, snapshot: ScrapeSnapshot) -> None:
    model, load, tenants = snapshot.service.model, snapshot.load, snapshot.tenants.values()
    engine = _engine(snapshot)

    def add(names: str, value: float, *labels: str) -> None:
        for name in names.split():
            result.add(f"vllm:{name}", value, *engine, *labels)

    num_waiting = load.num_waiting + load.num_swapped
    add("num_requests_waiting", num_waiting)
    serves = any(_is_serving(state) for state in snapshot.executors)
    add("num_requests_waiting_by_reason", num_waiting if serves else 0, "capacity")
    add("num_requests_waiting_by_reason", 0 if serves else num_waiting, "deferred")
    usage = load.num_used_device_blocks / load.num_device_blocks if load.num_device_blocks else 0.0
    add("kv_cache_usage_perc gpu_cache_usage_perc", usage)
    add("gpu_prefix_cache_hit_rate", load.num_prefix_hits / load.num_prefix_queries if load.num_prefix_queries else 0.0)
    add("prompt_tokens_total", sum(each.num_prompt_tokens for each in tenants))
    add("prompt_tokens_cached_total", sum(each.num_cached_tokens for each in tenants))
    ends, rejections = Counter(dict.fromkeys(_COUNTED, 0)), Counter({_QUEUE_LIMIT: 0})
    for each in tenants:
        for name, count in each.ends.items():
            ends[_VLLM_REASONS[name]] += count
    for tenant in snapshot.tenant_loads:
        for limit, count in tenant.rejections.items():
            rejections[_VLLM_LIMITS.get(limit, limit)] += count
    _add_vllm_drafts(add, [lane.counts.drafts for lane in snapshot.lanes])
    for reason, count in ends.items():
        add("request_success_total", count, reason)
    for limit, count in rejections.items():
        add("admission_rejections_total", count, limit)
    _add_vllm_histograms(result, snapshot, engine)
    _add_vllm_adapters(result, snapshot)
    if model is not None:
        caching = str(snapshot.service.prefix_caching)
        numbers = (model.block_size, load.num_device_blocks, load.num_host_blocks)
        result.add("vllm:cache_config_info", 1, _ENGINE, *map(str, numbers), caching)


def _add_vllm_drafts(add: Callable[..., None], lanes: Iterable[DraftCounts]) -> None:
    """What vLLM calls a draft is the drafts of one sequence in one step."""
    drafts = DraftCounts()
    for each in lanes:
        drafts.add(each.drafted, each.accepted)
    add("spec_decode_num_drafts_total", drafts.drafted[0] if drafts.drafted else 0)
    add("spec_decode_num_draft_tokens_total", drafts.num_drafts)
    add("spec_decode_num_accepted_tokens_total", drafts.num_accepted)
    for position, count in enumerate(drafts.accepted):
        add("spec_decode_num_accepted_tokens_per_pos_total", count, str(position))


def _add_vllm_adapters(result: Scrape, snapshot: ScrapeSnapshot) -> None:
    """Readers split the lists at commas, which no name has, and take the sample with the newest time."""
    uses = snapshot.adapter_uses
    most = sum(state.max_loras for state in snapshot.executors if state.connected)
    running = ",".join(use.name for use in uses if use.num_running)
    waiting = ",".join(use.name for use in uses if use.num_waiting)
    result.add("vllm:lora_requests_info", snapshot.service.wall_time_s, str(most), running, waiting)


def _add_vllm_histograms(result: Scrape, snapshot: ScrapeSnapshot, engine: tuple[str, str]) -> None:
    def add(names: str, histogram: Histogram, bounds: tuple[float, ...]) -> None:
        for name in names.split():
            result.add_histogram(f"vllm:{name}", histogram, *engine, bounds=bounds)

    def of_tenants(get: Callable[[TenantNumbers], Histogram], bounds: tuple[float, ...]) -> Histogram:
        return sum_of([get(each) for each in snapshot.tenants.values()], bounds)

    def of_lanes(get: Callable[[LaneNumbers], Histogram], bounds: tuple[float, ...]) -> Histogram:
        return sum_of([get(each) for each in snapshot.lanes], bounds)

    first_token = of_tenants(lambda each: each.first_token_s, buckets.FIRST_TOKEN_S)
    add("time_to_first_token_seconds", first_token, buckets.VLLM_FIRST_TOKEN_S)
    token = of_lanes(lambda each: each.token_s, buckets.TOKEN_S)
    add("inter_token_latency_seconds time_per_output_token_seconds", token, buckets.VLLM_TOKEN_S)
    per_token = of_tenants(lambda each: each.per_token_s, buckets.TOKEN_S)
    add("request_time_per_output_token_seconds", per_token, buckets.VLLM_TOKEN_S)
    add("e2e_request_latency_seconds", of_tenants(lambda each: each.total_s, buckets.REQUEST_S), buckets.VLLM_REQUEST_S)
    add("request_queue_time_seconds", of_tenants(lambda each: each.queue_s, buckets.REQUEST_S), buckets.VLLM_REQUEST_S)
    step_tokens = of_lanes(lambda each: each.step_tokens, buckets.VLLM_STEP_TOKENS)
    add("iteration_tokens_total", step_tokens, buckets.VLLM_STEP_TOKENS)
    for name, histogram in snapshot.request_histograms.items():
        exported = buckets.VLLM_REQUEST_S if name.endswith("_seconds") else buckets.VLLM_REQUEST_TOKENS
        result.add_histogram(name, histogram, *engine, bounds=exported)


def _add_service(result: Scrape, snapshot: ScrapeSnapshot) -> None:
    service = snapshot.service
    values = {
        "healthy": snapshot.healthy,
        "draining": snapshot.draining,
        "journal_writable": service.journal_writable,
        "adapters": snapshot.num_adapters,
        "executors": len(snapshot.executors),
        "executors_serving": sum(map(_is_serving, snapshot.executors)),
        "client_streams": service.num_streams,
        "kept_result_bytes": service.num_kept_bytes,
        "uptime_seconds": snapshot.uptime_s,
    }
    for name, value in values.items():
        result.add(f"cadenza_{name}", float(value))
    for code, count in snapshot.refusals.items():
        result.add("cadenza_requests_refused_total", count, code)
    for reason, count in snapshot.adapter_refusals.items():
        result.add("cadenza_adapter_requests_refused_total", count, reason)
    for kind, count in snapshot.faults.items():
        result.add("cadenza_faults_total", count, kind)


def _add_tenant(result: Scrape, name: str, numbers: TenantNumbers) -> None:
    result.add("cadenza_requests_admitted_total", numbers.num_admitted, name)
    for reason, count in numbers.ends.items():
        result.add("cadenza_requests_ended_total", count, name, reason)
    result.add("cadenza_prompt_tokens_total", numbers.num_prompt_tokens, name)
    result.add("cadenza_cached_prompt_tokens_total", numbers.num_cached_tokens, name)
    result.add_histogram("cadenza_time_to_first_token_seconds", numbers.first_token_s, name)
    result.add_histogram("cadenza_time_per_output_token_seconds", numbers.per_token_s, name)
    result.add_histogram("cadenza_queue_time_seconds", numbers.queue_s, name)
    result.add_histogram("cadenza_request_time_seconds", numbers.total_s, name)


def _add_tenant_load(result: Scrape, load: TenantLoad) -> None:
    """What is counted where the tenant's limits are checked."""
    result.add("cadenza_tenant_requests", load.num_waiting, load.name, "waiting")
    result.add("cadenza_tenant_requests", load.num_running, load.name, "running")
    result.add("cadenza_tenant_queued_tokens", load.num_queued_tokens, load.name)
    result.add("cadenza_output_tokens_total", load.num_output_tokens, load.name)
    for limit, count in load.rejections.items():
        result.add("cadenza_admission_rejections_total", count, load.name, limit)


def _is_serving(state: ExecutorState) -> bool:
    return state.connected and not state.draining and not state.stalled_step_id


def _add_state(result: Scrape, state: ExecutorState) -> None:
    """What is true of an executor now; one that was removed has no such series any more."""
    load, target = state.load, state.target
    result.add("cadenza_lane_serving", _is_serving(state), target)
    result.add("cadenza_lane_stalled_seconds", state.stalled_s, target)
    result.add("cadenza_lane_inflight_plans", state.num_inflight_plans, target)
    result.add("cadenza_lane_max_drafts", state.max_drafts, target)
    counts = {"waiting": load.num_waiting, "running": load.num_running, "swapped": load.num_swapped}
    for name, count in counts.items():
        result.add("cadenza_lane_requests", count, target, name)
    tiers = {
        "device": (load.num_device_blocks, load.num_used_device_blocks, load.num_cached_device_blocks),
        "host": (load.num_host_blocks, load.num_used_host_blocks, load.num_cached_host_blocks),
    }
    for tier, (num_blocks, num_used, num_cached) in tiers.items():
        states = {"used": num_used, "cached": num_cached, "free": num_blocks - num_used - num_cached}
        for name, count in states.items():
            result.add("cadenza_lane_kv_blocks", count, target, tier, name)
    result.add("cadenza_lane_resident_bytes", state.resident_bytes, target)
    result.add("cadenza_lane_adapters", state.num_loaded_adapters, target, "loaded")
    result.add("cadenza_lane_adapters", state.num_loading_adapters, target, "loading")
    result.add("cadenza_lane_max_adapters", state.max_loaded_adapters, target)


def _add_lane(result: Scrape, target: str, lane: LaneNumbers) -> None:
    counts, prefixes = lane.counts, lane.counts.prefixes

    def add(name: str, value: float, *labels: str) -> None:
        result.add(f"cadenza_lane_{name}_total", value, target, *labels)

    add("sessions_ended", lane.num_sessions_ended)
    add("computed_prompt_tokens", lane.num_prompt_tokens)
    add("preemptions", counts.num_preemptions - counts.num_swap_preemptions, "recompute")
    add("preemptions", counts.num_swap_preemptions, "swap")
    add("prefix_hit_tokens", prefixes.num_hits - prefixes.num_host_hits, "device")
    add("prefix_hit_tokens", prefixes.num_host_hits, "host")
    for position, (num_drafted, num_accepted) in enumerate(
        zip(counts.drafts.drafted, counts.drafts.accepted, strict=True)
    ):
        add("drafts", num_drafted, str(position))
        add("accepted_drafts", num_accepted, str(position))
    add("decodes", lane.num_decodes)
    add("decoded_tokens", lane.num_decoded_tokens)
    add("drafting_seconds", lane.draft_gain.seconds)
    add("without_drafts_seconds", lane.draft_gain.seconds_without)
    for result_of_load, count in lane.adapters.loads.items():
        add("adapter_loads", count, result_of_load)
    for reason, count in lane.adapters.unloads.items():
        add("adapter_unloads", count, reason)
    result.add_histogram("cadenza_lane_adapter_load_seconds", lane.adapters.load_s, target)
    result.add_histogram("cadenza_lane_step_seconds", lane.step_s, target)
    result.add_histogram("cadenza_lane_host_gap_seconds", lane.gap_s, target)
    result.add_histogram("cadenza_lane_inter_token_latency_seconds", lane.token_s, target)
    result.add_histogram("cadenza_lane_step_tokens", lane.step_tokens, target)
    result.add_histogram("cadenza_lane_step_sequences", lane.step_sequences, target)
