"""vLLM's v1 scheduler under the load of `scheduler_cost`: `schedule` is its plan, `update_from_output` its apply.

It runs in its own process and needs only vllm: cases come as JSON lines on stdin, `{"case": …, "steps", "seed"}`,
metrics go as JSON lines to stdout. There is no model: the scheduler runs without a GPU, and the results are synthetic.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common.scheduler_load import (
    BLOCK_SIZE,
    EOS,
    PREFILL_BUDGET,
    TOKEN,
    WARM_UP_STEPS,
    Case,
    StepTimes,
    leavers,
)
from benchmarks.peers.answering import answering

_SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "torch_dtype": "float32",
}


def _vllm(module: str, name: str) -> Any:
    """Import by string, because vllm is not installed where this benchmark is type-checked and tested."""
    return getattr(importlib.import_module(f"vllm.{module}"), name)


class Peer:
    """A vLLM scheduler with synthetic model results."""

    def __init__(self, case: Case, num_steps: int, seed: int, folder: Path) -> None:
        self._case = case
        self._joiners = case.joiner_prompts(seed)
        self._num_steps = 0
        self._num_requests = 0
        self._hasher = _block_hasher() if case.prefix_cache else None
        self._scheduler = _make_scheduler(case, num_steps, folder)
        self._request, self._params = _vllm("v1.request", "Request"), _vllm("sampling_params", "SamplingParams")
        self._output = _vllm("v1.outputs", "ModelRunnerOutput")
        self._start(case.prompts(seed))

    def measure(self, num_steps: int) -> StepTimes:
        """Time steps; raises RuntimeError for an unexpected step."""
        for _ in range(WARM_UP_STEPS if self._case.churn else 0):
            self._join()
            self._update(self._scheduler.schedule(), self._case.num_changing)
        gc.collect()
        times, clock = StepTimes(), time.process_time_ns
        for _ in range(num_steps):
            added = self._join()
            begin = clock()
            plan = self._scheduler.schedule()
            planned = clock()
            sent = pickle.dumps(plan, protocol=pickle.HIGHEST_PROTOCOL)
            converted = clock()
            applied, outputs = self._update(plan, self._case.num_changing)
            self._check(plan, outputs)
            times.add(added, planned - begin, converted - planned, applied, len(sent))
        return times

    def _start(self, prompts: list[tuple[int, ...]]) -> None:
        """Run all requests until each has a token."""
        for prompt in prompts:
            self._add(prompt)
        running = self._scheduler.running
        while len(running) < len(prompts) or any(not request.num_output_tokens for request in running):
            self._update(self._scheduler.schedule(), num_ending=0)
            running = self._scheduler.running

    def _add(self, prompt: tuple[int, ...]) -> None:
        self._num_requests += 1
        params = self._params(temperature=0.0, max_tokens=100_000, stop_token_ids=[])
        params.update_from_generation_config({}, EOS)
        request = self._request(
            request_id=str(self._num_requests),
            prompt_token_ids=list(prompt),
            sampling_params=params,
            pooling_params=None,
            block_hasher=self._hasher,
        )
        self._scheduler.add_request(request)

    def _join(self) -> int:
        prompts = [next(self._joiners) for _ in range(self._case.num_changing)]
        begin = time.process_time_ns()
        for prompt in prompts:
            self._add(prompt)
        return time.process_time_ns() - begin

    def _update(self, plan: Any, num_ending: int) -> tuple[int, Any]:
        """Give a token to each request whose prompt is computed; returns nanoseconds and the requests' outputs."""
        self._num_steps += 1
        ids = list(plan.num_scheduled_tokens)
        known = self._scheduler.requests
        tokens = [[TOKEN] if known[i].num_computed_tokens >= known[i].num_tokens else [] for i in ids]
        for index in leavers(self._num_steps, len(ids), num_ending):
            if tokens[index]:
                tokens[index] = [EOS]
        output = self._output(
            req_ids=ids, req_id_to_index={name: index for index, name in enumerate(ids)}, sampled_token_ids=tokens
        )
        begin = time.process_time_ns()
        outputs = self._scheduler.update_from_output(plan, output)
        return time.process_time_ns() - begin, outputs

    def _check(self, plan: Any, outputs: Any) -> None:
        case, made = self._case, [output for each in outputs.values() for output in each.outputs]
        ended = sum(output.finish_reason is not None for output in made)
        joined = len(plan.scheduled_new_reqs)
        if len(plan.num_scheduled_tokens) != case.running or joined != case.num_changing or ended != case.num_changing:
            raise RuntimeError(f"{case}: {len(plan.num_scheduled_tokens)} ran, {joined} joined, {ended} ended")
        if sum(len(output.new_token_ids) for output in made) != case.running:
            raise RuntimeError(f"{case}: {len(made)} outputs instead of {case.running}")


def _block_hasher() -> Callable[..., Any]:
    sha256 = _vllm("utils.hashing", "sha256")
    _vllm("v1.core.kv_cache_utils", "init_none_hash")(sha256)
    hasher: Callable[..., Any] = _vllm("v1.core.kv_cache_utils", "get_request_block_hasher")(BLOCK_SIZE, sha256)
    return hasher


def _make_scheduler(case: Case, num_steps: int, folder: Path) -> Any:
    length = 2 * case.longest(num_steps)
    (folder / "config.json").write_text(json.dumps({**_SHAPE, "max_position_embeddings": length}), encoding="utf-8")
    num_blocks = case.num_blocks(num_steps)
    config, interface = "config", "v1.kv_cache_interface"
    cache = _vllm(config, "CacheConfig")(block_size=BLOCK_SIZE, enable_prefix_caching=case.prefix_cache)
    cache.num_gpu_blocks = num_blocks
    whole = _vllm(config, "VllmConfig")(
        model_config=_vllm(config, "ModelConfig")(
            model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=length
        ),
        scheduler_config=_vllm(config, "SchedulerConfig")(
            max_num_seqs=case.running,
            max_num_batched_tokens=max(PREFILL_BUDGET, case.running, length),
            max_model_len=length,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        cache_config=cache,
        device_config=_vllm(config, "DeviceConfig")("cpu"),
    )
    layer = _vllm(interface, "FullAttentionSpec")(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=64, dtype=importlib.import_module("torch").float32
    )
    return _vllm("v1.core.sched.scheduler", "Scheduler")(
        vllm_config=whole,
        kv_cache_config=_vllm(interface, "KVCacheConfig")(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[_vllm(interface, "KVCacheGroupSpec")(["layer"], layer)],
        ),
        structured_output_manager=_vllm("v1.structured_output", "StructuredOutputManager")(whole),
        block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        log_stats=False,
    )


def main() -> None:
    """Report the version, then answer each case until stdin ends. Output of vllm goes to stderr."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with answering() as answer, tempfile.TemporaryDirectory() as folder:
        answer({"version": importlib.import_module("vllm").__version__})
        for line in sys.stdin:
            question = json.loads(line)
            peer = Peer(Case(**question["case"]), question["steps"], question["seed"], Path(folder))
            answer(peer.measure(question["steps"]).metrics())


if __name__ == "__main__":
    main()
