"""How much KV memory do long contexts take where layers have windows, with KV groups and without?

The scheduler's core and an executor in one process; requests of one length wait for a pool of the same bytes. `12b` has
the KV of Gemma 3 12B (48 layers, 8 of them without a window, windows of 1,024, 8 KV heads of 256, bf16) on the
simulated executor, which checks what each row reads. `small` is a model of random weights with the same pattern of
layers on the CPU executor. Tokens must be equal in both ways.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.benchmark import Benchmark, positive, progress
from benchmarks.common.rows import BenchmarkError, OtherLoad, Row, make_row
from cadenza_common.plan.result import StepResult
from cadenza_common.plan.sampling import SequenceSampling
from cadenza_common.plan_wire.reading import plan_from_wire
from cadenza_common.plan_wire.results import result_from_wire, result_to_wire
from cadenza_common.plan_wire.writing import plan_to_wire
from executor_svc.config import ExecutorConfig
from executor_svc.cpu.runner import ModelRunner
from executor_svc.device.kv_layout import KVLayout, LayerKV
from executor_svc.models.loading import load_model
from executor_svc.plan.description import limits_of
from executor_svc.plan.limits import Limits
from executor_svc.simulated.executor import SimulatedStepExecutor
from executor_svc.startup.executors import make_device
from executor_svc.worker.step import StepExecutor
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.kv_groups import KVGroup
from scheduler_svc.core.outputs import StepOutputs
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import ExecutorSpec, RequestSpec
from scheduler_svc.engine.policies_from_options import policies_from_options

NAME = "window_memory"
SHAPES = ("12b", "small")
WAYS = {"one_group": False, "groups": True}
_BLOCK_SIZE, _STEP_TOKENS, _VOCAB = 16, 16_384, 1000
"""A step computes chunks of several prompts, as their chunks have 2,048 tokens at most where there are windows."""
_LAYERS, _PATTERN, _WINDOW = 48, 6, 1024
_SMALL: dict[str, Any] = {
    "vocab_size": _VOCAB, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 12, "num_attention_heads": 1,
    "num_key_value_heads": 1, "head_dim": 32, "sliding_window": _WINDOW, "sliding_window_pattern": _PATTERN,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _PooledExecutor:
    """An executor, and the bytes of its pool."""

    executor: SimulatedStepExecutor | StepExecutor
    limits: Limits
    pool_bytes: int


def _run(options: argparse.Namespace) -> Iterator[Row]:
    for shape in options.shapes:
        requests = options.requests
        with OtherLoad() as other:
            found = {}
            for way, in_groups in WAYS.items():
                progress(f"{NAME}: {shape}, {way}")
                found[way] = _measure(shape, in_groups, requests, options)
        if found["groups"][1] != found["one_group"][1]:
            raise BenchmarkError(f"{shape}: tokens differ")
        metrics = {f"{way}_{name}": value for way, (each, _) in found.items() for name, value in each.items()}
        params = {
            "shape": shape, "context": options.context, "output": options.output, "requests": requests,
            "pool_contexts": options.pool_contexts, "window": _WINDOW, "step_tokens": _STEP_TOKENS,
            "block_size": _BLOCK_SIZE,
        }  # fmt: skip
        yield make_row(NAME, seed=options.seed, params=params, repeats=[metrics], other_cores=[other.cores])


def _measure(
    shape: str, in_groups: bool, requests: int, options: argparse.Namespace
) -> tuple[dict[str, float], dict[str, list[int]]]:
    """Run all requests; return the metrics, and the tokens of each."""
    with tempfile.TemporaryDirectory(prefix="cadenza-windows-") as place:
        make = _simulated if shape == "12b" else _small
        case = make(in_groups, options, Path(place))
        return _serve(case, requests, options)


def _simulated(in_groups: bool, options: argparse.Namespace, place: Path) -> _PooledExecutor:
    kept = [_WINDOW if in_groups and index % _PATTERN != _PATTERN - 1 else 0 for index in range(_LAYERS)]
    windows = tuple(sorted(set(kept)))
    layers = [LayerKV(8, 256, windows.index(window)) for window in kept]
    layout = KVLayout.of(layers, _BLOCK_SIZE, torch.bfloat16, windows)
    num_blocks = _pool_blocks(options)
    limits = Limits(
        num_slots=128, max_num_seqs=64, max_num_batched_tokens=_STEP_TOKENS,
        max_model_len=options.context + options.output, vocab_size=_VOCAB,
        max_logprobs=0, block_size=_BLOCK_SIZE, num_device_blocks=num_blocks * layout.num_tables,
        num_host_blocks=0, max_inflight_plans=2, kv_groups=layout.groups,
    )  # fmt: skip
    return _PooledExecutor(SimulatedStepExecutor(limits), limits, num_blocks * layout.bytes_per_block)


def _small(in_groups: bool, options: argparse.Namespace, place: Path) -> _PooledExecutor:
    from transformers import AutoConfig

    content = AutoConfig.for_model("gemma3_text", **_SMALL, max_position_embeddings=1 << 17).to_dict()
    content |= {"architectures": ["Gemma3ForCausalLM"], "dtype": "bfloat16"}
    (place / "config.json").write_text(json.dumps(content), encoding="utf-8")
    more: dict[str, Any] = {
        "model": str(place),
        "device": "cpu",
        "load_format": "dummy",
        "seed": options.seed,
        "num_threads": options.threads,
        "block_size": _BLOCK_SIZE,
        "num_gpu_blocks": _pool_blocks(options),
        "max_num_seqs": 64,
        "max_num_batched_tokens": _STEP_TOKENS,
        "max_model_len": options.context + options.output,
        "disable_hybrid_kv_cache_manager": not in_groups,
    }
    config = ExecutorConfig(**more)
    device = make_device(config)
    loaded = load_model(config, device)
    pools = device.new_kv_cache(loaded.geometry, config)
    limits = limits_of(config, loaded.geometry, pools)
    runner = ModelRunner(loaded.model, device, pools, limits)
    return _PooledExecutor(StepExecutor(runner, pools, limits), limits, pools.pool.nbytes)


def _pool_blocks(options: argparse.Namespace) -> int:
    """Blocks of all layers for so many whole contexts."""
    blocks: int = options.pool_contexts * -(-(options.context + options.output) // _BLOCK_SIZE)
    return blocks


def _serve(
    case: _PooledExecutor, requests: int, options: argparse.Namespace
) -> tuple[dict[str, float], dict[str, list[int]]]:
    """Let all requests come at once; the most that decode in one step is what the pool holds."""
    limits, tokens = case.limits, defaultdict[str, list[int]](list)
    without_prefixes: dict[str, Any] = {"enable_prefix_caching": False}
    core = Scheduler(policies_from_options(SchedulerConfig(**without_prefixes)))
    core.add_executor(0, _spec(limits))
    for index in range(requests):
        prompt = tuple((7 + 13 * index + 31 * position) % _VOCAB for position in range(options.context))
        core.add_request(RequestSpec(f"{index}", prompt, SequenceSampling(), options.output), 0.0)
    core.drain(False)
    began, now, steps, most, decoding_bytes = time.perf_counter(), 0.0, 0, 0, 0.0
    page = case.pool_bytes / limits.num_device_blocks
    while core.groups:
        now += 0.001
        plan = core.plan_step(0, now)
        _take(core.take_outputs(), tokens)
        if plan is None:
            raise BenchmarkError("nothing to plan")
        result = case.executor.execute(plan_from_wire(plan_to_wire(plan, 1)), 0)
        running = core.lanes[0].running
        decodes = sum(sequence.num_computed_tokens >= options.context for sequence in running)
        if decodes >= most and decodes == len(running):
            decoding_bytes = page * (limits.num_device_blocks - core.lanes[0].blocks.num_free) / max(1, decodes)
        most = max(most, decodes)
        _take(core.apply_result(0, _read(result), now)[1], tokens)
        steps += 1
    metrics = {
        "requests_at_once": most, "gib_a_request": decoding_bytes / 2**30, "pool_gib": case.pool_bytes / 2**30,
        "steps": steps, "seconds": time.perf_counter() - began,
    }  # fmt: skip
    return metrics, dict(tokens)


def _read(result: StepResult) -> StepResult:
    return result_from_wire(result_to_wire(result, 1, incarnation=1))


def _take(outputs: StepOutputs, tokens: dict[str, list[int]]) -> None:
    for sequence, token_id in zip(outputs.sequences, outputs.token_ids, strict=True):
        tokens[sequence.group.key[1]].append(token_id)


def _spec(limits: Limits) -> ExecutorSpec:
    groups = enumerate(limits.kv_groups)
    return ExecutorSpec(
        block_size=limits.block_size, num_blocks=limits.num_device_blocks, num_slots=limits.num_slots,
        max_num_seqs=limits.max_num_seqs, max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        kv_groups=tuple(KVGroup(index, group.window or None, group.pages_per_block) for index, group in groups),
    )  # fmt: skip


def _describe(row: Row) -> str:
    found = row.medians
    each = (
        f"{way} {found[f'{way}_requests_at_once']:.0f} requests at once, {found[f'{way}_gib_a_request']:.3g} GiB each"
        for way in WAYS
    )
    return f"{row.params['shape']}, {row.params['context']} tokens: {'; '.join(each)}"


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--context", type=positive, default=32_768, help="tokens of a prompt (default 32768)")
    parser.add_argument("--output", type=positive, default=160, help="tokens of an output (default 160)")
    parser.add_argument("--requests", type=positive, default=24, help="that wait (default 24)")
    parser.add_argument("--pool-contexts", type=positive, default=4, help="that fit in one group (default 4)")
    parser.add_argument("--threads", type=positive, default=1, help="of the processor, for small (default 1)")


BENCHMARK = Benchmark(
    NAME, "how much KV memory do long contexts take where layers have windows?", _add_options, _run, _describe
)
