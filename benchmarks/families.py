"""What do the parts of today's dense families cost on the CPU beside Llama's, at equal shapes?

Every family has the shape of 134.5M parameters (30 layers of 576, 9 query and 3 KV heads of 64, a vocabulary of 49,152)
with its own parts on, and random weights; an MLP without gate is 1.5 times as wide, so that weights are equal. Steps of
the model runner, in this process: `decode1` and `decode16` decode at 256 tokens, `prompt` is four prompts of 128. In
each repeat the families take turns, and a ratio is a family's time over Llama's of that repeat.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common.benchmark import Benchmark, positive, progress
from benchmarks.common.checkpoints import SHAPES
from benchmarks.common.forward_step import LoadedRunner, make_runner, step_batch
from benchmarks.common.rows import BenchmarkError, OtherLoad, Row, make_row, wait_quiet
from executor_svc.batch.forward_batch import ForwardBatch

NAME = "families"
LLAMA = "llama"
MEASURES = {"decode1": ([(256, 1)], 8), "decode16": ([(256, 1)] * 16, 4), "prompt": ([(0, 128)] * 4, 1)}
"""By name: sequences as (cached tokens, new tokens), and the steps that are timed together."""
_WIDER = 3 / 2
_WINDOWS = {"sliding_window": 128}
_NEIGHBOURS = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_SCALED = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 2048}
_GEMMA_4: dict[str, Any] = {
    "model_type": "gemma4_text", **_WINDOWS, "global_head_dim": 64, "vocab_size_per_layer_input": 49_152,
    "hidden_size_per_layer_input": 0, "tie_word_embeddings": True,
}  # fmt: skip
"""With heads of one size, so that weights are Llama's."""
FAMILIES: dict[str, dict[str, Any]] = {
    LLAMA: {},
    "apertus": {"without_gate": True},
    "cohere2": {**_WINDOWS, "logit_scale": 0.25},
    "ernie4_5": {"use_bias": True},
    "exaone4": {**_WINDOWS, "sliding_window_pattern": 4},
    "gemma3_text": {**_WINDOWS, "sliding_window_pattern": 6},
    "gemma4_keys_are_values": {**_GEMMA_4, "attention_k_eq_v": True},
    "gemma4_shared_and_inputs": {**_GEMMA_4, "num_kv_shared_layers": 12, "hidden_size_per_layer_input": 64},
    "glm4": {"attention_bias": True, "rope_parameters": _NEIGHBOURS},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.6},
    "hunyuan_v1_dense": {},
    "llama4_text": {"moe_layers": [], "attention_chunk_size": 128},
    "ministral3": {"rope_parameters": {**_SCALED, "llama_4_scaling_beta": 0.1}},
    "nemotron": {"without_gate": True},
    "olmo2": {},
    "phi3": {},
    "qwen3": {},
    "seed_oss": {"attention_bias": True, "attention_out_bias": False},
    "smollm3": {},
    "starcoder2": {"without_gate": True, "use_bias": True},
}
"""By transformers' model_type, or with that: what makes its parts work; `without_gate`: of the MLP.

Gemma 4's shared keys and values are 5 % fewer weights in a layer, its inputs 2 % more of all.
"""


def _run(options: argparse.Namespace) -> Iterator[Row]:
    names = [LLAMA, *(name for name in options.families if name != LLAMA)]
    with tempfile.TemporaryDirectory(prefix="cadenza-families-") as place:
        runners = {name: _runner(Path(place, name), name, options) for name in names}
    for measure, (chunks, steps) in MEASURES.items():
        batches = {name: step_batch(chunks, each.layout) for name, each in runners.items()}
        for name, each in runners.items():
            if not bool(each.runner.forward(batches[name]).isfinite().all()):
                raise BenchmarkError(f"{name}: logits are not finite")
        repeats, others = [], []
        for repeat in range(options.repeats):
            wait_quiet(options.quiet_wait_s)
            order = names[repeat % len(names) :] + names[: repeat % len(names)]
            with OtherLoad() as other:
                taken = {name: _seconds(runners[name], batches[name], steps) for name in order}
            others.append(other.cores)
            ratios = {f"{name}_ratio": taken[name] / taken[LLAMA] for name in names[1:]}
            repeats.append({"llama_ms": 1e3 * taken[LLAMA], **ratios})
            progress(f"{NAME}: {measure}, repeat {repeat + 1}: llama {1e3 * taken[LLAMA]:.2f} ms")
        spread = {name: _quartiles([each[f"{name}_ratio"] for each in repeats]) for name in names[1:]}
        params = {"measure": measure, "shape": options.shape, "threads": options.threads, "quartiles": spread}
        yield make_row(NAME, seed=options.seed, params=params, repeats=repeats, other_cores=others)


def _runner(folder: Path, name: str, options: argparse.Namespace) -> LoadedRunner:
    """Return the family's model with random weights."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    parts = dict(FAMILIES[name])
    kind = parts.pop("model_type", name)
    sizes = {**SHAPES[options.shape], "head_dim": 64, "pad_token_id": 2, "bos_token_id": 0, "eos_token_id": 1}
    if parts.pop("without_gate", False):
        sizes["intermediate_size"] = int(_WIDER * sizes["intermediate_size"])
    if kind == "llama4_text":
        parts["intermediate_size_mlp"] = sizes["intermediate_size"]
    config = AutoConfig.for_model(kind, **{**sizes, **parts}).to_dict()
    folder.mkdir()
    content = {**config, "architectures": [CLASSES[kind]], "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    progress(f"{NAME}: {name}")
    return make_runner(folder, options.threads, more={"load_format": "dummy", "seed": options.seed})


def _seconds(loaded: LoadedRunner, batch: ForwardBatch, steps: int) -> float:
    """Return the seconds of a step."""
    start = time.perf_counter()
    for _ in range(steps):
        loaded.runner.forward(batch)
    return (time.perf_counter() - start) / steps


def _quartiles(values: list[float]) -> list[float]:
    if len(values) < 2:
        return values * 2
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [round(low, 3), round(high, 3)]


def _describe(row: Row) -> str:
    spread = row.params["quartiles"]
    ratios = ", ".join(
        f"{name} {row.medians[f'{name}_ratio']:.3f} ({low:.3f} {high:.3f})" for name, (low, high) in spread.items()
    )
    return f"{row.params['measure']}: llama {row.medians['llama_ms']:.2f} ms; beside it {ratios}"


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--families", nargs="+", choices=sorted(FAMILIES), default=list(FAMILIES), metavar="NAME")
    parser.add_argument("--shape", choices=("10m", "135m"), default="135m", help="sizes of all (default 135m)")
    parser.add_argument("--threads", type=positive, default=1, help="of the processor (default 1)")


BENCHMARK = Benchmark(
    NAME, "what do families' parts cost beside Llama's, at equal shapes?", _add_options, _run, _describe
)
