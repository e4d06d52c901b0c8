"""The scheduler's metric families. docs/metrics.md is made from these: change them, then `make docs`.

Those that show a gauge as it is stand in its row (`plan_loop/gauges.py`).
"""

from __future__ import annotations

from cadenza_common.metrics.common import LISTENER_DEFINITIONS, LOOP_DEFINITIONS
from cadenza_common.metrics.families import Definition, Kind
from scheduler_svc.plan_loop.gauges import GAUGES, Gauge

_ENGINE = ("model_name", "engine")
_TENANT, _LANE = ("tenant",), ("executor",)


def _of_gauge(gauge: Gauge, name: str) -> Definition:
    labels = _ENGINE if name.startswith("vllm:") else _LANE if name.startswith("cadenza_lane_") else ()
    kind: Kind = "gauge" if gauge.of_counts is None else "counter"
    return Definition(name, kind, gauge.unit, gauge.families[name], labels)


GAUGE_FAMILIES = tuple((gauge, _of_gauge(gauge, name)) for gauge in GAUGES for name in gauge.families)


def _ordered(labels: tuple[str, ...], *entries: Definition | str) -> tuple[Definition, ...]:
    """The entries, with a gauge's family in place of its name; then the other gauges' families with these labels."""
    rest = {family.name: family for _, family in GAUGE_FAMILIES if family.labels == labels}
    return (*(rest.pop(each) if isinstance(each, str) else each for each in entries), *rest.values())


def _vllm(kind: Kind, unit: str, names: str, meaning: str, labels: tuple[str, ...] = ()) -> tuple[Definition, ...]:
    """A family of vLLM, under each of its names."""
    return tuple(Definition(f"vllm:{name}", kind, unit, meaning, (*_ENGINE, *labels)) for name in names.split())


VLLM_DEFINITIONS = _ordered(
    _ENGINE,
    "vllm:num_requests_running",
    *_vllm("gauge", "requests", "num_requests_waiting", "Requests that wait, preempted ones included."),
    *_vllm(
        "gauge", "requests", "num_requests_waiting_by_reason",
        "The same by reason; capacity: for blocks, slots or their turn; deferred: for an executor, since none serves.",
        ("reason",),
    ),
    *_vllm(
        "gauge", "share", "kv_cache_usage_perc gpu_cache_usage_perc",
        "Used device blocks of all executors, 0 to 1. Cached blocks without holders are free.",
    ),
    "vllm:prefix_cache_queries_total",
    "vllm:gpu_prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:gpu_prefix_cache_hits_total",
    *_vllm("gauge", "share", "gpu_prefix_cache_hit_rate", "Hits divided by queries, since the start."),
    "vllm:num_preemptions_total",
    *_vllm("counter", "tokens", "prompt_tokens_total", "Prompt tokens of requests that have their first token."),
    *_vllm("counter", "tokens", "prompt_tokens_cached_total", "Those that came from the prefix cache."),
    "vllm:generation_tokens_total",
    *_vllm(
        "counter", "sequences", "spec_decode_num_drafts_total",
        "Speculative decoding: sequences that had drafts, one for each step.",
    ),
    *_vllm("counter", "tokens", "spec_decode_num_draft_tokens_total", "Drafts that were checked."),
    *_vllm("counter", "tokens", "spec_decode_num_accepted_tokens_total", "Drafts that were accepted."),
    *_vllm(
        "counter", "tokens", "spec_decode_num_accepted_tokens_per_pos_total",
        "Those by position: 0 is the first draft of a sequence in a step.", ("position",),
    ),
    *_vllm(
        "counter", "requests", "request_success_total",
        "Requests that ended; stop: EOS, stop token or stop string; length; abort: by the client or a deadline; error.",
        ("finished_reason",),
    ),
    *_vllm(
        "counter", "requests", "admission_rejections_total",
        "Requests refused because a limit was reached. max_num_queued_reqs is --max-queued-requests.", ("reason",),
    ),
    *_vllm(
        "histogram", "tokens", "iteration_tokens_total",
        "Tokens that a step computed, drafts included. It is a histogram.",
    ),
    *_vllm("histogram", "tokens", "request_prompt_tokens", "Prompt tokens of requests that ended."),
    *_vllm("histogram", "tokens", "request_generation_tokens", "Output tokens of requests that ended."),
    *_vllm("histogram", "seconds", "time_to_first_token_seconds", "From the arrival of a request to its first token."),
    *_vllm(
        "histogram", "seconds", "inter_token_latency_seconds time_per_output_token_seconds",
        "Between two tokens of a sequence, one value for each token; without beams. Tokens of one step share its time.",
    ),
    *_vllm(
        "histogram", "seconds", "request_time_per_output_token_seconds",
        "Mean time between two tokens of a request that ended.",
    ),
    *_vllm("histogram", "seconds", "e2e_request_latency_seconds", "From the arrival of a request to its end."),
    *_vllm("histogram", "seconds", "request_queue_time_seconds", "From the arrival of a request to its first step."),
    *_vllm("histogram", "seconds", "request_prefill_time_seconds", "From its first step to its first token."),
    *_vllm("histogram", "seconds", "request_decode_time_seconds", "From its first token to its end."),
    *_vllm("histogram", "seconds", "request_inference_time_seconds", "From its first step to its end."),
    Definition(
        "vllm:cache_config_info", "gauge", "", "1; the labels have the blocks of all executors.",
        ("engine", "block_size", "num_gpu_blocks", "num_cpu_blocks", "enable_prefix_caching"),
    ),
    Definition(
        "vllm:lora_requests_info", "gauge", "unix seconds",
        "The time of the scrape; the labels have the names of the LoRA adapters of running and of waiting requests, "
        "joined by commas, and how many adapters the executors run at once, all together.",
        ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    ),
)  # fmt: skip

