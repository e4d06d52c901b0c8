"""Suggestions for misspelled names."""

from __future__ import annotations

import difflib
from collections.abc import Collection

_ELSEWHERE = {
    **dict.fromkeys(
        ("ctx_size", "n_ctx", "num_ctx", "context_length", "max_seq_len", "max_total_tokens"), "max_model_len"
    ),
    **dict.fromkeys(("n_predict", "num_predict", "max_new_tokens"), "max_tokens"),
    **dict.fromkeys(("max_output_tokens", "max_completion_tokens"), "max_tokens"),
    **dict.fromkeys(("parallel", "n_parallel", "np", "num_parallel", "max_running_requests"), "max_num_seqs"),
    **dict.fromkeys(("max_batch_prefill_tokens", "ubatch_size", "ub"), "max_num_batched_tokens"),
    **dict.fromkeys(("num_prompts", "request_count"), "num_requests"),
    **dict.fromkeys(("api_key", "api_keys"), "http_api_key_file"),
    **dict.fromkeys(("mem_fraction_static", "cuda_memory_fraction"), "gpu_memory_utilization"),
    **dict.fromkeys(("model_id", "model_path", "hf_repo", "hf"), "model"),
    **dict.fromkeys(("tp", "tp_size", "num_shard"), "tensor_parallel_size"),
    **dict.fromkeys(("gpu_layers", "n_gpu_layers", "ngl"), "device"),
    **dict.fromkeys(("model_draft", "md", "draft_model", "speculative_draft_model_path"), "speculative_model"),
    **dict.fromkeys(("draft_max", "draft_n", "speculative_num_draft_tokens"), "num_speculative_tokens"),
    **dict.fromkeys(("speculative_config", "speculative_algorithm"), "speculative"),
    **dict.fromkeys(("cache_type_k", "cache_type_v", "ctk", "ctv"), "kv_cache_dtype"),
    **dict.fromkeys(("data_parallel_size", "dp", "dp_size"), "executors"),
    **dict.fromkeys(("enable_lora", "lora_modules"), "lora"),
    **dict.fromkeys(("flash_attn", "fa"), "attention_backend"),
    **dict.fromkeys(("grammar", "json_schema", "regex", "ebnf"), "structured_outputs"),
    **dict.fromkeys(("enable_thinking", "thinking"), "chat_template_kwargs"),
    **dict.fromkeys(("content", "inputs"), "prompt"),
    "alias": "served_model_name",
    "allowed_origins": "http_cors_origin",
    "chunked_prefill_size": "max_num_batched_tokens",
    "disable_log_stats": "log_stats_interval_s",
    "enable_auto_tool_choice": "tool_call_parser",
    "enable_log_requests": "log_requests",
    "max_tokens": "max_model_len",
    "quantize": "quantization",
    "random_seed": "seed",
    "repeat_penalty": "repetition_penalty",
    "scheduling_policy": "order",
    "ssl_certfile": "http_tls_cert",
    "ssl_keyfile": "http_tls_key",
    "stop_sequences": "stop",
    "swap_space": "num_cpu_blocks",
    "threads": "num_threads",
    "c": "max_model_len",
    "m": "model",
    "t": "num_threads",
}
"""Names in vLLM, SGLang, TGI, llama.cpp, ollama and APIs, and the name here of what does the same or comes nearest."""
_CHUNKED = "prompts are always computed in chunks (max_num_batched_tokens)"
_CONSTRAINTS = "constraints are compiled by llguidance; no other is needed"
_DOWNLOADS = "huggingface-hub's own variables hold: HF_TOKEN, HF_HOME, HF_ENDPOINT (docs/hub.md)"
_WHY_NOT = {
    **dict.fromkeys(("enable_chunked_prefill", "no_enable_chunked_prefill"), _CHUNKED),
    **dict.fromkeys(("guided_decoding_backend", "structured_outputs_config", "grammar_backend"), _CONSTRAINTS),
    **dict.fromkeys(("download_dir", "hf_token", "hft"), _DOWNLOADS),
    **dict.fromkeys(("task", "runner"), "the model's own architecture says what it does"),
    "cache_prompt": "prefixes are cached by themselves",
    "cont_batching": "batches are always continuous",
    "disable_log_requests": "requests are not logged unless --log-requests is given",
    "do_sample": "a temperature of 0 is greedy",
    "jinja": "templates are always rendered by Jinja",
    "metrics": "metrics are always served, at /metrics of --http too",
    "trust_remote_code": "no code of a model is run; docs/models.md has the architectures",
}
"""Names there of what needs no name here, and why."""
_SURE = 0.85  # similarity of a name and its misspelling; names of different options are less similar


def misspelling_of(name: str, known: Collection[str]) -> str:
    """The known name that this name clearly misspells; empty if there is none."""
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=_SURE)), "")


def suggestion(name: str, known: Collection[str], prefix: str = "") -> str:
    """The end of a sentence about an unknown name: similar known names; empty if there are none.

    A name that another program has is answered with the one here, or with why none is needed. A `prefix` that all names
    share does not count as similarity.
    """
    same = next((other for other in known if _bare(other, prefix) == _bare(name, prefix)), None)
    if same is not None:  # with other dashes or letters
        return f"; did you mean {same}?"
    here = _ELSEWHERE.get(_bare(name, prefix))
    counterpart = next((other for other in known if _bare(other, prefix) == here), None)
    if counterpart is not None:
        return f"; here it is {counterpart}"
    if (why := _WHY_NOT.get(_bare(name, prefix))) is not None:
        return f": {why}"
    bare, given = {other.removeprefix(prefix) for other in known}, name.removeprefix(prefix)
    close = difflib.get_close_matches(given, sorted(bare), n=3, cutoff=0.6)
    if close and _likeness(given, close[0]) >= _SURE:  # the others are no candidates then
        close = close[:1]
    return f"; did you mean {' or '.join(prefix + other for other in close)}?" if close else ""


def _bare(name: str, prefix: str) -> str:
    """A name as a field: without dashes before it and the prefix."""
    return name.removeprefix(prefix).lstrip("-").replace("-", "_").lower()


def _likeness(name: str, other: str) -> float:
    return difflib.SequenceMatcher(None, other, name).ratio()
