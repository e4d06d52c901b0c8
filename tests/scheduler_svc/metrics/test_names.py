"""The names and labels that routers and dashboards read, as their sources have them, not as our definitions do."""

from __future__ import annotations

import pytest

from scheduler_svc.metrics.definitions import DEFINITIONS

LLM_D = {
    "vllm:num_requests_waiting": (),
    "vllm:num_requests_running": (),
    "vllm:kv_cache_usage_perc": (),
    "vllm:lora_requests_info": ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    "vllm:cache_config_info": ("block_size", "num_gpu_blocks"),
}
"""The endpoint picker of llm-d (factories.go)."""
PRODUCTION_STACK = {
    "vllm:num_requests_running": (),
    "vllm:num_requests_waiting": (),
    "vllm:gpu_cache_usage_perc": (),
    "vllm:gpu_prefix_cache_hit_rate": (),
    "vllm:gpu_prefix_cache_hits_total": (),
    "vllm:gpu_prefix_cache_queries_total": (),
}
"""vLLM's production-stack (engine_stats.py), which reads the old names."""
VLLM = {
    "vllm:time_to_first_token_seconds": (),
    "vllm:inter_token_latency_seconds": (),
    "vllm:request_time_per_output_token_seconds": (),
    "vllm:time_per_output_token_seconds": (),
    "vllm:e2e_request_latency_seconds": (),
    "vllm:request_queue_time_seconds": (),
    "vllm:request_prefill_time_seconds": (),
    "vllm:request_decode_time_seconds": (),
    "vllm:request_inference_time_seconds": (),
    "vllm:prompt_tokens_total": (),
    "vllm:generation_tokens_total": (),
    "vllm:prompt_tokens_cached_total": (),
    "vllm:prefix_cache_queries_total": (),
    "vllm:prefix_cache_hits_total": (),
    "vllm:num_preemptions_total": (),
    "vllm:request_success_total": ("finished_reason",),
    "vllm:iteration_tokens_total": (),
    "vllm:num_requests_waiting_by_reason": ("reason",),
    "vllm:admission_rejections_total": ("reason",),
    "vllm:spec_decode_num_drafts_total": (),
    "vllm:spec_decode_num_draft_tokens_total": (),
    "vllm:spec_decode_num_accepted_tokens_total": (),
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": ("position",),
}
"""vLLM 0.33."""


@pytest.mark.parametrize("names", [LLM_D, PRODUCTION_STACK, VLLM], ids=["llm-d", "production-stack", "vllm"])
def test_what_others_read_is_exported(names: dict[str, tuple[str, ...]]) -> None:
    labels = {each.name: set(each.labels) for each in DEFINITIONS}
    assert {name for name, expected in names.items() if not set(expected) <= labels.get(name, set())} == set()
    assert names.keys() <= labels.keys()