TENANT_DEFINITIONS = (
    Definition("cadenza_requests_admitted_total", "counter", "requests", "Requests that were admitted.", _TENANT),
    Definition(
        "cadenza_tenant_requests", "gauge", "requests", "Requests that have not ended, by state (waiting, running).",
        ("tenant", "state"),
    ),
    Definition(
        "cadenza_tenant_queued_tokens", "gauge", "tokens", "Prompt tokens of requests that have not begun to run.",
        _TENANT,
    ),
    Definition(
        "cadenza_requests_ended_total", "counter", "requests",
        "Requests that ended, by FinishDetail; failed: with an error instead.", ("tenant", "reason"),
    ),
    Definition(
        "cadenza_admission_rejections_total", "counter", "requests",
        "Requests refused because a limit of the service or of their tenant was reached.", ("tenant", "limit"),
    ),
    Definition(
        "cadenza_prompt_tokens_total", "counter", "tokens", "Prompt tokens of requests that have their first token.",
        _TENANT,
    ),
    Definition(
        "cadenza_cached_prompt_tokens_total", "counter", "tokens", "Those that came from the prefix cache.", _TENANT
    ),
    Definition("cadenza_output_tokens_total", "counter", "tokens", "Output tokens.", _TENANT),
    Definition(
        "cadenza_time_to_first_token_seconds", "histogram", "seconds", "TTFT: from arrival to the first token.",
        _TENANT,
    ),
    Definition(
        "cadenza_time_per_output_token_seconds", "histogram", "seconds",
        "TPOT: mean time between two tokens of a request that ended.", _TENANT,
    ),
    Definition("cadenza_queue_time_seconds", "histogram", "seconds", "From arrival to the first step.", _TENANT),
    Definition("cadenza_request_time_seconds", "histogram", "seconds", "From arrival to the end.", _TENANT),
)  # fmt: skip
LANE_DEFINITIONS = _ordered(
    _LANE,
    Definition("cadenza_lane_serving", "gauge", "0 or 1", "Whether the executor takes requests now.", _LANE),
    Definition("cadenza_lane_stalled_seconds", "gauge", "seconds", "For how long its step has hung.", _LANE),
    Definition("cadenza_lane_inflight_plans", "gauge", "plans", "Plans without a result.", _LANE),
    Definition(
        "cadenza_lane_requests", "gauge", "requests", "Requests there; waiting: they wait for this executor alone.",
        ("executor", "state"),
    ),
    Definition(
        "cadenza_lane_kv_blocks", "gauge", "blocks",
        "KV blocks by tier (device, host) and state (used, cached: without holders, free: empty).",
        ("executor", "tier", "state"),
    ),
    "cadenza_lane_stored_tokens",
    Definition("cadenza_lane_resident_bytes", "gauge", "bytes", "Memory of its process; 0: unknown.", _LANE),
    Definition("cadenza_lane_sessions_ended_total", "counter", "sessions", "Sessions with it that ended.", _LANE),
    "cadenza_lane_steps_total",
    "cadenza_lane_output_tokens_total",
    Definition(
        "cadenza_lane_computed_prompt_tokens_total", "counter", "tokens",
        "Prompt tokens computed, those that were computed again included.", _LANE,
    ),
    Definition(
        "cadenza_lane_preemptions_total", "counter", "preemptions",
        "Preemptions by kind: recompute discards the KV, swap moves it to the host.", ("executor", "kind"),
    ),
    "cadenza_lane_prefix_queried_tokens_total",
    Definition(
        "cadenza_lane_prefix_hit_tokens_total", "counter", "tokens", "Tokens found, by tier.", ("executor", "tier")
    ),
    Definition(
        "cadenza_lane_max_drafts", "gauge", "drafts",
        "The most drafts of a sequence in the newest step with a decode batch; 0: none.", _LANE,
    ),
    Definition(
        "cadenza_lane_drafts_total", "counter", "drafts", "Drafts checked, by position; 0: the first in a step.",
        ("executor", "position"),
    ),
    Definition(
        "cadenza_lane_accepted_drafts_total", "counter", "drafts", "Those that were accepted.",
        ("executor", "position"),
    ),
    Definition(
        "cadenza_lane_decodes_total", "counter", "sequences",
        "Sequences of the decode batch that got tokens, one for each step.", _LANE,
    ),
    Definition("cadenza_lane_decoded_tokens_total", "counter", "tokens", "Tokens that they got.", _LANE),
    Definition(
        "cadenza_lane_drafting_seconds_total", "counter", "seconds",
        "Time of steps with drafts that can be compared with steps without: see below.", _LANE,
    ),
    Definition(
        "cadenza_lane_without_drafts_seconds_total", "counter", "seconds",
        "Time that steps without drafts take for the same tokens: see below.", _LANE,
    ),
    Definition(
        "cadenza_lane_adapters", "gauge", "adapters", "LoRA adapters by state (loaded, loading).", ("executor", "state")
    ),
    Definition("cadenza_lane_max_adapters", "gauge", "adapters", "The most that it has loaded.", _LANE),
    Definition(
        "cadenza_lane_adapter_loads_total", "counter", "loads",
        "Loads of LoRA adapters that ended; loaded, failed, or changed: the files are not those that were loaded "
        "before.", ("executor", "result"),
    ),
    Definition(
        "cadenza_lane_adapter_unloads_total", "counter", "unloads",
        "Unloads of LoRA adapters; evicted: for another one; removed: its name was taken away; refused: changed.",
        ("executor", "reason"),
    ),
    Definition(
        "cadenza_lane_adapter_load_seconds", "histogram", "seconds",
        "From the message that loads a LoRA adapter to its answer, loads before it included.", _LANE,
    ),
    Definition("cadenza_lane_step_seconds", "histogram", "seconds", "Time of a step on the executor.", _LANE),
    Definition(
        "cadenza_lane_host_gap_seconds", "histogram", "seconds",
        "Time between two results beyond the step's own, while sequences ran: the executor waited for its plan.", _LANE,
    ),
    Definition(
        "cadenza_lane_inter_token_latency_seconds", "histogram", "seconds",
        "ITL: between two tokens of a sequence; without beams. With drafts, tokens of one step share its time.", _LANE,
    ),
    Definition(
        "cadenza_lane_step_tokens", "histogram", "tokens", "Tokens that a step computed, drafts included.", _LANE
    ),
    Definition("cadenza_lane_step_sequences", "histogram", "sequences", "Sequences in a step.", _LANE),
    Definition("cadenza_lane_plan_bytes", "histogram", "bytes", "Size of a plan on the wire.", _LANE),
)  # fmt: skip
SERVICE_DEFINITIONS = _ordered(
    (),
    Definition("cadenza_healthy", "gauge", "0 or 1", "Whether health says SERVING."),
    Definition("cadenza_draining", "gauge", "0 or 1", "Whether new requests are refused until a resume."),
    Definition("cadenza_journal_writable", "gauge", "0 or 1", "Whether the journal can be written; 1 without one."),
    Definition("cadenza_adapters", "gauge", "adapters", "LoRA adapters that have names."),
    Definition("cadenza_executors", "gauge", "executors", "Executors that are configured."),
    Definition("cadenza_executors_serving", "gauge", "executors", "Those that take requests now."),
    Definition("cadenza_client_streams", "gauge", "streams", "Open Generate and Session streams."),
    Definition("cadenza_kept_result_bytes", "gauge", "bytes", "Kept results of finished requests."),
    Definition(
        "cadenza_requests_refused_total", "counter", "requests", "Requests that never ran, by status code.", ("code",)
    ),
    Definition(
        "cadenza_adapter_requests_refused_total",
        "counter",
        "requests",
        "Requests that were refused or ended for their LoRA adapter; forbidden: to their tenant; unknown: there is "
        "none; failed: no executor can load it; timeout: none has within --lora-load-timeout-s.",
        ("reason",),
    ),
    Definition("cadenza_faults_total", "counter", "faults", "Faults by kind: see below.", ("kind",)),
    Definition("cadenza_uptime_seconds", "gauge", "seconds", "Since the start."),
)
DEFINITIONS = (
    *VLLM_DEFINITIONS, *SERVICE_DEFINITIONS, *TENANT_DEFINITIONS, *LANE_DEFINITIONS,
    *LISTENER_DEFINITIONS, *LOOP_DEFINITIONS,
)  # fmt: skip
