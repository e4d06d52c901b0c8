"""Suggestions for misspelled names."""

from __future__ import annotations

import difflib
from collections.abc import Collection

_ELSEWHERE = {
    **dict.fromkeys(
        ("ctx_size", "n_ctx", "num_ctx", "context_length", "max_seq_len", "max_total_tokens"), "max_model_len"
    ),
    **dict.fromkeys(("n_predict", "num_predict", "max_new_tokens", "max_output_tokens"), "max_tokens"),
    **dict.fromkeys(("parallel", "n_parallel", "num_parallel", "max_running_requests"), "max_num_seqs"),
    **dict.fromkeys(("num_prompts", "request_count"), "num_requests"),
    **dict.fromkeys(("api_key", "api_keys"), "http_api_key_file"),
    **dict.fromkeys(("mem_fraction_static", "cuda_memory_fraction"), "gpu_memory_utilization"),
    **dict.fromkeys(("model_id", "model_path", "hf_repo"), "model"),
    **dict.fromkeys(("tp", "tp_size", "num_shard"), "tensor_parallel_size"),
    **dict.fromkeys(("gpu_layers", "n_gpu_layers", "ngl"), "device"),
    **dict.fromkeys(("model_draft", "draft_model", "speculative_draft_model_path"), "speculative_model"),
    "alias": "served_model_name",
    "cache_type_k": "kv_cache_dtype",
    "chunked_prefill_size": "max_num_batched_tokens",
    "enable_auto_tool_choice": "tool_call_parser",
    "max_tokens": "max_model_len",
    "quantize": "quantization",
    "threads": "num_threads",
    "c": "max_model_len",
    "m": "model",
    "t": "num_threads",
}
"""Names in vLLM, SGLang, TGI, llama.cpp and ollama, and the name here of what does the same or comes nearest."""
_SURE = 0.85  # similarity of a name and its misspelling; names of different options are less similar


def misspelling_of(name: str, known: Collection[str]) -> str:
    """The known name that this name clearly misspells; empty if there is none."""
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=_SURE)), "")


def suggestion(name: str, known: Collection[str], prefix: str = "") -> str:
    """The end of a sentence about an unknown name: similar known names; empty if there are none.

    A name that another program has is answered with the one here. A `prefix` that all names share does not count as
    similarity.
    """
    same = next((other for other in known if _bare(other, prefix) == _bare(name, prefix)), None)
    if same is not None:  # with other dashes or letters
        return f"; did you mean {same}?"
    here = _ELSEWHERE.get(_bare(name, prefix))
    counterpart = next((other for other in known if _bare(other, prefix) == here), None)
    if counterpart is not None:
        return f"; here it is {counterpart}"
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
